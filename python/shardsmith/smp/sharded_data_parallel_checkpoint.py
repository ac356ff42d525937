"""`smp.sharded_data_parallel_checkpoint`: for checkpoints of sharded data parallelism, which is not there in this version."""
from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardsmith.errors import Error

__all__ = ["get_buffer_names", "get_full_state_dict_from_sharded_data_parallel_checkpoint", "get_param_shapes"]


def _refuse(name: str) -> NoReturn:
    raise Error("unsupported", f"smp.sharded_data_parallel_checkpoint.{name}: sharded data parallelism is not there in this version; "
                               "'shard_optimizer_state' shards the optimizer, and smp.save_checkpoint(partial=False) gives the whole model")


def get_full_state_dict_from_sharded_data_parallel_checkpoint(checkpoint_dir: str, dtype: torch.dtype = torch.float32,
                                                              tag: str | None = None, remove_smp_prefix: bool = True) -> dict[str, Any]:
    """Refused in this version."""
    _refuse("get_full_state_dict_from_sharded_data_parallel_checkpoint")


def get_param_shapes(model: Any, optimizer: Any) -> list[Any]:
    """Refused in this version."""
    _refuse("get_param_shapes")


def get_buffer_names(model: Any) -> list[str]:
    """Refused in this version."""
    _refuse("get_buffer_names")
