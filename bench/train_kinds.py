"""What bench/train.py measures: each kind makes one training step of one rank, ours and what people write without us.

All take the same model, batch and rates: AdamW with fused=True, ids as labels.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

SEQUENCE = 256
RATE = 1e-5
MICROBATCHES = 8  # of a pipeline
LLAMA = dict(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
             num_key_value_heads=12, max_position_embeddings=1024, tie_word_embeddings=False, use_cache=False)

GPT2 = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)

Step = Callable[[], float]


def build(model: str) -> torch.nn.Module:
    """gpt2: GPT-2 small; llama: a Llama of its size; else a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if model == "gpt2":
        built = GPT2LMHeadModel(GPT2Config(**GPT2))
    elif model == "llama":
        built = LlamaForCausalLM(LlamaConfig(**LLAMA))
    else:
        built = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        built.config.use_cache = False
    return built.train()


def write_config(path: str) -> None:
    """GPT-2 small's, for bench/step.cc."""
    from transformers import GPT2Config

    GPT2Config(**GPT2).to_json_file(path)


def batch_of(model: torch.nn.Module, rows: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (rows, SEQUENCE), generator=torch.Generator().manual_seed(3))


def ours(name: str, rows: int, dtype: str = "fp32", **config) -> Step:
    """dtype: fp32; bf16, weights without masters; masters, bf16 with float32 masters."""
    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": dist_size() > 1, "memory_weight": 0.0, "bf16": dtype == "masters", **config})
    with smp.model_creation(tensor_parallelism=config.get("tensor_parallel_degree", 1) > 1):
        model = build(name)
    if dtype == "bf16":
        model = model.bfloat16()
    ids = batch_of(model, rows)
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=RATE, fused=True))

    @smp.step
    def forward_backward(ids):
        loss = wrapped(input_ids=ids, labels=ids).loss
        wrapped.backward(loss)
        return loss

    def step() -> float:
        loss = forward_backward(ids).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain_step(loss_of: Callable[[], torch.Tensor], *optimizers: torch.optim.Optimizer) -> Step:
    def step() -> float:
        loss = loss_of()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def plain(name: str, rows: int, dtype: str = "fp32", compiled: bool = False) -> Step:
    """transformers' model in a plain loop. dtype: fp32, bf16 weights, autocast."""
    model = build(name)
    if dtype == "bf16":
        model = model.bfloat16()
    ids = batch_of(model, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    forward = torch.compile(model) if compiled else model

    def loss_of() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext():
            return forward(input_ids=ids, labels=ids).loss

    return plain_step(loss_of, optimizer)


def dist_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_gloo() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def blocks(layers: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        y = layer(x)
        x = y[0] if isinstance(y, tuple) else y
    return x


class FirstStage(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, cut: int):
        super().__init__()
        self.wte, self.wpe, self.h = model.transformer.wte, model.transformer.wpe, model.transformer.h[:cut]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return blocks(self.h, self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))


class LastStage(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, cut: int):
        super().__init__()
        self.h, self.ln_f, self.lm_head = model.transformer.h[cut:], model.transformer.ln_f, model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.ln_f(blocks(self.h, x)))


def pipelining(name: str, rows: int) -> Step:
    """torch.distributed.pipelining, 1F1B, GPT-2 cut as ours cuts it. (It doesn't sum the tied embedding's gradients.)"""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    assert name == "gpt2"
    rank, model = start_gloo(), build(name)
    part = (LastStage if rank else FirstStage)(model, partition_of(name)[1])
    del model
    optimizer = torch.optim.AdamW(part.parameters(), lr=RATE, fused=True)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())

    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    ids = torch.randint(50257, (rows, SEQUENCE), generator=torch.Generator().manual_seed(3))

    def step() -> float:
        losses: list[torch.Tensor] = []
        schedule.step(ids) if rank == 0 else schedule.step(target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / MICROBATCHES

    return step


def dtensor(name: str, rows: int) -> Step:
    """DTensor tensor parallelism of a Llama, by the plan of torch's own tutorial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start_gloo()
    model = build(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate())})
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {
            "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()})
    ids = batch_of(model, rows)
    # Its norms are plain tensors, which AdamW can't update in one call with the others.
    sharded = [p for p in model.parameters() if hasattr(p, "placements")]
    others = [p for p in model.parameters() if not hasattr(p, "placements")]
    optimizers = [torch.optim.AdamW(group, lr=RATE, fused=True) for group in (sharded, others) if group]
    return plain_step(lambda: model(input_ids=ids, labels=ids).loss, *optimizers)


def zero(name: str, rows: int) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    start_gloo()
    model = torch.nn.parallel.DistributedDataParallel(build(name))
    ids = batch_of(model.module, rows)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=True)
    return plain_step(lambda: model(input_ids=ids, labels=ids).loss, optimizer)


def sums(name: str, rows: int) -> Step:
    """What tensor parallelism sends in a step, alone: of each layer two sums forward and two backward, one each of
    embedding and head."""
    start_gloo()
    config = build(name).config
    x = torch.zeros(rows, SEQUENCE, config.hidden_size)

    def step() -> float:
        for _ in range(4 * config.num_hidden_layers + 2):
            dist.all_reduce(x)
        return 0.0

    return step


def shards(name: str, rows: int) -> Step:
    """What sharded optimizer state sends in a step, alone, in buckets of 25 MiB."""
    start_gloo()
    elements = sum(p.numel() for p in build(name).parameters())
    size = 25 << 18
    whole, own = torch.zeros(size), torch.zeros(size // 2)

    def step() -> float:
        for _ in range(-(-elements // size)):
            dist.reduce_scatter_tensor(own, whole)
            dist.all_gather_into_tensor(whole, own)
        return 0.0

    return step


def partition_of(name: str) -> list[int]:
    view = view_of(name)
    return list(view.partition(2, 0.0, SEQUENCE))


def balance_of(name: str) -> float:
    view = view_of(name)
    return view.balance(view.partition(2, 0.0, SEQUENCE), 0.0, SEQUENCE)


def view_of(name: str):
    from shardsmith import _core
    from transformers import GPT2Config

    if name == "gpt2":
        return _core.Model(GPT2Config().to_json_string())
    with open(os.path.join(name, "config.json"), encoding="utf-8") as file:
        return _core.Model(file.read())


KINDS: dict[str, Callable[[str, int], Step]] = {
    "eager-fp32": plain,
    "eager-bf16": lambda name, rows: plain(name, rows, "bf16"),
    "eager-autocast": lambda name, rows: plain(name, rows, "autocast"),
    "compiled-fp32": lambda name, rows: plain(name, rows, compiled=True),
    "compiled-bf16": lambda name, rows: plain(name, rows, "bf16", compiled=True),
    "ours-fp32": ours,
    "ours-bf16": lambda name, rows: ours(name, rows, "bf16"),
    "ours-masters": lambda name, rows: ours(name, rows, "masters"),
    "ours-microbatches": lambda name, rows: ours(name, rows, microbatches=MICROBATCHES),
    "ours-microbatches-masters": lambda name, rows: ours(name, rows, "masters", microbatches=MICROBATCHES),
    "ours-stages": lambda name, rows: ours(name, rows, microbatches=MICROBATCHES, pipeline_parallel_degree=2),
    "ours-stages-masters": lambda name, rows: ours(name, rows, "masters", microbatches=MICROBATCHES,
                                                   pipeline_parallel_degree=2),
    "ours-slices": lambda name, rows: ours(name, rows, tensor_parallel_degree=2, prescaled_batch=True),
    "ours-sharded": lambda name, rows: ours(name, rows, shard_optimizer_state=True),
    "pipelining": pipelining,
    "dtensor": dtensor,
    "zero": zero,
    "sums": sums,
    "shards": shards,
}
