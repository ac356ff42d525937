"""The memory that training takes beside the estimate of `finetune --dry-run`, by layout and stage.

Measured: a rank's largest resident memory during steps 2 and 3 (the kernel's VmHWM, set anew after step 1), less what was
resident before the model was made, with all modules imported and smp initialised. The ranks are `finetune`'s own: its worker's
code on random tokens, under its launcher, with the environment that it gives (no variables for malloc, OMP_NUM_THREADS: cores
over processes). The bar: the estimate within 15 % of it, for every layout and stage.

    .venv/bin/python bench/memory.py                                # all layouts, GPT-2 small and a Llama of its size
    .venv/bin/python bench/memory.py --only gpt2:pp2,llama:one-bf16 --json out.json
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python"))
MIB = 1 << 20
BAR = 0.15
SEQUENCE = 256

# Options of finetune; "optimize" is a key of smp.init that finetune leaves as it is ("memory").
LAYOUTS: dict[str, dict[str, Any]] = {
    "one-fp32": {},
    "one-bf16": {"bf16": True},
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 4, "per_device_train_batch_size": 8},
    "tp2": {"tensor_parallel_degree": 2, "optimize": "speed"},
    "tp2-memory": {"tensor_parallel_degree": 2},
    "rdp2-shard-bf16": {"nproc_per_node": 2, "bf16": True, "shard_optimizer_state": True},
    "one-checkpointed": {"activation_checkpointing": "each"},
}
MODELS = ("gpt2", "llama")


def make_model(kind: str, folder: str) -> None:
    """Random weights. GPT-2 small as it is, with dropout; a Llama of its layers and width."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()) if kind == "gpt2" else LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=False))
    model.save_pretrained(folder)


def resident(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def config_of(model: str, layout: dict[str, Any]) -> Any:
    from shardsmith.finetune.config import FinetuneConfig

    options = {"per_device_train_batch_size": 4, **{k: v for k, v in layout.items() if k != "optimize"}}
    return FinetuneConfig(model=model, data=["none"], output_dir="none", max_steps=3, max_seq_length=SEQUENCE, **options)


def ranks_of(layout: dict[str, Any]) -> int:
    slices = layout.get("pipeline_parallel_degree", 1) * layout.get("tensor_parallel_degree", 1)
    return layout.get("nproc_per_node", slices)


def rank(given: str) -> None:
    """One rank: finetune's, with random tokens for its data."""
    import numpy
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    from shardsmith.finetune import data, worker

    with open(given, encoding="utf-8") as file:
        told = json.load(file)
    run = worker.Run(config_of(told["model"], told["layout"]), worker.Stop())
    count = 64
    tokens = numpy.random.default_rng(0).integers(0, told["vocabulary"], (count, SEQUENCE), dtype=numpy.int32)
    run.sequences, run.training, run.evaluation, run.digest = data.Sequences(tokens, 1, ""), count - 1, 1, ""
    run.order = data.Order(count - 1, 1)
    before = resident("VmRSS")
    run.build()
    run.update(3)
    reset_peak()
    run.update(3)
    run.update(3)
    with open(os.path.join(told["folder"], f"rank{run.rank}.json"), "w", encoding="utf-8") as file:
        json.dump({"stage": run.smp.pp_rank(), "measured": resident("VmHWM") - before}, file)
    worker._leave_group()


def estimates(model: str, layout: dict[str, Any]) -> list[dict[str, int]]:
    """By stage, as --dry-run says it."""
    from shardsmith.finetune import plan

    return plan.make_plan(config_of(model, layout), ranks_of(layout), layout.get("optimize", "memory")).memory


def measure(model: str, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """The rank of each stage that takes most, with its estimate."""
    from shardsmith.launcher.local import Launcher

    world = ranks_of(layout)
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        vocabulary = json.load(file)["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        given = os.path.join(folder, "told.json")
        with open(given, "w", encoding="utf-8") as file:
            json.dump({"layout": layout, "model": model, "vocabulary": vocabulary, "folder": folder}, file)
        environment = {"PYTHONPATH": os.path.join(ROOT, "python"), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        if "optimize" in layout:
            environment["SM_HP_MP_PARAMETERS"] = json.dumps({"optimize": layout["optimize"]})
        threads = max(1, len(os.sched_getaffinity(0)) // world)
        outcome = Launcher([sys.executable, os.path.abspath(__file__), "--rank", given], world, threads,
                           environment=environment).run()
        if outcome.exit_code:
            raise SystemExit(f"{layout}: {outcome.error}")
        found: dict[int, int] = {}
        for number in range(world):
            with open(os.path.join(folder, f"rank{number}.json"), encoding="utf-8") as file:
                told = json.load(file)
            found[told["stage"]] = max(found.get(told["stage"], 0), told["measured"])
    return [{"stage": stage, "measured": found[stage], "estimate": memory["total"], "parts": memory,
             "ratio": memory["total"] / found[stage]} for stage, memory in enumerate(estimates(model, layout))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(f"{model}:{name}" for model in MODELS for name in LAYOUTS))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for word in args.only.split(","):
            kind, _, name = word.partition(":")
            model = os.path.join(folder, kind)
            if not os.path.isdir(model):
                make_model(kind, model)
            results[word] = measure(model, LAYOUTS[name])
            for stage in results[word]:
                parts = ", ".join(f"{part} {size // MIB}" for part, size in stage["parts"].items() if size and part != "total")
                print(f"{word:<24} stage {stage['stage']}  estimate {stage['estimate'] / MIB:6.0f} MiB  measured "
                      f"{stage['measured'] / MIB:6.0f} MiB  ratio {stage['ratio']:.3f}  ({parts})", flush=True)
                if abs(stage["ratio"] - 1) > BAR:
                    missed.append(f"{word} stage {stage['stage']}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    print(f"off by more than {BAR:.0%}: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2])
    else:
        sys.exit(main())
