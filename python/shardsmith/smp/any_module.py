"""Modules of no family of the engine: torch computes them, on one stage; between ranks they are like all others.

What a checkpoint knows of such a module is written here in place of a transformers configuration: the names and shapes
of its parameters and persistent buffers, the dimension along which the tensor-parallel ranks share one, and the other
names of what is tied."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import state

if TYPE_CHECKING:
    from shardsmith._engine import ModuleStage

MODEL_TYPE = "torch_module"


def is_of_a_family(module: nn.Module) -> bool:
    """Whether the engine computes models of this configuration; one that it knows but can't is refused later, by name."""
    from shardsmith import _core

    config = getattr(module, "config", None)
    known = _core.supported_model_types()
    if config is None or not hasattr(config, "to_dict") or getattr(config, "model_type", None) not in known:
        return False
    return any(c.__module__.startswith("transformers.models.") for c in type(module).__mro__)


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def describe(module: nn.Module) -> str:
    """The module as src/family/torch_module.cc reads it. Shapes are the whole's."""
    from shardsmith.smp.nn.base import DistributedModule, tensor_parallel_degree

    axes: dict[int, int] = {}
    degree = tensor_parallel_degree()
    for part in module.modules():
        if isinstance(part, DistributedModule):
            for name, axis in part.split_axes.items():
                if (param := part._parameters.get(name)) is not None:
                    axes[id(param)] = axis
    tensors: list[dict[str, Any]] = []
    first: dict[int, dict[str, Any]] = {}
    held = [*module.named_parameters(remove_duplicate=False), *persistent_buffers(module).items()]
    for name, tensor in held:
        if id(tensor) in first:
            first[id(tensor)].setdefault("aliases", []).append(name)
            continue
        entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape)}
        if (axis := axes.get(id(tensor))) is not None:
            entry["axis"] = axis
            entry["shape"][axis] *= degree  # layers are split where the degree divides
        first[id(tensor)] = entry
        tensors.append(entry)
    if not tensors:
        raise Error("invalid_argument", f"smp.DistributedModel: {type(module).__name__} has no parameters")
    return json.dumps({"model_type": MODEL_TYPE, "class": type(module).__name__, "tensors": tensors})


class Stage:
    """_engine.Stage's calls, of a module that torch computes."""

    def __init__(self, config_text: str, parameters: dict[str, torch.Tensor], buffers: list[torch.Tensor],
                 bucket_cap_mb: float, broadcast_buffers: bool):
        from shardsmith import _engine

        self.stage: ModuleStage = _engine.ModuleStage(
            config_text, parameters, buffers, state.groups["engine_rdp"], state.groups["engine_tp"],
            prescaled_batch=state.cfg.prescaled_batch, peer_timeout=state.limits.communication, bucket_cap_mb=bucket_cap_mb,
            shard_optimizer_state=state.cfg.shard_optimizer_state)
        self._syncs_buffers = broadcast_buffers and bool(buffers) and state.mesh.dp_size > 1
        self.step, self.first_sample, self.microbatches, self.rows = 0, 0, 1, 0

    def __getattr__(self, name: str) -> Any:  # shards, gather_shards, grad_norm and their like
        return getattr(self.__dict__["stage"], name)

    def begin_step(self, number: int, microbatches: int, training: bool, dropout: bool, first_sample: int, rank_samples: int,
                   reduce: bool, loss_scale: float) -> None:
        self.step, self.first_sample, self.microbatches = number, first_sample, microbatches
        self.rows = rank_samples // microbatches
        self.stage.begin_step(loss_scale)
        if self._syncs_buffers and dropout:  # while training: what batch norms have gathered
            self.stage.sync_buffers()

    def backward(self, losses: list[torch.Tensor], gradients: list[torch.Tensor | None], scale: float) -> None:
        self.stage.backward(losses, gradients, scale)

    def finish_microbatch(self, microbatch: int) -> None:
        pass

    def set_seed(self, seed: int) -> None:  # layers ask for the model's
        pass

    def abort(self, text: str) -> None:
        pass

    def broadcast(self, tensors: list[torch.Tensor], root: int) -> list[torch.Tensor]:
        return tensors

    def set_activation_checkpointing(self, plan: Any) -> None:
        pass


def moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Of nested tuples, lists and dicts, their types kept."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        changed = {key: moved(item, move) for key, item in value.items()}
        if type(value) is dict:
            return changed
        for key, item in changed.items():  # transformers' outputs are dicts that know their fields
            value[key] = item
        return value
    if type(value) in (list, tuple):
        return type(value)(moved(item, move) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, move) for item in value))
    return value


def input_mover(device: torch.device, dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        narrows = dtype is not None and tensor.is_floating_point()
        return tensor.to(device, dtype if narrows else tensor.dtype)

    return move


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def first_rows(value: Any) -> int:
    """Of the first tensor in the arguments; 0 where there is none."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 0
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((rows for rows in map(first_rows, items) if rows), 0)


def checkpoint_activations(module: nn.Module) -> None:
    """What smp.set_activation_checkpointing has marked keeps its inputs only, by torch's own checkpoint."""
    from shardsmith.smp.activation_checkpointing import _marked, group_size

    for _, part, strategy in _marked(module):
        if isinstance(part, nn.Sequential):
            size = group_size(strategy) or len(part)
            part.forward = _in_groups(part, size)  # type: ignore[method-assign]
        elif isinstance(part, nn.ModuleList):
            for child in part:
                child.forward = _checkpointed(child.forward)
        else:
            part.forward = _checkpointed(part.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run


def _in_groups(sequence: nn.Sequential, size: int) -> Callable[[Any], Any]:
    def forward(value: Any) -> Any:
        layers = list(sequence)
        for begin in range(0, len(layers), size):
            group = layers[begin:begin + size]

            def run(given: Any, group: list[nn.Module] = group) -> Any:
                for layer in group:
                    given = layer(given)
                return given

            value = _checkpointed(run)(value)
        return value

    return forward
