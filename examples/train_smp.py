"""Trains or fine-tunes a causal language model as scripts for the SageMaker model parallelism library do; Shardsmith answers.

    torchrun --nproc-per-node 2 examples/train_smp.py --model_dir MODEL_DIR --checkpoint_dir out \
        --pipeline_parallel_degree 2 --microbatches 4 --max_steps 20

Every rank runs it, started by torchrun or mpiexec. Started again with --load_partial 1 it goes on from the newest partial
checkpoint, with --load_full 1 from the newest full one (--save_full 1), which has weights only. --fine_tune 1 begins with the
weights in the model's folder: each rank reads its own slices of them, or with --delayed_param 1 of a fullmodel.pt that rank 0
writes first. The batches are made of a text file, or of random tokens where none is given.
"""
import argparse
import os

import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import smdistributed.modelparallel.torch as smp


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model_grp = parser.add_argument_group("model")
    model_grp.add_argument("--model_dir", required=True, help="Hugging Face folder")
    model_grp.add_argument("--model_name", help="another one, to fine-tune from")
    model_grp.add_argument("--fine_tune", type=int, default=1, help="0: random weights by the configuration")
    model_grp.add_argument("--max_context_width", type=int, default=64)
    model_grp.add_argument("--fp16", type=int, default=0)
    model_grp.add_argument("--bf16", type=int, default=0)
    for switch in ("alibi", "attention_in_fp32", "residual_addition_in_fp32", "query_key_layer_scaling", "fused_dropout",
                   "fused_bias_gelu", "flash_attention"):
        model_grp.add_argument(f"--{switch}", type=int, default=0)
    model_grp.add_argument("--fused_softmax", type=int, default=1)

    smp_grp = parser.add_argument_group("smp")
    smp_grp.add_argument("--pipeline_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--tensor_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--microbatches", type=int, default=1)
    smp_grp.add_argument("--active_microbatches", type=int, default=None)
    smp_grp.add_argument("--placement_strategy", default="cluster")
    smp_grp.add_argument("--optimize", default="memory")
    smp_grp.add_argument("--prescaled_batch", type=int, default=0)
    smp_grp.add_argument("--shard_optimizer_state", type=int, default=0)
    smp_grp.add_argument("--delayed_param", type=int, default=0)
    smp_grp.add_argument("--activation_checkpointing", type=int, default=0)
    smp_grp.add_argument("--activation_strategy", default="each")
    smp_grp.add_argument("--use_distributed_transformer", type=int, default=0, help="1: also without tensor parallelism")

    io_grp = parser.add_argument_group("io")
    io_grp.add_argument("--data", help="text file; its bytes are the tokens (default: random tokens)")
    io_grp.add_argument("--checkpoint_dir", required=True)
    io_grp.add_argument("--checkpoint_freq", type=int, default=5)
    io_grp.add_argument("--num_kept_checkpoints", type=int, default=5)
    io_grp.add_argument("--load_partial", type=int, default=0, help="1: go on from the newest partial checkpoint")
    io_grp.add_argument("--load_full", type=int, default=0, help="1: go on from the newest full checkpoint")
    io_grp.add_argument("--save_full", type=int, default=0, help="1: full checkpoints instead of partial ones")
    io_grp.add_argument("--losses", help="file to which rank 0 appends a line `step loss` each step")

    train_grp = parser.add_argument_group("training")
    train_grp.add_argument("--train_batch_size", type=int, default=8, help="of a rank that feeds the model")
    train_grp.add_argument("--gradient_accumulation", type=int, default=1)
    train_grp.add_argument("--max_steps", type=int, default=20)
    train_grp.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    train_grp.add_argument("--lr", type=float, default=1e-3)
    train_grp.add_argument("--grad_clip", type=float, default=1.0)
    train_grp.add_argument("--seed", type=int, default=12345)
    return parser.parse_args()


@smp.step
def train_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def batches(args, vocab_size, start):
    """Batch i depends on (seed, i) only, so that a resumed run sees what it would have seen."""
    text = None
    if args.data:
        with open(args.data, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long() % vocab_size
    # With a prescaled batch the ranks of one tensor-parallel group get the same rows.
    feeders, feeder = (smp.rdp_size(), smp.rdp_rank()) if args.prescaled_batch > 0 else (smp.dp_size(), smp.dp_rank())
    global_batch = args.train_batch_size * feeders
    for number in range(start, args.max_steps * args.gradient_accumulation):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
        if text is None:
            rows = torch.randint(0, vocab_size, (global_batch, args.max_context_width), generator=generator)
        else:
            begins = torch.randint(0, len(text) - args.max_context_width, (global_batch,), generator=generator)
            rows = torch.stack([text[b:b + args.max_context_width] for b in begins.tolist()])
        mine = feeder * args.train_batch_size
        yield rows[mine:mine + args.train_batch_size]


def main():
    args = parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))
    smp_config = {
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "microbatches": args.microbatches,
        "placement_strategy": args.placement_strategy,
        "optimize": args.optimize,
        "ddp": world_size > args.pipeline_parallel_degree,
        "prescaled_batch": args.prescaled_batch > 0,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches
    smp.init(smp_config)
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())

    dtype = torch.float16 if args.fp16 > 0 else torch.bfloat16 if args.bf16 > 0 else torch.float32
    model_config = AutoConfig.from_pretrained(args.model_dir)

    if args.fine_tune > 0 and args.delayed_param > 0:
        if smp.rank() == 0:
            pretrained_model = AutoModelForCausalLM.from_pretrained(args.model_name or args.model_dir)
            os.makedirs(args.checkpoint_dir, exist_ok=True)
            torch.save(pretrained_model.state_dict(), os.path.join(args.checkpoint_dir, "fullmodel.pt"))
            del pretrained_model
        smp.barrier()

    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        zero_init=args.use_distributed_transformer == 0,
        dtype=dtype,
        distribute_embedding=args.sharded_data_parallel_degree > 1 and smp.tp_size() > 1,
        use_alibi=args.alibi > 0,
        attention_in_fp32=args.attention_in_fp32 > 0,
        fp32_residual_addition=args.residual_addition_in_fp32 > 0,
        query_key_layer_scaling=args.query_key_layer_scaling > 0 and args.bf16 < 1,
        fused_softmax=args.fused_softmax > 0,
        fused_dropout=args.fused_dropout > 0,
        fused_bias_gelu=args.fused_bias_gelu > 0,
        flash_attention=args.flash_attention > 0,
    ):
        if args.fine_tune > 0 and args.delayed_param == 0:
            model = AutoModelForCausalLM.from_pretrained(args.model_name or args.model_dir)
        else:
            model = AutoModelForCausalLM.from_config(model_config)

    model = smp.DistributedModel(
        model, trace_device="gpu" if torch.cuda.is_available() else "cpu",
        backward_passes_per_step=args.gradient_accumulation,
    )
    if args.activation_checkpointing > 0:
        module = model.get_module()
        layers = getattr(module, "transformer", None) or getattr(module, "gpt_neox", None) or module.model
        for name in ("seq_layers", "h", "layers"):
            if hasattr(layers, name):
                smp.set_activation_checkpointing(getattr(layers, name), strategy=args.activation_strategy)
                break

    num_params = sum(numpy.prod(p.size()) for p in model.get_module().parameters())
    no_decay = ("bias", "norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    parameters = list(model.get_module().named_parameters())
    groups = [
        {"params": [p for n, p in parameters if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in parameters if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = (torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.SGD)(groups, lr=args.lr)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    if args.fine_tune > 0 and args.delayed_param > 0:
        smp.resume_from_checkpoint(args.checkpoint_dir, tag="fullmodel.pt", partial=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 100))

    total_steps = 0
    if args.load_partial > 0 or args.load_full > 0:
        user_content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=args.load_partial > 0)
        total_steps = user_content["total_steps"]
        scheduler.load_state_dict(user_content["lr_scheduler"])
        if smp.rank() == 0:
            print(f"resumed at step {total_steps}", flush=True)

    model.train()
    micro_steps = 0
    for input_ids in batches(args, model_config.vocab_size, total_steps * args.gradient_accumulation):
        if smp.pp_rank() != 0:  # only the first stage's batch is looked at
            input_ids = torch.empty(len(input_ids), 0)
        if micro_steps == 0:
            optimizer.zero_grad(set_to_none=True)
            running = 0.0
        loss = train_step(model, input_ids, torch.ones_like(input_ids)).reduce_mean()
        running += loss.item() / args.gradient_accumulation
        micro_steps = (micro_steps + 1) % args.gradient_accumulation
        if micro_steps != 0:
            continue
        if args.grad_clip > 0:
            optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        if not (args.fp16 > 0 and optimizer.overflow):
            scheduler.step()
        total_steps += 1
        losses = smp.allgather(running, smp.CommGroup.DP_GROUP)
        if smp.rank() == 0:
            print(f"step {total_steps} loss {sum(losses) / len(losses):.6f}", flush=True)
            if args.losses:
                with open(args.losses, "a") as file:
                    file.write(f"{total_steps} {sum(losses) / len(losses)!r}\n")
        if total_steps % args.checkpoint_freq == 0 or total_steps == args.max_steps:
            smp.save_checkpoint(
                path=args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=args.save_full == 0,
                model=model,
                optimizer=optimizer,
                user_content={
                    "cli_args": args.__dict__,
                    "total_steps": total_steps,
                    "lr_scheduler": scheduler.state_dict(),
                    "num_params": num_params,
                    "model_config": model_config,
                },
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    smp.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
