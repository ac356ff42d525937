"""transformers' own Trainer on this package: what it lacks on its way here, under the switch SHARDSMITH_TRAINER=1.

Its source stays as it is. Where SM_HP_MP_PARAMETERS and SM_FRAMEWORK_PARAMS ask for model parallelism, TrainingArguments
insist on a CUDA device, no optimizer is ever created, and gradients are clipped by one rank's norm. With the switch these
classes are changed once their modules are there: before them, where a script imports this package first, or at the end
of their import, where transformers imports it.
"""
from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

SWITCH = "SHARDSMITH_TRAINER"


def is_asked_for() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in ("1", "true", "yes", "on")


def install() -> None:
    """Once, when this package is imported."""
    sys.meta_path.insert(0, _Finder())
    for name, (class_name, change) in _CHANGES.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        if hasattr(module, class_name):
            change(module)
        elif module.__spec__ is not None:  # half imported: it imports this package
            _watch(module.__spec__)


class _Watched(importlib.machinery.ModuleSpec):
    """A specification that is told, as Python's import tells every one, when its module is complete."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_is_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_is_initializing"] = value
        module = sys.modules.get(self.name)
        class_name, change = _CHANGES[self.name]
        if not value and module is not None and hasattr(module, class_name):
            change(module)


def _watch(spec: importlib.machinery.ModuleSpec) -> importlib.machinery.ModuleSpec:
    spec.__dict__["_is_initializing"] = spec.__dict__.pop("_initializing", False)
    spec.__class__ = _Watched
    return spec


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _CHANGES else None
        return None if spec is None else _watch(spec)


def _change_arguments(module: Any) -> None:
    """The device is the session's; accelerate stays out of the distribution, which is ours."""
    plain = module.TrainingArguments.__dict__["_setup_devices"]

    def _setup_devices(self: Any) -> torch.device:
        if not module.is_sagemaker_mp_enabled():
            return plain.func(self)
        from accelerate.state import AcceleratorState, PartialState

        from shardsmith.smp.session import state

        device = state.require().device
        AcceleratorState._reset_state(reset_partial_state=True)
        with mock.patch.dict(os.environ):
            os.environ.pop("LOCAL_RANK", None)
            os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
            self.distributed_state = PartialState()
        self._n_gpu = 0 if device.type == "cpu" else 1
        return device

    changed = functools.cached_property(_setup_devices)
    changed.__set_name__(module.TrainingArguments, "_setup_devices")
    module.TrainingArguments._setup_devices = changed


def _change_trainer(module: Any) -> None:
    cls = module.Trainer
    wrap_model, clip, get_norm = cls._wrap_model, cls._clip_grad_norm, cls._get_grad_norm

    @functools.wraps(wrap_model)
    def _wrap_model(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        wrapped = wrap_model(self, model, training, dataloader)
        if training and module.is_sagemaker_mp_enabled():
            from shardsmith.smp.optimizer import DistributedOptimizer

            if self.optimizer is None:
                self.create_optimizer()
            elif not isinstance(self.optimizer, DistributedOptimizer):
                self.optimizer = DistributedOptimizer(self.optimizer)
        return wrapped

    @functools.wraps(clip)
    def _clip_grad_norm(self: Any, model: Any) -> Any:
        if not module.is_sagemaker_mp_enabled():
            return clip(self, model)
        return self.optimizer.clip_master_grads(self.args.max_grad_norm)

    @functools.wraps(get_norm)
    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and module.is_sagemaker_mp_enabled():
            grad_norm = model.guarded(model.stage.grad_norm) / self.optimizer.loss_scale
        return get_norm(self, model, grad_norm)

    cls._wrap_model, cls._clip_grad_norm, cls._get_grad_norm = _wrap_model, _clip_grad_norm, _get_grad_norm


_CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "transformers.training_args": ("TrainingArguments", _change_arguments),
    "transformers.trainer": ("Trainer", _change_trainer),
}
