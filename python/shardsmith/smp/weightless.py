"""Weightless parameters: objects with right names, identities and shapes whose memory nobody has touched.

A module is built with its parameters on `meta` (so nothing is computed and no page is written; buffers are real), then
each gets memory of its full size that stays untouched until the partition reads this rank's slices into it; the
others lose it there. Until then saving or copying the module raises: it would give shapes without data.
"""
from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from shardsmith.errors import Error

MARK = "_shardsmith_weights"  # on the user's module: where its weights come from


class Source:
    """Where the weights of a module come from when its partition is made."""

    def __init__(self, folder: str | None, initial: bool = False):
        self.folder = folder  # a Hugging Face folder
        self.initial = initial  # initial weights, by function of (seed, name, index)
        self.versions: dict[int, int] = {}  # of the parameters when they were made
        self.released: list[Callable[[], None]] = []

    def written(self, module: nn.Module) -> list[str]:
        """Names of the parameters that somebody has written into; that would be lost."""
        return [name for name, p in module.named_parameters() if self.versions.get(id(p), p._version) != p._version]


_building = threading.local()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made by this thread inside get their parameters on `meta`, their buffers as usual."""
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and getattr(_building, "depth", 0):
            param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    _building.depth = getattr(_building, "depth", 0) + 1
    nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = original
        _building.depth -= 1


def give_memory(module: nn.Module, source: Source) -> None:
    """Memory, untouched, for the parameters on `meta`; ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in list(part._parameters.items()):
            if param is None or not param.is_meta:
                continue
            if id(param) not in made:
                made[id(param)] = nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
                made[id(param)]._shardsmith_meta = param  # keeps the id taken while this runs
            part._parameters[name] = made[id(param)]
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    for param in made.values():
        del param._shardsmith_meta
    source.versions = {id(p): p._version for p in module.parameters()}
    setattr(module, MARK, source)
    guard(module, source)


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise Error("unsupported", f"{what}: its weights are read when it is partitioned (smp.DistributedModel with one "
                                   "stage, otherwise the first step), and only those of the rank's own stage")

    return refuse


def _refuse_to_compute(*args: Any, **kwargs: Any) -> NoReturn:
    raise Error("unsupported", "this model computes only as smp.DistributedModel(model): call what that returns, in a function decorated "
                               "with smp.step; by itself it doesn't have all of its weights on this rank")


def guard_forward(module: nn.Module, source: Source) -> None:
    """Makes calling the module itself, or one inside of it, an error until `release`."""
    source.released += [part.register_forward_pre_hook(_refuse_to_compute, prepend=True).remove for part in module.modules()]


def guard(module: nn.Module, source: Source) -> None:
    """Makes computing, saving and copying an error until `release`."""
    marked: list[tuple[Any, str]] = []

    def mark(target: Any, name: str, value: Any) -> None:
        target.__dict__[name] = value
        marked.append((target, name))

    guard_forward(module, source)
    handles = []
    for part in module.modules():
        handles.append(part.register_state_dict_pre_hook(_refuse("this model has no state_dict yet")))
        mark(part, "__deepcopy__", _refuse("this model can't be copied yet"))
        mark(part, "__copy__", _refuse("this model can't be copied yet"))
        mark(part, "__reduce_ex__", _refuse("this model can't be saved yet"))
    for param in module.parameters():
        mark(param, "__deepcopy__", _refuse("this parameter can't be copied yet"))
        mark(param, "__reduce_ex__", _refuse("this parameter can't be saved yet"))

    def release() -> None:
        for handle in handles:
            handle.remove()
        for target, name in marked:
            target.__dict__.pop(name, None)

    source.released.append(release)


def release(source: Source) -> None:
    for function in source.released:
        function()
    source.released.clear()


def source_of(module: nn.Module) -> Source | None:
    return getattr(module, MARK, None)


def free(param: nn.Parameter) -> None:
    """A parameter of another stage: the object stays, its memory and gradient go."""
    param.grad = None
    with torch.no_grad():
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)


def architectures(module: nn.Module, values: dict[str, Any]) -> Any:
    """What config.json says when transformers saves the module: its class, or what a user's class derives from."""
    known = [c.__name__ for c in type(module).__mro__ if c.__module__.startswith("transformers.models.")]
    return known[:1] or values.get("architectures")


def config_text(module: nn.Module) -> str:
    """The module's configuration as config.json has it."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise Error("unsupported", f"{type(module).__name__} has no transformers configuration: this version splits "
                                   "models of known Hugging Face families only")
    values = config.to_dict()
    values["architectures"] = architectures(module, values)
    return json.dumps(values, default=_plain)


def saved_config_text(module: nn.Module) -> str:
    """What a checkpoint keeps of the configuration: the source folder's own config.json, so that nothing it says is lost,
    with what code has changed since."""
    source = source_of(module)
    if source is None or source.folder is None:
        return config_text(module)
    from transformers import AutoConfig

    values = json.loads(pathlib.Path(source.folder, "config.json").read_text(encoding="utf-8"))
    before, now = AutoConfig.from_pretrained(source.folder).to_dict(), module.config.to_dict()
    for key, value in now.items():
        if key != "_name_or_path" and (key not in before or before[key] != value):
            # transformers renamed it, and reads both.
            values["torch_dtype" if key == "dtype" and "torch_dtype" in values else key] = value
    values["architectures"] = architectures(module, values)
    return json.dumps(values, default=_plain, indent=2) + "\n"


def _plain(value: Any) -> str:
    """Overrides given in code may hold torch types."""
    return str(value).removeprefix("torch.")
