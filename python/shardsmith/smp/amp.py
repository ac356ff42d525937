"""`smp.amp.GradScaler`: torch's, with the flag of an overflow shared over all ranks."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardsmith.errors import Error
from shardsmith.smp.optimizer import DistributedOptimizer
from shardsmith.smp.session import state

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """For training under torch.autocast, with arguments as torch's. An overflow on one rank skips the update on all, so that
    every rank must call `step` and `update`. Under the configuration's fp16 the optimizer scales by itself, and this is an
    error."""

    def __init__(self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, enabled: bool = True):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor,
                        allow_fp16: bool) -> dict[torch.device, torch.Tensor]:
        model = state.require().model
        if state.cfg.fp16 or state.cfg.bf16:
            raise Error("invalid_argument", "smp.amp.GradScaler: under 'fp16' and 'bf16' smp.DistributedOptimizer scales by itself "
                                            "(dynamic_loss_scale=True): leave the scaler out")
        own: Any = optimizer
        if isinstance(optimizer, DistributedOptimizer) and model is not None:
            model.before_update()
            own = SimpleNamespace(param_groups=[{"params": list(model._local.values())}])  # shards have no gradients of their own
        flags = super()._unscale_grads_(own, inv_scale, found_inf, allow_fp16)
        if state.size > 1:
            # A rank without gradients takes part too.
            flag = torch.stack([f.to(found_inf.device) for f in flags.values()]).amax(0) if flags else found_inf.clone()
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            flags = {flag.device: flag}
        return flags
