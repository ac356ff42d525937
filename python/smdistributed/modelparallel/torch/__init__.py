"""`import smdistributed.modelparallel.torch as smp`: the names of shardsmith.smp."""
from typing import Any

from shardsmith import smp as _smp
from shardsmith.smp import *  # noqa: F403
from shardsmith.smp import __all__, state


def __getattr__(name: str) -> Any:
    return getattr(_smp, name)
