"""What the distributed layers share: the tensor-parallel ranks, split parameters, and the places of dropout masks.

A layer keeps whole sequences of hidden states on every rank; its large weights are split over the tensor-parallel ranks.
Outside of a tensor-parallel group (degree 1, or before smp.init) the same layers are plain ones.
"""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import state

if TYPE_CHECKING:
    from shardsmith._engine import TensorParallel

# Dropout's places: numbers of layers in the order of their construction, which is the same on every rank.
_places = itertools.count(1)
_alone = itertools.count()  # forward passes outside of a step
_known: dict[tuple[int, int], Any] = {}


def tensor_parallel_degree() -> int:
    return state.mesh.tp_size if state.initialized else 1


def tensor_parallel_rank() -> int:
    return state.group_rank("tp") if state.initialized else 0


def ranks() -> TensorParallel:
    """The group that layers are split over. One object a session: graphs hold on to it."""
    from shardsmith import _engine

    key = (state.number, tensor_parallel_degree())
    if key not in _known:
        group = state.groups.get("engine_tp") if state.initialized else None
        _known[key] = _engine.TensorParallel(group, state.limits.communication)
    return _known[key]


def share(length: int) -> tuple[int, int]:
    """(begin, count) of this rank's share of a dimension, as checkpoints cut it."""
    size, rank = tensor_parallel_degree(), tensor_parallel_rank()
    begin, end = ((length * r + size - 1) // size for r in (rank, rank + 1))
    return begin, end - begin


class Split(threading.local):
    """Whether the running thread is inside of a layer that is split, where batches have been brought together already."""

    depth = 0


_inside = Split()


class DistributedModule(nn.Module):
    """The base of all layers that are split over the tensor-parallel ranks.

    `split_axes` says along which dimension a parameter of this very module is split ({"weight": 0}); parameters that it
    does not name are whole on every rank. Without `prescaled_batch` the ranks of a group bring samples of their own:
    the outermost split layer brings them together, dimension 0 of each tensor argument, computes all, and gives back its
    own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.split_axes: dict[str, int] = {}
        self._place = next(_places)

    def make_parameter(self, name: str, shape: list[int], initialize: Callable[[torch.Tensor], Any] | None,
                       axis: int | None = None) -> None:
        """Registers this rank's part of a parameter of `shape`. `initialize` fills the whole, in place, as a plain layer
        would, from torch's default generator: so the same seed gives the same weights with any degree."""
        whole = torch.empty(shape)
        with torch.no_grad():
            if initialize is not None:
                initialize(whole)
        if axis is not None and tensor_parallel_degree() > 1:
            begin, count = share(shape[axis])
            whole = whole.narrow(axis, begin, count).clone()
        if axis is not None:
            self.split_axes[name] = axis
        self.register_parameter(name, nn.Parameter(whole))

    def split_axis_of(self, name: str) -> int | None:
        return self.split_axes.get(name) if tensor_parallel_degree() > 1 else None

    @classmethod
    def can_be_split(cls, *args: Any, **kwargs: Any) -> str:
        """Why a layer with these arguments can't be split over the ranks; empty if it can."""
        return ""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if _inside.depth or tensor_parallel_degree() == 1 or not state.initialized or state.cfg.prescaled_batch:
            return super()._call_impl(*args, **kwargs)
        group = ranks()
        bring = lambda value: _mapped(value, lambda x: group.gather_rows(x.contiguous()))  # noqa: E731
        with plain_batches():
            result = super()._call_impl(*bring(args), **bring(kwargs))
        return _mapped(result, lambda x: group.own_rows(x.contiguous()) if x.dim() else x)

    __call__ = _call_impl


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, _mapped(item, function)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return value


def dropout_place(module: nn.Module) -> tuple[bool, int, int, int]:
    """(active, seed, step, number of the first sample) for masks: inside of a step a function of the step and the sample,
    so that recomputation and every layout drop the same; elsewhere every pass drops anew."""
    from shardsmith.smp.model import current_microbatch

    if not module.training:
        return False, 0, 0, 0
    seed = torch.initial_seed() & (2**63 - 1)
    model, microbatch = state.model, current_microbatch.get()
    if model is not None and (place := model.sample_place(microbatch or 0)) is not None:
        return True, place[0], place[1], place[2]
    return True, seed, next(_alone) + 2**32, 0


@contextmanager
def plain_batches() -> Iterator[None]:
    """Inside, layers take what they are given as the batch of the whole group."""
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def arguments_of(inputs: Any, more: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of a layer that takes its arguments as a tuple or one by one."""
    return (*inputs, *more) if isinstance(inputs, (tuple, list)) else (inputs, *more)


def require_multiple(what: str, number: int, of: str) -> None:
    degree = tensor_parallel_degree()
    if number % degree:
        raise Error("invalid_argument", f"{what}: {of} {number} is not a multiple of tensor_parallel_degree {degree}")
