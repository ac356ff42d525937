"""torch.optim.AdamW on the CPU in one pass over memory, its state where and as torch keeps it."""
from __future__ import annotations

from collections.abc import Mapping

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


def update(optimizer: torch.optim.AdamW, narrow: Mapping[int, torch.Tensor], gradient_scale: float) -> None:
    """One step. `narrow`: by id of a master, the parameter whose gradient counts and that becomes its rounding."""
    from shardsmith import _engine

    touched = []
    for group in optimizer.param_groups:
        gradients, masters, averages, squares, rounded, steps = [], [], [], [], [], []
        for master in group["params"]:
            param = narrow.get(id(master), master)
            if param.grad is None:
                continue
            entry = optimizer.state[master]
            if not entry:
                entry["step"] = torch.zeros((), dtype=torch.float32)
                entry["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()
                entry["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()
            entry["step"] += 1
            gradients.append(param.grad)
            masters.append(master.detach())
            averages.append(entry["exp_avg"])
            squares.append(entry["exp_avg_sq"])
            rounded.append(param.detach() if param is not master else None)
            steps.append(float(entry["step"]))
            touched += [master] if param is master else [master, param]
        beta1, beta2 = group["betas"]
        _engine.adamw_update(gradients, masters, averages, squares, rounded, steps, lr=float(group["lr"]),
                             beta1=float(beta1), beta2=float(beta2), epsilon=float(group["eps"]),
                             weight_decay=float(group["weight_decay"]), gradient_scale=gradient_scale)
    if touched:
        torch.autograd.graph.increment_version(touched)
    optimizer._opt_called = True  # what a scheduler looks for
