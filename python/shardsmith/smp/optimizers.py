"""`smp.optimizers`: LAMB and NovoGrad with the interface of NVIDIA apex's fused ones, in torch's own operations.

Both look at norms of whole tensors. Where a tensor is spread over tensor-parallel ranks, or the optimizer's state over
replicas, the norms are brought together: every rank of those groups must make the same steps."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardsmith.errors import Error
from shardsmith.smp.session import state


def _check(name: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, amsgrad: bool) -> None:
    if amsgrad:
        raise Error("unsupported", f"{name}(amsgrad=True): there is no such variant")
    if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise Error("invalid_argument", f"{name}: lr, eps and weight_decay must be at least 0, betas in [0, 1); they are {lr}, {eps}, "
                                        f"{weight_decay} and {betas}")


def whole_norms(values: dict[torch.Tensor, torch.Tensor], maximum: bool = False) -> dict[torch.Tensor, torch.Tensor]:
    """Norms (L2, or the largest magnitude) of the whole tensors that each parameter's value is a part of: scalars."""
    model = state.model
    names = {} if model is None else {id(p): name for name, p in model.optimized.items()}
    spread = model is not None and (state.mesh.tp_size > 1 or model.shards is not None)

    def of(value: torch.Tensor) -> torch.Tensor:
        wide = value.detach().float()
        return wide.abs().max() if maximum and wide.numel() else wide.square().sum()

    if not spread:
        return {p: of(value) if maximum else of(value).sqrt() for p, value in values.items()}
    every = list(model._local)  # the same on all ranks of the groups
    sums = torch.zeros(len(every), dtype=torch.float64)
    place = {name: i for i, name in enumerate(every)}
    rank = state.group_rank("tp")
    for p, value in values.items():
        if id(p) not in names:
            continue
        own = [of(piece.read(value)) for piece in model.optimized_pieces(names[id(p)]) if piece.is_stored_by(rank)]
        if own:
            sums[place[names[id(p)]]] = float(torch.stack(own).max() if maximum else torch.stack(own).sum())
    kinds = [kind for kind, size in (("tp", state.mesh.tp_size), ("rdp", state.mesh.rdp_size)) if size > 1]
    for kind in kinds if model.shards is not None else ["tp"]:
        dist.all_reduce(sums, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=state.groups[kind])
    norms = sums if maximum else sums.sqrt()
    return {p: norms[place[names[id(p)]]].to(p.device, torch.float32) for p in values if id(p) in names}


def _global_norm(gradients: Iterable[torch.Tensor]) -> float:
    model = state.model
    if model is None or not model.partitioned:
        return math.sqrt(sum(float(g.detach().float().square().sum(dtype=torch.float64)) for g in gradients))
    norm = float(model.guarded(model.stage.grad_norm))
    return norm if model.masters is None else norm / state.optimizer.loss_scale


class _Fused(torch.optim.Optimizer):
    """What apex's optimizers have in common: set_grad_none, and that a step is one for all parameters."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update([(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None])
        return loss

    def _update(self, params: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Of those that have a gradient, each with its group."""
        raise NotImplementedError


class FusedLAMB(_Fused):
    """You et al., "Large batch optimization for deep learning": Adam's update of each tensor, scaled by ||w|| / ||update||
    (of tensors with weight decay; with use_nvlamb of all). Gradients are first clipped to max_grad_norm over all of the
    model. adam_w_mode: weight decay is added to the update, else to the gradient."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False, adam_w_mode: bool = True,
                 grad_averaging: bool = True, set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False):
        _check("FusedLAMB", lr, betas, eps, weight_decay, amsgrad)
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=tuple(betas), eps=eps, weight_decay=weight_decay,
                        grad_averaging=grad_averaging, max_grad_norm=max_grad_norm)
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none, self.use_nvlamb = adam_w_mode, set_grad_none, use_nvlamb

    def _update(self, params: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        limit = self.param_groups[0]["max_grad_norm"] if self.param_groups else 0
        norm = _global_norm(p.grad for _, p in params) if limit and limit > 0 else 0.0
        clip = norm / limit if limit and norm > limit else 1.0
        updates: dict[torch.Tensor, torch.Tensor] = {}
        for group, p in params:
            beta1, beta2 = group["betas"]
            entry = self.state[p]
            if not entry:
                entry["step"] = torch.tensor(0.0)
                entry["exp_avg"], entry["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            entry["step"] += 1
            count = float(entry["step"])
            gradient = p.grad / clip if clip != 1 else p.grad
            if not self.adam_w_mode and group["weight_decay"]:
                gradient = gradient + group["weight_decay"] * p
            entry["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            entry["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            first, second = (1 - beta1**count, 1 - beta2**count) if group["bias_correction"] else (1.0, 1.0)
            update = (entry["exp_avg"] / first).div_((entry["exp_avg_sq"] / second).sqrt_().add_(group["eps"]))
            if self.adam_w_mode and group["weight_decay"]:
                update.add_(p, alpha=group["weight_decay"])
            updates[p] = update
        weights = whole_norms({p: p for p in updates})
        sizes = whole_norms(updates)
        for group, p in params:
            scaled = self.use_nvlamb or group["weight_decay"] != 0
            has_ratio = scaled and float(weights[p]) > 0 and float(sizes[p]) > 0
            ratio = float(weights[p]) / float(sizes[p]) if has_ratio else 1.0
            p.add_(updates[p], alpha=-group["lr"] * ratio)


FusedLamb = FusedLAMB  # as the documentation spells it too


class FusedNovoGrad(_Fused):
    """Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments": gradients are divided by a running
    norm of their tensor (norm_type 2, or 0 for the largest magnitude). reg_inside_moment: weight decay and that division
    come before the first moment, else after it. init_zero: the running norm begins with 0, else with the first norm."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, reg_inside_moment: bool = False,
                 grad_averaging: bool = True, norm_type: int = 2, init_zero: bool = False, set_grad_none: bool = True):
        _check("FusedNovoGrad", lr, betas, eps, weight_decay, amsgrad)
        if norm_type not in (0, 2):
            raise Error("invalid_argument", f"FusedNovoGrad: norm_type is {norm_type}, it can be 2 or 0 (the largest magnitude)")
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=tuple(betas), eps=eps, weight_decay=weight_decay,
                        grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero)
        super().__init__(params, defaults)
        self.reg_inside_moment, self.set_grad_none = reg_inside_moment, set_grad_none

    def _update(self, params: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        norms: dict[torch.Tensor, torch.Tensor] = {}
        for kind in (0, 2):
            norms |= whole_norms({p: p.grad for group, p in params if group["norm_type"] == kind}, maximum=kind == 0)
        for group, p in params:
            beta1, beta2 = group["betas"]
            entry, norm = self.state[p], float(norms[p])
            if not entry:
                entry["step"], entry["exp_avg"] = torch.tensor(0.0), torch.zeros_like(p)
                entry["exp_avg_norm"] = torch.tensor(0.0 if group["init_zero"] else norm, dtype=torch.float64)
            entry["step"] += 1
            count, before = float(entry["step"]), float(entry["exp_avg_norm"])
            if group["norm_type"] == 2:
                now = math.sqrt(beta2 * before**2 + (1 - beta2) * norm**2)
            else:
                now = beta2 * before + (1 - beta2) * norm
            entry["exp_avg_norm"].fill_(now)
            first, second = (1 - beta1**count, math.sqrt(1 - beta2**count)) if group["bias_correction"] else (1.0, 1.0)
            divisor = now / second + group["eps"]
            beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
            if self.reg_inside_moment:
                entry["exp_avg"].mul_(beta1).add_(p.grad / divisor + group["weight_decay"] * p, alpha=beta3)
                p.add_(entry["exp_avg"], alpha=-group["lr"] / first)
            else:
                entry["exp_avg"].mul_(beta1).add_(p.grad, alpha=beta3)
                update = entry["exp_avg"] / (first * divisor) + group["weight_decay"] * p
                p.add_(update, alpha=-group["lr"])
