"""torch.optim.AdamW on the CPU in one pass over memory, its state where and as torch keeps it."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `update` does what optimizer.step() would: plain AdamW on float32 CPU tensors, and nobody listens."""
    if type(optimizer) is not torch.optim.AdamW or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    from torch.optim import optimizer as module

    if module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks:
        return False
    own = optimizer.__dict__.get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return False
    for group in optimizer.param_groups:
        if any(group[key] for key in ("amsgrad", "maximize", "capturable", "differentiable", "foreach")):
            return False
        if group["fused"] is False:
            return False
        for param in group["params"]:
            if param.device.type != "cpu" or param.dtype != torch.float32 or not _is_dense(param):
                return False
            if param.grad is not None and param.grad.layout != torch.strided:
                return False
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class Source(NamedTuple):
    """What an update of a parameter needs besides its own memory."""

    gradient: torch.Tensor | None
    rounded: torch.Tensor | None  # becomes the rounded master
    param: torch.Tensor  # of the model, whose memory changes
    bucket: int  # updates come in the order of these


def update(optimizer: torch.optim.AdamW, sources: Mapping[int, Source], gradient_scale: float, buckets: int = 1,
           done: Callable[[int], None] | None = None) -> None:
    """One step. `sources`: by id of a parameter; others have gradients of their own. `done(bucket)` is called after each."""
    touched: list[torch.Tensor] = []
    todo: list[list[tuple[dict[str, Any], list[tuple[torch.Tensor, Source]]]]] = [[] for _ in range(buckets)]
    for group in optimizer.param_groups:
        of_group: dict[int, list[tuple[torch.Tensor, Source]]] = {}
        for master in group["params"]:
            source = sources.get(id(master)) or Source(master.grad, None, master, 0)
            if source.gradient is not None:
                of_group.setdefault(source.bucket, []).append((master, source))
                touched += [master] if source.param is master else [master, source.param]
        for bucket, entries in of_group.items():
            todo[bucket].append((group, entries))
    for bucket, groups in enumerate(todo):
        for group, entries in groups:
            _update_group(optimizer, group, entries, gradient_scale)
        if done is not None:
            done(bucket)
    if touched:
        torch.autograd.graph.increment_version(touched)
    optimizer._opt_called = True  # what a scheduler looks for


def _update_group(optimizer: torch.optim.AdamW, group: dict[str, Any], entries: list[tuple[torch.Tensor, Source]],
                  gradient_scale: float) -> None:
    from shardsmith import _engine

    averages, squares, steps = [], [], []
    for master, _ in entries:
        entry = optimizer.state[master]
        if not entry:
            entry["step"] = torch.zeros((), dtype=torch.float32)
            entry["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()
            entry["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()
        entry["step"] += 1
        averages.append(entry["exp_avg"])
        squares.append(entry["exp_avg_sq"])
        steps.append(float(entry["step"]))
    beta1, beta2 = group["betas"]
    _engine.adamw_update([source.gradient for _, source in entries], [master.detach() for master, _ in entries], averages,
                         squares, [source.rounded for _, source in entries], steps, lr=float(group["lr"]),
                         beta1=float(beta1), beta2=float(beta2), epsilon=float(group["eps"]),
                         weight_decay=float(group["weight_decay"]), gradient_scale=gradient_scale)
