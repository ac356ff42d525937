"""glibc's heap, set up for tensors.

As it comes, it holds twice what a rank needs at its fullest moment (measured: GPT-2 small over two stages, 4 microbatches):

- Each thread has an arena, where what it has freed stays for it. Microbatches have a thread each and take turns, so every
  arena grows to a microbatch's tensors of its own. One arena is enough: threads that take turns don't wait for each other.
- Tensors are aligned, and what is cut off in front of one is a chunk of a few bytes. Freed, such chunks go to caches that
  don't join them with their neighbours, and the tensor's place stays too small for the next tensor of its size. Without the
  caches freed neighbours become one.
- Memory that goes back to the kernel costs time when it comes again, so the heap keeps what it has.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TUNABLES = ("arena_max=1", "tcache_count=0", "mxfast=0", "mmap_threshold=33554432", "trim_threshold=1099511627776")
_M_ARENA_MAX, _M_MXFAST = -8, 1  # malloc.h


def _is_set(environment: Mapping[str, str]) -> bool:
    """Whether the user has settings of his own, which hold."""
    return "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """For processes that are about to start."""
    return {} if _is_set(inherited) else {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{tunable}" for tunable in _TUNABLES)}


def set_up() -> None:
    """What of it can still be done in a process that runs, before its threads start."""
    if _is_set(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has other ways
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MXFAST, 0)
