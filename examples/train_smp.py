"""Trains a causal language model as scripts for the SageMaker model parallelism library do; Shardsmith answers.

    torchrun --nproc-per-node 2 examples/train_smp.py --model_dir MODEL_DIR --checkpoint_dir out \
        --pipeline_parallel_degree 2 --microbatches 4 --max_steps 20

Every rank runs it. Started again with --load_partial 1 it goes on from the newest checkpoint. The batches are made of a
text file, or of random tokens where none is given.
"""
import argparse
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import smdistributed.modelparallel.torch as smp


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", required=True, help="Hugging Face folder")
    parser.add_argument("--data", help="text file; its bytes are the tokens (default: random tokens)")
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--fine_tune", type=int, default=1, help="0: random weights by the configuration")
    parser.add_argument("--load_partial", type=int, default=0, help="1: go on from the newest partial checkpoint")
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=8, help="of a replica")
    parser.add_argument("--max_context_width", type=int, default=64)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--checkpoint_freq", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--delayed_param", type=int, default=0)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--losses", help="file to which rank 0 appends a line `step loss` each step")
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
    global_batch = args.train_batch_size * smp.dp_size()
    for number in range(start, args.max_steps):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
        if text is None:
            rows = torch.randint(0, vocab_size, (global_batch, args.max_context_width), generator=generator)
        else:
            begins = torch.randint(0, len(text) - args.max_context_width, (global_batch,), generator=generator)
            rows = torch.stack([text[b:b + args.max_context_width] for b in begins.tolist()])
        mine = smp.dp_rank() * args.train_batch_size
        yield rows[mine:mine + args.train_batch_size]


def main():
    args = parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    smp.init({
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "ddp": world_size > args.pipeline_parallel_degree,
        "delayed_parameter_initialization": args.delayed_param > 0,
    })
    torch.manual_seed(args.seed)

    model_config = AutoConfig.from_pretrained(args.model_dir)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.float32, flash_attention=False):
        if args.fine_tune > 0:
            model = AutoModelForCausalLM.from_pretrained(args.model_dir)
        else:
            model = AutoModelForCausalLM.from_config(model_config)
    model = smp.DistributedModel(model, trace_device="cpu")

    no_decay = ("bias", "norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    parameters = list(model.get_module().named_parameters())
    optimizer = torch.optim.AdamW([
        {"params": [p for n, p in parameters if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in parameters if n.endswith(no_decay)], "weight_decay": 0.0},
    ], lr=args.lr)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 100))

    total_steps = 0
    if args.load_partial > 0:
        user_content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        total_steps = user_content["total_steps"]
        scheduler.load_state_dict(user_content["lr_scheduler"])
        if smp.rank() == 0:
            print(f"resumed at step {total_steps}", flush=True)

    model.train()
    for input_ids in batches(args, model_config.vocab_size, total_steps):
        if smp.pp_rank() != 0:  # only the first stage's batch is looked at
            input_ids = torch.empty(len(input_ids), 0)
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, input_ids, torch.ones_like(input_ids)).reduce_mean()
        if args.grad_clip > 0:
            optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        scheduler.step()
        total_steps += 1
        losses = smp.allgather(loss.item(), smp.CommGroup.DP_GROUP)
        if smp.rank() == 0:
            print(f"step {total_steps} loss {sum(losses) / len(losses):.6f}", flush=True)
            if args.losses:
                with open(args.losses, "a") as file:
                    file.write(f"{total_steps} {sum(losses) / len(losses)!r}\n")
        if total_steps % args.checkpoint_freq == 0 or total_steps == args.max_steps:
            smp.save_checkpoint(
                path=args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={
                    "cli_args": args.__dict__,
                    "total_steps": total_steps,
                    "lr_scheduler": scheduler.state_dict(),
                    "model_config": model_config,
                },
                num_kept_partial_checkpoints=5,
            )
    smp.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
