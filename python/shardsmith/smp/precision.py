"""bf16 and fp16 with float32 masters: what a rank computes with is the rounding of what its optimizer updates.

A parameter keeps its identity in the module. Weights are read in float32; that memory becomes the master, and the
parameter gets memory of its own, half as large. So a master is the file's exact value.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import state

if TYPE_CHECKING:
    from shardsmith.smp.shards import Shard

MASTER = "master"  # the key of a master in a parameter's saved state

_DYNAMIC_ARGUMENTS = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


def scaler_values(scaler: Any) -> dict[str, Any]:
    """A loss scaler's state as it is saved."""
    scale, good_steps, hysteresis = scaler.state()
    return {"loss_scale": scale, "good_steps": good_steps, "hysteresis": hysteresis}


def restore_scaler(scaler: Any, saved: Mapping[str, Any]) -> None:
    scaler.restore(float(saved["loss_scale"]), int(saved["good_steps"]), int(saved["hysteresis"]))


def narrow_dtype() -> torch.dtype | None:
    """What the configuration asks the parameters to be in; None: as the model has them."""
    cfg = state.cfg
    return torch.bfloat16 if cfg.bf16 else torch.float16 if cfg.fp16 else None


def widen(local: Mapping[str, nn.Parameter], weightless: bool) -> None:
    """Before weights are read: float32, so that none is rounded on the way. `weightless`: no values to keep."""
    for param in local.values():
        if param.dtype != torch.float32:
            param.grad = None
            param.data = torch.empty_like(param, dtype=torch.float32).detach() if weightless else param.data.float()


def narrow(local: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters become their rounding. Returns what they were."""
    wide = {}
    for name, param in local.items():
        wide[name] = param.data
        param.grad = None
        param.data = param.data.to(dtype)
    return wide


def make_masters(local: Mapping[str, nn.Parameter], wide: dict[str, torch.Tensor],
                 shards: Mapping[str, Shard] | None) -> dict[str, nn.Parameter]:
    """In the memory of `wide`, which this empties; of shards, in memory of their own."""
    masters = {}
    for name, param in local.items():
        value = wide.pop(name)
        if shards is None:
            masters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
        elif name in shards:
            masters[name] = nn.Parameter(shards[name].of(value).clone())
    return masters


def make_scaler(static_loss_scale: float | None, dynamic_loss_scale: bool, dynamic_loss_args: Mapping[str, Any] | None) -> Any:
    """The loss scale that fp16 asks for; in other precisions it is 1, and the arguments are only checked."""
    from shardsmith import _core

    arguments = dict(dynamic_loss_args or {})
    for name in arguments:
        if name not in _DYNAMIC_ARGUMENTS:
            raise Error("invalid_argument", f"dynamic_loss_args: unknown key '{name}'; these are: "
                                            + ", ".join(_DYNAMIC_ARGUMENTS))
    try:
        for name in ("scale_window", "delayed_shift"):
            if name in arguments:
                arguments[name] = int(arguments[name])
        dynamic = _core.LossScaler(**arguments)
        fixed = _core.LossScaler.fixed(1.0 if static_loss_scale is None else float(static_loss_scale))
    except TypeError as error:
        raise Error("invalid_argument", f"dynamic_loss_args: {str(error).splitlines()[0]}") from None
    if not state.cfg.fp16:
        return _core.LossScaler.fixed(1.0)
    return dynamic if dynamic_loss_scale else fixed
