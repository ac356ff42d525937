"""What a session's saves go through: one at a time, at once or by a thread in the background."""
from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from shardsmith.errors import Error
from shardsmith.smp.session import bounded_exchange, logger, state

_POLL = 0.1  # seconds: signals are seen in between


class Saving:
    """Owned by the session, made with its first save. Its methods are called by the main thread."""

    def __init__(self) -> None:
        self._thread: Any = None  # _core.BackgroundSave, from the first save in the background on
        self._peers: Any = None  # the background thread's alone
        self._transport: Any = None  # one save at a time uses it
        self._said_memory = False

    def _exchange(self, message: bytes, seconds: float) -> list[bytes]:
        return bounded_exchange(self._peers, message, seconds, state.limits, state.store, "saving")

    def _move(self, out: Any, received: Any, seconds: float) -> None:
        self._transport.move(out, received, seconds)

    def prepare_transport(self) -> None:
        """Called by all ranks before a full save."""
        from shardsmith import _engine

        if state.size > 1 and self._transport is None:
            seconds = state.limits.communication
            try:
                group = dist.new_group(list(range(state.size)), timeout=datetime.timedelta(seconds=seconds), backend="gloo")
            except RuntimeError as error:
                raise state.peer_error(f"making a group for a save: {str(error).splitlines()[0]}") from error
            self._transport = _engine.GroupTransport(group, "checkpoint group", seconds)

    def _is_busy(self) -> bool:
        return self._thread is not None and not self._thread.is_idle_within(0.0)

    def is_busy_anywhere(self) -> bool:
        return any(answer == b"busy" for answer in state.exchange(b"busy" if self._is_busy() else b""))

    def wait(self) -> None:
        """Until nothing is being written; raises the failure of the last save, once."""
        if self._thread is None:
            return
        while not self._thread.is_idle_within(_POLL):
            pass
        _told(self._thread.wait())

    def save(self, request: Any, is_full: bool) -> None:
        """At once. Never beside one in the background: each would take the other's files for a dead save's."""
        from shardsmith import _core

        if self._thread is not None:
            state.together(self.wait)
        exchange = None if state.size == 1 else state.exchange
        if is_full:
            _told(_core.save_full(request, state.rank, state.size, exchange, self._move if state.size > 1 else None))
        else:
            _told(_core.save_partial(request, state.rank, state.size, exchange))

    def begin(self, request: Any, skip_if_busy: bool, tensors: list[torch.Tensor]) -> bool:
        """Returns when all is copied. `tensors`: those that the request points at."""
        from shardsmith import _core, _engine

        if self._thread is None:
            alone = state.size == 1
            self._peers = None if alone else _engine.StorePeers(state.store, state.rank, state.size, "saving")
            self._thread = _core.BackgroundSave(state.rank, state.size, None if alone else state.exchange,
                                                None if alone else self._exchange, None if alone else self._move)
            atexit.register(self._at_exit)
        while not skip_if_busy and not self._thread.is_idle_within(_POLL):
            pass
        if not self._said_memory:
            self._said_memory = True
            logger.info("[%d] saving in the background keeps a copy of %.2f GB of memory", state.rank,
                        request.snapshot_bytes / 1e9)
        versions = _versions(tensors)

        def changed() -> str:
            now = _versions(tensors)
            torn = [tensor for tensor, before, after in zip(tensors, versions, now) if before != after]
            return "" if not torn else (f"{len(torn)} tensors, one of shape {list(torn[0].shape)}, were changed by another thread "
                                        "while they were copied for a save; nothing was written")

        return bool(self._thread.begin(request, skip_if_busy, changed))

    def _at_exit(self) -> None:
        """A save that is running at the script's end is finished, or its failure told."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            _told(thread.close())
        except Error as error:
            # Not to the log: who listens there may have gone already.
            print(f"[{state.rank}] the checkpoint that was being saved when the script ended is not there: {error}",
                  file=sys.stderr, flush=True)
            _failed_at_exit.append(str(error))
        if self._peers is not None:
            with contextlib.suppress(Exception):
                _leave()


def _leave() -> None:
    """Rank 0 may take the store along: it goes when all others have read the last word, or after five seconds."""
    if state.rank > 0:
        state.store.set(f"saving/left/{state.rank}", "1")
        return
    left = [f"saving/left/{rank}" for rank in range(1, state.size)]
    end = time.monotonic() + 5
    while not state.store.check(left) and time.monotonic() < end:
        time.sleep(0.01)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    # torch counts every change of a tensor's memory, through whichever view; it doesn't for those made in inference mode.
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _told(result: dict[str, Any] | None) -> None:
    if result is None:
        return
    for line in result["warnings"]:
        logger.warning("%s", line)
    logger.info("[%d] saved %s", state.rank, result["folder"])


_failed_at_exit: list[str] = []


def _end_with_failure() -> None:
    """Registered before all others, so called after them: a script that lost a checkpoint has not ended well."""
    if _failed_at_exit:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


atexit.register(_end_with_failure)


def saving() -> Saving:
    if state.saving is None:
        state.saving = Saving()
    return state.saving


def wait_for_checkpoint() -> None:
    """Until the save that runs in the background is done, if one does; raises its failure."""
    state.require()
    saving().wait()
