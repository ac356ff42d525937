"""What a run comes to, from config.json alone: degrees, batches, partition, bytes. Imports no torch."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from shardsmith.errors import Error
from shardsmith.finetune.config import FinetuneConfig
from shardsmith.words import human_bytes

_CHECKPOINT_BYTES = 12  # of a parameter: weight or master, and AdamW's two moments, in float32
PARTS = ("weights", "gradients", "masters", "moments", "activations", "working")


@dataclass
class RunPlan:
    world_size: int
    stages: int
    slices: int  # tensor-parallel ranks of a stage
    replicas: int
    microbatches: int
    batch: int  # per replica
    accumulation: int
    sequence: int
    first: list[int]
    parameters: list[int]  # of a rank of each stage, the largest
    total: int  # of the model, ties once
    config_json: str
    checkpoint_bytes: int
    balance: float
    memory: list[dict[str, int]]  # of a rank of each stage, by kind, at the fullest moment

    @property
    def global_batch(self) -> int:
        return self.batch * self.accumulation * self.replicas


def nearest_multiples(number: int, of: int) -> str:
    low, high = number - number % of, number - number % of + of
    return f"{low} or {high}" if low else str(high)


def divisors_near(number: int, wish: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    low = max((d for d in divisors if d < wish), default=None)
    high = min((d for d in divisors if d > wish), default=None)
    return " or ".join(str(d) for d in (low, high) if d is not None)


def read_config_json(folder: str) -> str:
    if not os.path.isdir(folder):
        raise Error("not_found", f"{folder}: no such folder; --model takes a Hugging Face folder")
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        json.loads(text)
    except FileNotFoundError:
        raise Error("not_found", f"{folder} has no config.json: --model takes a Hugging Face folder") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise Error("corrupt", f"{path}: no JSON: {error}") from None
    except OSError as error:
        raise Error("io", f"{path}: {error.strerror}") from None
    return text


def degrees(config: FinetuneConfig, world_size: int) -> tuple[int, int, int]:
    """(stages, tensor-parallel ranks of each, replicas)."""
    stages, slices = config.pipeline_parallel_degree, config.tensor_parallel_degree
    if world_size % (stages * slices):
        asked = f"pipeline_parallel_degree {stages}"
        asked += f" x tensor_parallel_degree {slices} do" if slices > 1 else " does"
        raise Error("invalid_argument", f"{asked} not divide the {world_size} processes: "
                                        f"{nearest_multiples(world_size, stages * slices)} processes would do")
    return stages, slices, world_size // (stages * slices)


def microbatches(config: FinetuneConfig, stages: int) -> int:
    batch = config.per_device_train_batch_size
    wish = config.microbatches
    if wish is None:
        return 1 if stages == 1 else max(d for d in range(1, min(8, batch) + 1) if batch % d == 0)
    if batch % wish:
        raise Error("invalid_argument",
                    f"per_device_train_batch_size {batch} can't be split into {wish} microbatches: nearest that work are "
                    f"{divisors_near(batch, wish)} microbatches, or a batch of {nearest_multiples(batch, wish)}")
    return wish


def make_plan(config: FinetuneConfig, world_size: int, optimize: str = "memory") -> RunPlan:
    """`optimize`: the key of smp.init, whose default the ranks take."""
    from shardsmith import _core

    text = read_config_json(config.model)
    try:
        model = _core.Model(text)
    except Error as error:
        raise Error(error.kind, f"{os.path.join(config.model, 'config.json')}: {error}") from None
    stages, slices, replicas = degrees(config, world_size)
    count = microbatches(config, stages)
    eval_batch = config.per_device_eval_batch_size
    if eval_batch is not None and eval_batch % count:
        raise Error("invalid_argument", f"per_device_eval_batch_size {eval_batch} can't be split into {count} microbatches: "
                                        f"{nearest_multiples(eval_batch, count)} would do")
    positions = model.description["num_positions"]
    sequence = config.max_seq_length or min(positions, 1024)
    if sequence > positions:
        raise Error("invalid_argument", f"max_seq_length {sequence} is above the model's {positions} positions")
    layers = model.description["num_layers"]
    if stages > layers:
        raise Error("invalid_argument", f"pipeline_parallel_degree {stages} is above the model's {layers} layers")
    first = model.partition(stages)  # as the ranks do
    try:
        largest = _core.Model(text, 0, slices)
    except Error as error:
        raise Error(error.kind, f"tensor_parallel_degree: {error}") from None
    sizes = {name: _product(shape) for name, shape, _, _ in largest.tensors}
    parameters = [sum(sizes[name] for name in model.stage_tensors(first, stage)) for stage in range(stages)]
    total = sum(_product(shape) for _, shape, _, _ in model.tensors)
    return RunPlan(world_size, stages, slices, replicas, count, config.per_device_train_batch_size,
                   config.gradient_accumulation_steps, sequence, first, parameters, total, text,
                   total * _CHECKPOINT_BYTES, model.balance(first),
                   [_core.training_memory(
                       model, first, stage, rows=config.per_device_train_batch_size // count, sequence=sequence, tp=slices,
                       rdp=replicas, microbatches=count, pipeline=config.pipeline,
                       active_microbatches=config.active_microbatches or 0,
                       accumulates=config.gradient_accumulation_steps > 1, split_sequence=optimize == "memory",
                       precision="bf16" if config.bf16 else "fp16" if config.fp16 else "fp32",
                       shard_optimizer_state=config.shard_optimizer_state,
                       activation_checkpointing=config.activation_checkpointing)
                    for stage in range(stages)])


def _product(shape: list[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


def batch_sum(plan: RunPlan) -> str:
    split = f", split into {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    return (f"global batch {plan.global_batch} = {plan.batch} per device x {plan.accumulation} accumulation x "
            f"{plan.replicas} data parallel{split}; {plan.global_batch * plan.sequence} tokens")


def describe(plan: RunPlan) -> dict[str, Any]:
    stages = []
    for stage in range(plan.stages):
        begin, end = plan.first[stage], plan.first[stage + 1]
        parts = (["embedding"] if stage == 0 else []) + [f"layers {begin}-{end - 1}" if end - begin > 1 else f"layer {begin}"]
        parts += ["head"] if stage == plan.stages - 1 else []
        memory = plan.memory[stage]
        stages.append({"stage": stage, "holds": parts, "layers": [begin, end], "parameters": plan.parameters[stage],
                       **{f"{part}_bytes": memory[part] for part in PARTS}, "total_bytes": memory["total"]})
    return {"world_size": plan.world_size, "stages": stages, "tensor_parallel_degree": plan.slices,
            "replicas": plan.replicas, "parameters": plan.total,
            "balance": round(plan.balance, 4), "checkpoint_bytes": plan.checkpoint_bytes,
            "global_batch": plan.global_batch, "per_device_train_batch_size": plan.batch,
            "gradient_accumulation_steps": plan.accumulation, "microbatches": plan.microbatches,
            "max_seq_length": plan.sequence}


def lines(plan: RunPlan) -> list[str]:
    told = describe(plan)
    slices = f" x {plan.slices} tensor-parallel ranks" if plan.slices > 1 else ""
    result = [f"{plan.total:,} parameters over {plan.stages} stage{'s' * (plan.stages > 1)}{slices}, {plan.replicas} "
              f"replica{'s' * (plan.replicas > 1)} ({plan.world_size} process{'es' * (plan.world_size > 1)}); "
              f"balance {plan.balance:.2f}"]
    for stage in told["stages"]:
        result.append(f"  stage {stage['stage']}: {', '.join(stage['holds'])}: {stage['parameters']:,} parameters a rank; "
                      f"about {human_bytes(stage['total_bytes'])}: "
                      + ", ".join(f"{part} {human_bytes(size)}" for part in PARTS if (size := stage[f"{part}_bytes"])))
    result.append(f"a checkpoint: {human_bytes(plan.checkpoint_bytes)}")
    result.append(batch_sum(plan))
    return result
