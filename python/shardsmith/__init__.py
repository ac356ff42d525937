"""Trains and fine-tunes transformers split over many processes; saves, resumes and checks their checkpoints.

`import shardsmith as smp` has all names of `shardsmith.smp`, which is imported, and torch with it, when the first of them is
asked for: what works without torch doesn't wait for it.
"""
from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from shardsmith.errors import Error

if TYPE_CHECKING:
    from shardsmith.smp import *  # noqa: F403

__version__ = "0.1.0"
__all__ = ["Error", "__version__"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is not None:  # a module of ours, to be imported
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.smp"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(importlib.import_module(f"{__name__}.smp"))})
