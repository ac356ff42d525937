"""Which layers are whose: by costs, as a script wishes (`smp.partition`, `smp.set_partition`), or as decided before.

A wish is kept at its module, so that it goes along when the module is copied. Innermost wins: the wish nearest around a
parameter counts, and what set_partition says of a module holds for all that a `partition` context around its
construction had said inside of it.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import logger, state

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel

_MARK = "_smp_partition"  # in a module's __dict__: ("context" | "set", stage)


def _stage_index(index: Any, what: str) -> int:
    stages = state.require().cfg.pipeline_parallel_degree
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < stages:
        raise Error("invalid_argument", f"{what}: {index!r} is no pipeline stage; with pipeline_parallel_degree {stages} "
                                        + (f"they are 0 to {stages - 1}" if stages > 1 else "there is only 0"))
    return index


def _ignored() -> bool:
    if not state.cfg.auto_partition:
        return False
    if not state.said_auto_partition:
        state.said_auto_partition = True
        logger.warning("smp.partition and smp.set_partition are ignored: 'auto_partition' is True")
    return True


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Modules created inside go to stage `index`; of nested contexts the innermost counts. Without auto_partition only."""
    _stage_index(index, "smp.partition")
    if _ignored():
        yield
        return
    outer = nn.Module.__init__

    @functools.wraps(outer)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        outer(self, *args, **kwargs)
        self.__dict__[_MARK] = ("context", index)

    nn.Module.__init__ = __init__  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = outer  # type: ignore[method-assign]


def set_partition(module: nn.Module, index: int) -> None:
    """`module` (the user's, or one inside of a DistributedModel) goes to stage `index`. Before the first step; the same
    on every rank. Without auto_partition only."""
    from shardsmith.smp.model import DistributedModel

    _stage_index(index, "smp.set_partition")
    if not isinstance(module, nn.Module):
        raise Error("invalid_argument", f"smp.set_partition takes a torch.nn.Module, not {type(module).__name__}")
    if state.pending is not None and state.pending.first and len(state.pending.first) > 2:
        raise Error("invalid_argument", f"smp.set_partition after resuming: the partition is the one of "
                                        f"{state.pending.where} and is fixed; another pipeline_parallel_degree gives another one")
    if _ignored() or state.cfg.pipeline_parallel_degree == 1:
        return
    if state.model is not None and state.model.partitioned:
        raise Error("invalid_argument", "smp.set_partition: the partition has been made, at the first step")
    if isinstance(module, DistributedModel):
        module = module.module
    module.__dict__[_MARK] = ("set", index)


def wishes_of(module: nn.Module) -> dict[str, int]:
    """By path; "" is the module itself."""
    marks = {path: inside.__dict__[_MARK] for path, inside in module.named_modules(remove_duplicate=False)
             if _MARK in inside.__dict__}
    chosen = {path for path, (kind, _) in marks.items() if kind == "set"}

    def overruled(path: str) -> bool:
        while path:
            path = path.rpartition(".")[0]
            if path in chosen:
                return True
        return False

    return {path: index for path, (kind, index) in marks.items() if kind == "set" or not overruled(path)}


def decide(model: DistributedModel) -> list[int]:
    """The partition, the same on every rank: stage s holds the layers [first[s], first[s + 1])."""
    first = state.together(lambda: _decide(model))
    decisions = state.exchange(json.dumps(first).encode())
    for rank, decision in enumerate(decisions):
        if decision != decisions[0]:
            raise Error("invalid_argument", f"rank {rank} asks for the partition {decision.decode()}, rank 0 for "
                                            f"{decisions[0].decode()}: smp.partition, smp.set_partition and partition_file "
                                            "must say the same on every rank", rank)
    cfg = state.cfg
    if cfg.partition_file and not cfg.load_partition:
        state.together(lambda: _write(cfg.partition_file, first) if state.rank == 0 else None)
    return first


def _decide(model: DistributedModel) -> list[int]:
    from shardsmith import _core

    cfg, stages, pending = state.cfg, state.stages, state.pending
    layers = model._model.description["num_layers"]
    wishes = {} if cfg.auto_partition else wishes_of(model.module)
    if pending is not None and pending.first:
        if wishes and state.rank == 0:
            logger.warning("smp.partition and smp.set_partition are ignored: the partition is the one of %s", pending.where)
        return list(pending.first)
    if cfg.load_partition:
        return list(_core.partition_from_json(_read(cfg.partition_file), layers, stages, cfg.partition_file))
    if cfg.auto_partition:
        return list(model._model.partition(stages, cfg.memory_weight))
    names = [(name, place) for name, _, place, _ in model._model.tensors]
    names += [(name, layers) for name in model._model.tied_names]
    return list(_core.manual_partition(names, layers, stages, list(wishes.items()), cfg.default_partition))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise Error("not_found", f"{path}: no such file, and 'load_partition' asks for it") from None
    except UnicodeDecodeError:
        raise Error("corrupt", f"{path}: not UTF-8: this is no partition") from None
    except OSError as error:
        raise Error("io", f"{path}: {error.strerror}") from None


def _write(path: str, first: list[int]) -> None:
    from shardsmith import _core

    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_core.partition_to_json(first))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise Error("io", f"{path}: {error.strerror}") from None
