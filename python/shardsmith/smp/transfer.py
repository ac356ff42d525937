"""What travels between stages around a step: stage 0's arguments to all, the last stage's results to all."""
from __future__ import annotations

import enum
import inspect
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.errors import Error
from shardsmith.smp.objects import bytes_tensor, tensor_bytes
from shardsmith.smp.session import state
from shardsmith.smp.tree import LEAF, flatten, unflatten

if TYPE_CHECKING:
    from shardsmith._engine import Stage


@dataclass(frozen=True)
class SplitRules:
    whole: frozenset[str]
    axes: dict[str, int]


class Kind(enum.Enum):
    TENSOR = 0  # the next tensor of the message
    VALUE = 1  # pickled
    OWN = 2  # each rank's own object at this place


def _describe(leaf: Any, tensors: list[torch.Tensor]) -> tuple[Kind, Any]:
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf.detach())
        return Kind.TENSOR, leaf.requires_grad
    if isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)) or callable(leaf):
        return Kind.OWN, None
    try:
        return Kind.VALUE, pickle.dumps(leaf)
    except Exception:  # whatever an object's own reducer raises
        return Kind.OWN, None


def _restore(described: tuple[Kind, Any], tensors: Any, own: Any) -> Any:
    kind, content = described
    if kind is Kind.TENSOR:
        return next(tensors)
    return pickle.loads(content) if kind is Kind.VALUE else own


# Stage.broadcast describes the tensors of one call in a header of fixed size.
_BATCH = 24


def _broadcast(stage: Stage, content: Any, tensors: list[torch.Tensor], root: int) -> tuple[Any, list[torch.Tensor]]:
    """Picklable content and any number of tensors from one stage to all."""
    message = []
    if state.stage == root:
        message = [bytes_tensor(pickle.dumps((content, len(tensors)))), *tensors[:_BATCH]]
    first, *received = stage.broadcast(message, root=root)
    content, count = pickle.loads(tensor_bytes(first))
    for begin in range(_BATCH, count, _BATCH):
        received += stage.broadcast(tensors[begin:begin + _BATCH] if state.stage == root else [], root=root)
    return content, received


def share_arguments(stage: Stage, bound: inspect.BoundArguments, several: bool) -> dict[str, Any]:
    """The arguments by name: stage 0's on every stage. The others' are looked at only for objects that don't travel."""
    if not several:
        return dict(bound.arguments)
    tensors: list[torch.Tensor] = []
    entries = []
    if state.stage == 0:
        for name, value in bound.arguments.items():
            leaves, spec = flatten(value)
            entries.append((name, spec, [_describe(leaf, tensors) for leaf in leaves]))
    entries, received = _broadcast(stage, entries, tensors, root=0)
    if state.stage == 0:
        return dict(bound.arguments)
    rest = iter(received)
    arguments = {}
    for name, spec, described in entries:
        own_value = bound.arguments.get(name)
        own_leaves, own_spec = flatten(own_value) if any(kind is Kind.OWN for kind, _ in described) else ([], None)
        if own_spec is not None and own_spec != spec:
            raise Error("invalid_argument", f"smp.step: argument '{name}' holds an object that can't travel from stage 0, "
                                            "and is of another structure on this rank", state.rank)
        leaves = [_restore(d, rest, own_leaves[i] if own_spec is not None else None) for i, d in enumerate(described)]
        arguments[name] = unflatten(spec, leaves, own_value)
    return arguments


def _splits(leaf: Any) -> bool:
    return (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) or hasattr(leaf, "smp_slice")


def rows(arguments: dict[str, Any], rules: SplitRules) -> int:
    """Of the batch: of the first tensor that is split."""
    for name, value in arguments.items():
        if name not in rules.whole:
            for leaf in flatten(value)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                    return leaf.shape[rules.axes.get(name, 0)]
    return 0


def microbatch_arguments(arguments: dict[str, Any], rules: SplitRules, count: int, microbatch: int) -> dict[str, Any]:
    result = {}
    for name, value in arguments.items():
        if name in rules.whole or isinstance(value, torch.nn.Module):
            result[name] = value
            continue
        leaves, spec = flatten(value)
        if spec == LEAF or any(_splits(leaf) for leaf in leaves):
            leaves = [_slice(name, leaf, rules.axes.get(name, 0), count, microbatch) for leaf in leaves]
            value = unflatten(spec, leaves, value)
        result[name] = value
    return result


def _slice(name: str, leaf: Any, axis: int, count: int, microbatch: int) -> Any:
    if not _splits(leaf):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        return leaf.smp_slice(count, microbatch, axis)
    if not -leaf.dim() <= axis < leaf.dim():
        raise Error("invalid_argument", f"smp.step: argument '{name}' of shape {list(leaf.shape)} has no axis {axis}")
    length = leaf.shape[axis]
    if length % count or length == 0:
        low, high = length - length % count, length - length % count + count
        works = f"{low} or {high}" if low else str(high)
        raise Error("invalid_argument", f"smp.step: argument '{name}' has {length} rows along axis {axis}, which "
                                        f"{count} microbatches don't divide; {works} rows would do")
    each = length // count
    return leaf.narrow(axis, microbatch * each, each)


def share_results(stage: Stage, leaves: list[list[Any]], spec: Any, own: list[Any]) -> tuple[list[list[Any]], Any]:
    """The last stage's results on every stage. `own`: what this stage's microbatches returned."""
    last = state.stages - 1
    tensors: list[torch.Tensor] = []
    content = None
    if state.stage == last:
        content = [[_describe(value, tensors) for value in values] for values in leaves], spec
    (described, spec), received = _broadcast(stage, content, tensors, root=last)
    if state.stage == last:
        return leaves, spec
    rest = iter(received)
    mine: list[list[Any]] | None = None
    if any(kind is Kind.OWN for values in described for kind, _ in values):
        flat = [flatten(result) for result in own]
        if any(other != spec for _, other in flat):
            raise Error("invalid_argument", "smp.step: the function returns an object that can't travel from the last stage",
                        state.rank)
        mine = [list(values) for values in zip(*(values for values, _ in flat))]
    return [[_restore(d, rest, mine[i][mb] if mine else None) for mb, d in enumerate(values)]
            for i, values in enumerate(described)], spec
