"""Trains a causal language model with the calls of the library's versions 1.6 to 1.9: smp.save and smp.load.

    torchrun --nproc-per-node 2 examples/train_smp_1_6.py --model_dir MODEL_DIR --checkpoint_dir out \
        --tensor_parallel_degree 2 --max_steps 20

Started again with --load 1 it goes on: from the parts that every rank saved, with --partial 0 from the whole model on rank 0,
which has weights only. The batches are made of a text file, or of random tokens where none is given.
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
    parser.add_argument("--load", type=int, default=0, help="1: go on from the checkpoint in checkpoint_dir")
    parser.add_argument("--partial", type=int, default=1, help="0: the whole model in one file")
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--max_context_width", type=int, default=64)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--checkpoint_freq", type=int, default=5)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--losses", help="file to which rank 0 appends a line `step loss` each step")
    return parser.parse_args()


@smp.step
def train_step(model, input_ids):
    loss = model(input_ids=input_ids, labels=input_ids)["loss"]
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


def unique_parameters(model):
    unique_params = []
    unique_params_set = set()
    for p in model.parameters():
        if p not in unique_params_set:
            unique_params.append(p)
            unique_params_set.add(p)
    return unique_params


def save(args, model, optimizer, total_steps):
    path = os.path.join(args.checkpoint_dir, "checkpoint.pt")
    if args.partial > 0:
        model_dict = model.local_state_dict()
        opt_dict = optimizer.local_state_dict()
        if smp.rdp_rank() == 0:
            smp.save({"model_state_dict": model_dict, "optimizer_state_dict": opt_dict, "total_steps": total_steps}, path, partial=True)
    elif smp.rdp_rank() == 0:
        model_dict = model.state_dict(gather_to_rank0=True)
        if smp.rank() == 0:
            smp.save({"model_state_dict": model_dict, "total_steps": total_steps}, path, partial=False)
    smp.barrier()


def main():
    args = parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))
    smp.init({
        "partitions": args.pipeline_parallel_degree,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "microbatches": args.microbatches,
        "ddp": world_size > args.pipeline_parallel_degree,
    })
    torch.manual_seed(args.seed)
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    os.makedirs(args.checkpoint_dir, exist_ok=True)

    model_config = AutoConfig.from_pretrained(args.model_dir)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        model = AutoModelForCausalLM.from_config(model_config)
    model = smp.DistributedModel(model)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[args.optimizer](unique_parameters(model), lr=args.lr)
    optimizer = smp.DistributedOptimizer(optimizer)

    total_steps = 0
    if args.load > 0:
        checkpoint = smp.load(os.path.join(args.checkpoint_dir, "checkpoint.pt"), partial=args.partial > 0)
        model.load_state_dict(checkpoint["model_state_dict"])
        if args.partial > 0:
            optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        total_steps = checkpoint["total_steps"]
        if smp.rank() == 0:
            print(f"resumed at step {total_steps}", flush=True)

    model.train()
    for input_ids in batches(args, model_config.vocab_size, total_steps):
        optimizer.zero_grad()
        loss = train_step(model, input_ids.to(device)).reduce_mean()
        optimizer.step()
        total_steps += 1
        losses = smp.allgather(loss.item(), smp.DP_GROUP)
        if smp.rank() == 0:
            print(f"step {total_steps} loss {sum(losses) / len(losses):.6f}", flush=True)
            if args.losses:
                with open(args.losses, "a") as file:
                    file.write(f"{total_steps} {sum(losses) / len(losses)!r}\n")
        if total_steps % args.checkpoint_freq == 0 or total_steps == args.max_steps:
            save(args, model, optimizer, total_steps)
    smp.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
