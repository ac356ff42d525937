"""`smp.utils`: small helpers that scripts import."""
from __future__ import annotations

import torch

from shardsmith.smp.model_queries import distribution_axis
from shardsmith.smp.session import state

__all__ = ["get_distribution_axis", "rmsg"]


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """The axis along which a parameter of the wrapped model is cut by tensor parallelism; None where it is whole."""
    return distribution_axis(param)


def rmsg(message: object) -> str:
    """The message with this rank before it, for logs."""
    return f"[{state.rank}] {message}"
