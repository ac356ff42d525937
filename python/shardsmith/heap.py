"""glibc's heap, set up for tensors.

As it comes, it holds twice what a rank needs at its fullest moment (measured: GPT-2 small over two stages, 4 microbatches):

- Each thread has an arena, where what it has freed stays for it. Microbatches have a thread each and take turns, so every
  arena grows to a microbatch's tensors of its own. As many arenas as threads compute at a time are enough: threads that take
  turns don't wait for each other. (Fewer are not: with one for two threads, which both allocate in each small product of
  the fused attention's backward, that took three times as long in bfloat16.)
- Tensors are aligned, and what is cut off in front of one is a chunk of a few bytes. Freed, such chunks go to caches that
  don't join them with their neighbours, and the tensor's place stays too small for the next tensor of its size. Without the
  caches freed neighbours become one.
- Memory that goes back to the kernel costs time when it comes again, so the heap keeps what it has.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TUNABLES = ("tcache_count=0", "mxfast=0", "mmap_threshold=33554432", "trim_threshold=1099511627776")
_M_ARENA_MAX, _M_MXFAST = -8, 1  # malloc.h


def _is_set(environment: Mapping[str, str]) -> bool:
    """Whether the user has settings of his own, which hold."""
    return "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment)


def environment(inherited: Mapping[str, str], threads: int) -> dict[str, str]:
    """For processes that are about to start, `threads` of each computing at a time."""
    if _is_set(inherited):
        return {}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{tunable}" for tunable in (f"arena_max={threads}", *_TUNABLES))}


def set_up(threads: int) -> None:
    """What of it can still be done in a process that runs, before its threads start."""
    if _is_set(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has other ways
        mallopt(_M_ARENA_MAX, threads)
        mallopt(_M_MXFAST, 0)
