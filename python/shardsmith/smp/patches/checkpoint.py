"""`smp.patches.checkpoint`: activation checkpointing inside of a module's forward.

The layers of a model of a known family are computed by the engine, not by their forward: for those there is
smp.set_activation_checkpointing.
"""
from __future__ import annotations

from typing import Any

import torch.utils.checkpoint
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.activation_checkpointing import group_size
from shardsmith.smp.session import logger

__all__ = ["checkpoint", "checkpoint_sequential"]


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """module(*args, **kwargs), of which only the inputs are kept until the backward computes it again. Modules only."""
    if not isinstance(module, nn.Module):
        raise Error("invalid_argument", f"smp.patches.checkpoint.checkpoint takes a torch.nn.Module, not {type(module).__name__}")
    return torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def checkpoint_sequential(sequential: nn.Sequential, input: Any, strategy: str = "each", preserve_rng_state: bool = True,
                          pack_args_as_tuple: bool = False) -> Any:
    """sequential(input), checkpointed by module ("each"), as a whole ("contiguous"), or N modules at a time ("group_N"). A tuple
    of inputs goes to the first module as it is."""
    if not isinstance(sequential, nn.Sequential):
        raise Error("invalid_argument", "smp.patches.checkpoint.checkpoint_sequential takes a torch.nn.Sequential, not "
                                        f"{type(sequential).__name__}")
    if pack_args_as_tuple:
        logger.warning("smp.patches.checkpoint.checkpoint_sequential: pack_args_as_tuple changes nothing and is deprecated")
    modules = list(sequential)
    size = group_size(strategy) or max(1, len(modules))
    for begin in range(0, len(modules), size):
        input = checkpoint(nn.Sequential(*modules[begin:begin + size]), input, preserve_rng_state=preserve_rng_state)
    return input
