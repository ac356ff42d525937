"""`import smdistributed.modelparallel.torch as smp`: the names of shardsmith.smp, and its modules under both names."""
import sys
from types import ModuleType
from typing import Any

from shardsmith import smp as _smp
from shardsmith.smp import *  # noqa: F403
from shardsmith.smp import __all__, state

_public = [_smp.__name__ + "." + _name for _name in __all__ if isinstance(getattr(_smp, _name), ModuleType)]
for _name, _module in list(sys.modules.items()):
    if any(_name == _of or _name.startswith(_of + ".") for _of in _public):
        sys.modules.setdefault(__name__ + _name.removeprefix(_smp.__name__), _module)  # one module, not a second copy


def __getattr__(name: str) -> Any:
    return getattr(_smp, name)
