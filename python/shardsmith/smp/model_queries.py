"""What scripts ask a wrapped model about its parameters and modules, and the depths at which they look for the user's model."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import state


class Depth:
    """The user's model again, under one more `.module`: scripts reach it as model.module, model.module.module (with ddp) or
    model.module.module.module (with fp16). No nn.Module, so that nothing is counted twice."""

    def __init__(self, module: nn.Module, below: int):
        self.__dict__["_target"] = module
        if below:
            self.__dict__["module"] = Depth(module, below - 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_target"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_target"](*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.__dict__["_target"])


def add_depths(module: nn.Module) -> None:
    """Where the user's model has no `.module` of its own. Not among its children."""
    if not hasattr(module, "module"):
        module.__dict__["module"] = Depth(module, 1)


class ModelQueries:
    """Base of DistributedModel. A tensor-parallel group computes one batch together, so that with a degree above 1 all
    parameters work on the scaled batch, and gradients are averaged over reduced-data-parallel ranks. Of a model that torch
    computes, without prescaled_batch, only what is inside of split layers does."""

    module: nn.Module
    is_plain: bool
    own_shapes: dict[str, list[int]]
    whole_shapes: dict[str, list[int]]
    _local: dict[str, nn.Parameter]
    _named: Callable[[], dict[str, nn.Parameter]]

    def _logical_name(self, param: torch.Tensor, what: str) -> str:
        for name, known in self._named().items():
            if known is param:
                return name
        raise Error("invalid_argument", f"model.{what}: a tensor of shape {list(param.shape)} is no parameter of this model")

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether this rank holds a slice of it, cut by tensor parallelism."""
        name = self._logical_name(param, "is_distributed_parameter")
        return self.own_shapes[name] != self.whole_shapes[name]

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Never: buffers are whole on every rank."""
        return False

    def _scaled(self) -> Callable[[torch.Tensor], bool]:
        """Tells of each parameter or buffer whether it works on the scaled batch."""
        if state.mesh.tp_size == 1 or not self.is_plain or state.cfg.prescaled_batch:
            answer = state.mesh.tp_size > 1
            return lambda tensor: answer
        from shardsmith.smp.nn.base import DistributedModule

        split = (module for module in self.module.modules() if isinstance(module, DistributedModule))
        scaled = {id(own) for module in split for own in (*module.parameters(), *module.buffers())}
        return lambda tensor: id(tensor) in scaled

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether it works on the batch of the whole tensor-parallel group."""
        self._logical_name(param, "is_scaled_batch_parameter")
        return self._scaled()(param)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether it works on the batch of the whole tensor-parallel group."""
        return self._scaled()(buffer)

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Those with a parameter of their own that is cut by tensor parallelism."""
        cut = {id(p) for name, p in self._named().items() if self.own_shapes[name] != self.whole_shapes[name]}
        return (module for module in self.module.modules() if any(id(p) in cut for p in module.parameters(recurse=False)))

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters whose gradients are averaged over data-parallel ranks: all without tensor parallelism."""
        named, scaled = self.local_named_parameters(), self._scaled()  # type: ignore[attr-defined]
        return ((name, param) for name, param in named if not scaled(param))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those whose gradients are averaged over reduced-data-parallel ranks: all with tensor parallelism."""
        named, scaled = self.local_named_parameters(), self._scaled()  # type: ignore[attr-defined]
        return ((name, param) for name, param in named if scaled(param))

    def join(self) -> contextlib.AbstractContextManager[None]:
        """For uneven inputs; needs 'ddp'. With one replica there is nothing uneven; with several it is refused."""
        if not state.cfg.ddp:
            raise Error("invalid_argument", "model.join() needs 'ddp': True")
        if state.mesh.rdp_size > 1:
            raise Error("unsupported", "model.join(): replicas average their gradients at every step, so that each needs the same number "
                                       "of batches: drop the last ones (drop_last=True), or repeat some")
        return contextlib.nullcontext()

    def register_comm_hook(self, state: Any, callable: Callable[..., Any]) -> None:
        """Refused: gradients are averaged inside of the engine, in buckets, where no Python function is called."""
        raise Error("unsupported", "model.register_comm_hook: gradients are averaged inside of the engine while the backward goes on; "
                                   "bf16 or fp16 halve what is exchanged, shard_optimizer_state shards it")

    _register_comm_hook = register_comm_hook  # its name in 1.2


def distribution_axis(param: torch.Tensor) -> int | None:
    """Along which a parameter is cut by tensor parallelism; None where it is whole."""
    model = state.require().model
    if model is None:
        raise Error("invalid_argument", "smp.utils.get_distribution_axis: there is no smp.DistributedModel yet")
    name = model._logical_name(param, "get_distribution_axis")
    cut = [axis for axis, (own, whole) in enumerate(zip(model.own_shapes[name], model.whole_shapes[name])) if own != whole]
    return cut[0] if cut else None
