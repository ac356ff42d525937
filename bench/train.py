"""Training speed, each figure as a ratio measured in this one run: medians over alternating pairs, with their spread.

  one process   tokens/s of smp with one stage over a plain PyTorch loop of transformers' model with fused AdamW: same
                weights, batch, dtype and 2 threads, both in one process, step by step in turn.
  two stages    tokens/s of two stages with one thread each over one process with one thread, at 8 microbatches, and the
                bound: balance x m / (m + p - 1) x the scaling of two independent processes.
                balance: mean / max of the stages' multiply-adds; scaling: two such processes at once over one alone.

    .venv/bin/python bench/train.py --model gpt2            # GPT-2 small, random weights
    .venv/bin/python bench/train.py --model out/demo/model  # a Hugging Face folder
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SEQUENCE = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="gpt2 (small, random weights) or a Hugging Face folder")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 256 tokens in one process")
    parser.add_argument("--pipeline-batch", type=int, default=8, help="the same with two stages, in 8 microbatches")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that don't count")
    parser.add_argument("--only", default="fp32,bf16,stages-fp32,stages-bf16")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(model: str):
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if model == "gpt2":
        built = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
    else:
        built = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        built.config.use_cache = False
    return built.train()


def autocast(dtype: str):
    import torch

    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def plain_step(model, dtype: str, ids):
    """The peer: what people write without us."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> float:
        with autocast(dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def smp_step(model, dtype: str, ids, **config):
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "memory_weight": 0.0, **config})
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-5, fused=True))

    @smp.step
    def forward_backward(ids):
        loss = wrapped(input_ids=ids, labels=ids).loss
        wrapped.backward(loss)
        return loss

    def step() -> float:
        with autocast(dtype):
            loss = forward_backward(ids).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def timed(step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class Worker:
    """A process of this script that makes steps when told to: one number of seconds a line."""

    def __init__(self, args: argparse.Namespace, kind: str, threads: int, environment: dict[str, str] | None = None):
        command = [sys.executable, os.path.abspath(__file__), "--worker", kind, "--model", args.model,
                   "--batch", str(args.batch), "--pipeline-batch", str(args.pipeline_batch), "--warm-up", str(args.warm_up)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})})

    def ask(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def answer(self) -> list[float]:
        for line in self.process.stdout:
            if line.startswith("SECONDS "):
                return [float(word) for word in line.split()[1:]]
        raise SystemExit(f"a worker ended: exit code {self.process.wait()}")

    def seconds(self) -> list[float]:
        self.ask("step")
        return self.answer()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve(steps: list, warm_up: int) -> None:
    """Worker's side: after a warm-up, one step of each kind per line read."""
    for _ in range(warm_up):
        for step in steps:
            step()
    print("SECONDS 0", flush=True)
    for _ in sys.stdin:
        print("SECONDS", *[timed(step) for step in steps], flush=True)


def worker(args: argparse.Namespace) -> None:
    import torch

    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    kind, dtype = args.worker.split("-")
    model = build(args.model)
    batch = args.batch if kind == "pair" else args.pipeline_batch
    ids = torch.randint(model.config.vocab_size, (batch, SEQUENCE))
    if kind == "pair":
        twin = copy.deepcopy(model)
        serve([plain_step(twin, dtype, ids), smp_step(model, dtype, ids)], args.warm_up)
    elif kind == "one":
        serve([smp_step(model, dtype, ids, microbatches=8)], args.warm_up)
    else:
        serve([smp_step(model, dtype, ids, microbatches=8, pipeline_parallel_degree=2)],
              args.warm_up)


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(name: str, values: list[float], digits: int = 3) -> dict[str, float]:
    s = summary(values)
    print(f"  {name:<58} {s['median']:.{digits}f}  ({s['min']:.{digits}f} to {s['max']:.{digits}f})", flush=True)
    return s


def one_process(args: argparse.Namespace, dtype: str) -> dict:
    print(f"{args.model}, one process, 2 threads, {dtype}, batch {args.batch} x {SEQUENCE}", flush=True)
    pair = Worker(args, f"pair-{dtype}", 2)
    pair.answer()
    seconds = [pair.seconds() for _ in range(args.pairs)]
    pair.end()
    tokens = args.batch * SEQUENCE
    return {
        "transformers_tokens_per_s": show("transformers, tokens/s", [tokens / s[0] for s in seconds], 0),
        "shardsmith_tokens_per_s": show("shardsmith, tokens/s", [tokens / s[1] for s in seconds], 0),
        "ratio": show("ratio (bar: 1.0)", [s[0] / s[1] for s in seconds]),
    }


def balance(model: str) -> float:
    from shardsmith import _core

    if model == "gpt2":
        from transformers import GPT2Config

        text = GPT2Config().to_json_string()
    else:
        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            text = file.read()
    view = _core.Model(text)
    return view.balance(view.partition(2, 0.0, SEQUENCE), 0.0, SEQUENCE)


def free_port() -> str:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def two_stages(args: argparse.Namespace, dtype: str) -> dict:
    print(f"{args.model}, two stages with 1 thread each, {dtype}, batch {args.pipeline_batch} x {SEQUENCE}, "
          "8 microbatches", flush=True)
    one, other = Worker(args, f"one-{dtype}", 1), Worker(args, f"one-{dtype}", 1)
    port = free_port()
    stages = [Worker(args, f"stages-{dtype}", 1,
                     {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for r in range(2)]
    for w in [one, other, *stages]:
        w.answer()
    alone, scaling, ratios, bounds, fractions, rates = [], [], [], [], [], []
    balanced, bubble = balance(args.model), 8 / 9
    for _ in range(args.pairs):
        single = one.seconds()[0]
        for w in (one, other):
            w.ask("step")
        both = [w.answer()[0] for w in (one, other)]
        for w in stages:
            w.ask("step")
        piped = max(w.answer()[0] for w in stages)
        alone.append(single)
        scaling.append(sum(single / s for s in both))
        ratios.append(single / piped)
        rates.append(args.pipeline_batch * SEQUENCE / piped)
        bounds.append(balanced * bubble * scaling[-1])
        fractions.append(ratios[-1] / bounds[-1])
    for w in [one, other, *stages]:
        w.end()
    print(f"  balance {balanced:.3f}, bubble 8/9 = {bubble:.3f}")
    return {
        "balance": balanced,
        "two_stages_tokens_per_s": show("two stages, tokens/s", rates, 0),
        "scaling": show("scaling of two independent processes", scaling),
        "ratio": show("two stages over one process", ratios),
        "bound": show("bound: balance x bubble x scaling", bounds),
        "of_bound": show("of the bound (bar: 0.85)", fractions),
    }


def main() -> None:
    args = arguments()
    sys.path.insert(0, os.path.join(ROOT, "python"))
    if args.worker:
        return worker(args)
    result = {"model": args.model, "pairs": args.pairs}
    for part in args.only.split(","):
        kind, _, dtype = part.rpartition("-")
        result[part] = two_stages(args, dtype) if kind else one_process(args, dtype)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
