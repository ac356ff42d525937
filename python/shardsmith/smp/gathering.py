"""What the ranks of one group bring together: first all say that they have come, so that one who does not is named in
time; then the values go from rank to rank."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardsmith.errors import Error
from shardsmith.smp.session import STORE_SILENT, bounded, state

_WORDS = {"mp": "model-parallel", "rdp": "reduced-data-parallel", "tp": "tensor-parallel", "pp": "pipeline", "world": ""}


def exchange(kind: str, what: str, message: bytes) -> list[bytes]:
    """Every member's message on every member of this rank's group. Names of ranks in errors are global."""
    members = state.group_members(kind)
    if len(members) == 1:
        return [message]
    number = state.rounds[kind] = state.rounds.get(kind, 0) + 1
    seconds = state.limits.communication

    def key(rank: int, number: int) -> str:
        return f"gathering/{kind}/{members[0]}/{number}/{rank}"

    def meet() -> list[bytes]:
        store, pause, end = state.store, 0.0005, time.monotonic() + seconds
        store.set(key(state.rank, number), b"=" + message)
        absent, answers = set(members), {}
        while True:
            for rank in [rank for rank in absent if store.check([key(rank, number)])]:
                absent.discard(rank)
                answers[rank] = bytes(store.get(key(rank, number)))[1:]
            if not absent:
                break
            for rank in absent:
                failed = f"shardsmith/world/failed/{rank}"
                if store.check([failed]):
                    raise Error("peer", f"rank {rank} failed: {store.get(failed).decode()}", rank)
            if time.monotonic() > end:
                names = ", ".join(map(str, sorted(absent)))
                raise Error("timeout", f"{what} waited {seconds:g} s for rank{'s' if len(absent) > 1 else ''} {names}: all "
                                       f"{_WORDS[kind]} ranks ({', '.join(map(str, members))}) must call it", min(absent))
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        if number > 2:  # everybody has begun this round, so everybody has read the last but one
            store.delete_key(key(state.rank, number - 2))
        return [answers[rank] for rank in members]

    try:
        result = bounded(meet, seconds + state.limits.store)
    except RuntimeError as error:
        if isinstance(error, Error):
            raise
        raise state.peer_error(f"in {what}: {str(error).splitlines()[0]}") from error
    if result is None:
        raise Error("timeout", STORE_SILENT, 0)
    return result


def _together(kind: str, what: str, function: Callable[[], Any]) -> Any:
    """Any member's failure is raised on all members."""
    result, failure = None, None
    try:
        result = function()
    except Exception as error:
        failure = error
    answers = exchange(kind, what, b"" if failure is None else f"{getattr(failure, 'kind', 'io')}\0{failure}".encode())
    if failure is not None:
        raise failure
    for rank, answer in zip(state.group_members(kind), answers):
        if answer:
            error_kind, _, text = answer.decode().partition("\0")
            raise Error(error_kind, f"rank {rank}: {text}", rank)
    return result


def allgather(kind: str, what: str, make: Callable[[], Any]) -> list[Any]:
    """What make() returns on each member, in the group's order, on all members."""
    value = _together(kind, what, make)
    members = state.group_members(kind)
    return [value] if len(members) == 1 else state.objects.allgather(value, members, state.rank)


def gather(kind: str, what: str, make: Callable[[], Any]) -> list[Any] | None:
    """The same on the group's first member only; None on the others."""
    value = _together(kind, what, make)
    members = state.group_members(kind)
    return [value] if len(members) == 1 else state.objects.gather(value, members, state.rank)
