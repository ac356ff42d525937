"""`state_dict`, `local_state_dict` and `load_state_dict` of a DistributedModel."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp import gathering, weights, whole
from shardsmith.smp.report import LoadReport
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import pieces
from shardsmith.smp.state_index import StateIndex

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel

PARTIAL = "_smp_is_partial"
_Keys = nn.modules.module._IncompatibleKeys


def local(model: DistributedModel) -> dict[str, Any]:
    """This rank's part, under the user's names; and whether it is only a part."""
    values: dict[str, Any] = {name: param.detach() for name, param in model.held().items()}
    values[PARTIAL] = state.mesh.mp_size > 1
    return values


def _entries(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """What module.state_dict() has, in its order."""
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module._modules.items():
        if child is not None:
            yield from _entries(child, f"{prefix}{name}.")


def complete(model: DistributedModel, to_rank0: bool, prefix: str = "") -> dict[str, Any]:
    """The whole model on all ranks of the replica, or on rank 0; elsewhere then empty."""
    what = "model.state_dict()"
    if to_rank0 and 0 not in state.group_members("mp"):
        return {}
    if not state.said_state_dict and state.rank == 0:
        state.said_state_dict = True
        logger.info("%s brings the parts of the %d model-parallel ranks together: all ranks of reduced-data-parallel rank 0 "
                    "must call it", what, state.mesh.mp_size)
    skip = whole.stored_elsewhere()

    def own() -> dict[str, list[whole.Part]]:
        return {name: whole.parts_of(param, pieces(model._model, name)) for name, param in model._local.items()
                if name not in skip}

    collected = (gathering.gather if to_rank0 else gathering.allgather)("mp", what, own)
    if collected is None:
        return {}
    parts: dict[str, list[whole.Part]] = {}
    for contribution in collected:
        for name, brought in contribution.items():
            parts.setdefault(name, []).extend(brought)
    names = {id(param): name for name, param in model._named().items()}
    tensors: dict[str, torch.Tensor] = {}
    result: dict[str, Any] = {}
    for key, value in _entries(model.module, prefix):
        name = names.get(id(value))
        if name is None:
            result[key] = value.detach()
            continue
        if name not in tensors:
            tensors[name] = whole.assemble(model, name, parts.get(name, []), what)
        result[key] = tensors[name]
    return result


def load(model: DistributedModel, values: Mapping[str, Any], strict: bool, same_partition: bool) -> _Keys:
    """Now, or when the partition is made."""
    if not isinstance(values, Mapping):
        raise Error("invalid_argument", f"model.load_state_dict takes a dict, not {type(values).__name__}")
    partial = bool(values.get(PARTIAL, False))
    tensors = {name: value for name, value in values.items() if name != PARTIAL}
    if not partial and not any(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise Error("invalid_argument", "model.load_state_dict: the dict holds no tensors (of model.state_dict("
                                        "gather_to_rank0=True) rank 0 has all, the others none)", state.rank)
    if partial and same_partition:
        return _load_local(model, tensors, strict)
    if partial:
        tensors = _merge(model, tensors)
    index = StateIndex(model, tensors)
    report = LoadReport("model.load_state_dict", index.format, unexpected=index.told["unexpected"],
                        renamed=index.told["renamed"])
    first = state.pending.first if state.pending is not None else None
    pending = weights.Pending("model.load_state_dict", index, first=first, strict=strict, report=report)
    pending.compare(model)
    state.pending, state.load_report = pending, report
    if model.partitioned:
        weights.copy_parameters(model, pending)
    return _Keys(list(report.missing), list(report.unexpected))


def _merge(model: DistributedModel, own: dict[str, Any]) -> dict[str, Any]:
    """The parts that the ranks of the replica loaded, each the file of its own rank, as a whole."""
    what = "model.load_state_dict of a part"
    shapes = model.own_shapes

    def bring() -> dict[str, list[whole.Part]]:
        brought = {}
        for name, tensor in own.items():
            if name in shapes:
                _check_shape(name, tensor, shapes[name], "another tensor_parallel_degree saved it")
                brought[name] = whole.parts_of(tensor, pieces(model._model, name))
            elif isinstance(tensor, torch.Tensor):
                raise Error("corrupt", f"model.load_state_dict: the part has {name}, which the model has not")
        return brought

    parts: dict[str, list[whole.Part]] = {}
    for contribution in gathering.allgather("mp", what, bring):
        for name, brought in contribution.items():
            known = {(logical, tuple(box)) for logical, box, _ in parts.get(name, [])}
            parts.setdefault(name, []).extend(part for part in brought if (part[0], tuple(part[1])) not in known)
    return {name: whole.assemble(model, name, brought, what) for name, brought in parts.items()}


def _check_shape(name: str, tensor: Any, shape: list[int], why: str) -> None:
    if not isinstance(tensor, torch.Tensor) or list(tensor.shape) != shape:
        found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise Error("corrupt", f"model.load_state_dict: {name} is {found}, this rank's part of it is {shape}: {why}; use "
                               "smp.save_checkpoint to change the layout", state.rank)


def _load_local(model: DistributedModel, tensors: dict[str, Any], strict: bool) -> _Keys:
    """Each rank its own, without a word to the others."""
    if not model.partitioned:
        state.pending = weights.Pending("model.load_state_dict", LocalIndex(tensors, strict),
                                        first=state.pending.first if state.pending is not None else None)
        return _Keys([], [])
    return LocalIndex(tensors, strict).read_into(model)


class LocalIndex:
    """This rank's own part, for the partition that saved it."""

    format = "memory"

    def __init__(self, tensors: dict[str, Any], strict: bool):
        self._tensors = tensors
        self._strict = strict

    def value(self, key: str) -> None:
        """There are tensors only."""

    def names(self) -> list[str]:
        return list(self._tensors)

    def read_into(self, model: DistributedModel) -> _Keys:
        held = model.held()
        missing = [name for name in held if name not in self._tensors]
        unexpected = [name for name in self._tensors if name not in held]
        if self._strict and (missing or unexpected):
            word, names = ("is not in it", missing) if missing else ("is in it and not in this rank's part", unexpected)
            raise Error("corrupt", f"model.load_state_dict(same_partition_load=True): {names[0]} {word} ({len(names)} such "
                                   "tensors): the partition is another one; leave same_partition_load out", state.rank)
        with torch.no_grad():
            for name, param in held.items():
                if name not in self._tensors:
                    continue
                value = self._tensors[name]
                _check_shape(name, value, list(param.shape), "the partition is another one")
                param.copy_(value)
                if model.masters is not None and name in model.masters:
                    model.masters[name].copy_(model.rows(name, value))
        return _Keys(missing, unexpected)
