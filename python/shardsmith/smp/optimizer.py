"""`smp.DistributedOptimizer`: a torch optimizer over this rank's parameters, its state known by name."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import weights
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Staging, make_leaf, pieces

STATE = "optimizer/state/"  # names of state tensors in a checkpoint
_DYNAMIC_ARGUMENTS = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer`, which stays what computes. The loss-scale arguments matter under fp16 only."""

    _is_accelerate_prepared = True
    step_was_skipped = False

    def __init__(self, optimizer: torch.optim.Optimizer, static_loss_scale: float | None = 1.0,
                 dynamic_loss_scale: bool = False, dynamic_loss_args: dict[str, Any] | None = None):
        state.require()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Error("invalid_argument",
                        f"smp.DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise Error("invalid_argument", "smp.DistributedOptimizer: this optimizer is one already")
        for name in dynamic_loss_args or {}:
            if name not in _DYNAMIC_ARGUMENTS:
                raise Error("invalid_argument", f"dynamic_loss_args: unknown key '{name}'; these are: "
                                                + ", ".join(_DYNAMIC_ARGUMENTS))
        self.__dict__["optimizer"] = optimizer
        # torch's schedulers and hooks look for these on an optimizer.
        self.__dict__["_optimizer_step_pre_hooks"] = optimizer._optimizer_step_pre_hooks
        self.__dict__["_optimizer_step_post_hooks"] = optimizer._optimizer_step_post_hooks
        self._refuse_duplicates()
        state.optimizer = self
        if state.model is not None and state.model._local:
            self.drop_foreign_parameters()
        weights.load_pending_optimizer()

    # What passes through.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> Any:
        raise Error("unsupported", "a DistributedOptimizer can't be pickled or copied")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if state.model is not None:
            if not state.model.partitioned:
                raise Error("invalid_argument", "optimizer.step() before the first step: the model is not partitioned")
            state.model.before_update()
        arguments = () if closure is None else (closure,)
        # An update that fails on this rank is the others' error too, who go on to the next step.
        if state.model is None:
            result = self.optimizer.step(*arguments)
        else:
            result = state.model.guarded(self.optimizer.step, *arguments)
        state.optimizer_steps += 1
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._refuse_duplicates()
        if state.model is not None and state.model._local:
            self.drop_foreign_parameters()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clips by the norm over all stages; returns that norm."""
        if float(norm_type) != 2.0:
            raise Error("unsupported", f"clip_master_grads: norm_type {norm_type} is not there in this version, 2 is")
        model = state.model
        if model is None or not model.partitioned:
            raise Error("invalid_argument", "clip_master_grads before the first step")
        model.before_update()
        return model.guarded(model.stage.clip_grad_norm, float(max_norm))

    # Parameters.
    def _names(self) -> dict[int, str]:
        if state.model is None:
            return {}
        return {id(p): name for name, p in state.model.module.named_parameters()}

    def _refuse_duplicates(self) -> None:
        names = self._names()
        seen: set[int] = set()
        twice: list[str] = []
        for number, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) in seen:
                    twice.append(names.get(id(param), f"number {position} of group {number}, shape {list(param.shape)}"))
                seen.add(id(param))
        if twice:
            raise Error("invalid_argument", f"the optimizer was given parameters twice: {', '.join(twice)}")

    def drop_foreign_parameters(self) -> None:
        """Those of other stages leave the groups."""
        local = {id(p) for p in state.model._local.values()}
        names = self._names()
        for group in self.optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise Error("invalid_argument", f"the optimizer holds a parameter of shape {list(unknown[0].shape)} that "
                                                "is not the model's: build it from the wrapped model's parameters")
            for param in group["params"]:
                if id(param) not in local:
                    self.optimizer.state.pop(param, None)
            group["params"] = [p for p in group["params"] if id(p) in local]

    # State.
    def state_dict(self) -> dict[str, Any]:
        if state.stages > 1:
            raise Error("unsupported", "optimizer.state_dict() over several stages is not there in this version: use "
                                       "smp.save_checkpoint, or local_state_dict() for this rank's part")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = {name: value for name, value in state_dict.items() if name != "_smp_is_partial"}
        if state.model is not None and not state.model.partitioned:
            raise Error("unsupported", "optimizer.load_state_dict before the first step is not there in this version: use "
                                       "smp.resume_from_checkpoint")
        self.optimizer.load_state_dict(state_dict)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "_smp_is_partial": state.stages > 1}

    # Checkpoints: state is known by logical names, never by position.
    def saved_tree(self, keep: list[torch.Tensor], skip: set[str]) -> dict[str, Any]:
        """What optimizer_{pp}_{tp}.pt holds. `skip`: Hugging Face names that another stage stores."""
        model = state.model
        hf_names = {id(p): name for name, p in model._local.items()}
        states: dict[str, dict[str, Any]] = {}
        groups = []
        for group in self.optimizer.param_groups:
            names = []
            for param in group["params"]:
                hf_name = hf_names[id(param)]
                names += [piece.name for piece in pieces(model._model, hf_name)]
                if hf_name in skip or param not in self.optimizer.state:
                    continue
                for piece in pieces(model._model, hf_name):
                    states[piece.name] = {}
                for key, value in self.optimizer.state[param].items():
                    self._save_entry(states, hf_name, param, key, value, keep)
            options = {key: _plain_option(value) for key, value in group.items() if key != "params"}
            groups.append({**options, "params": names})
        return {"class": type(self.optimizer).__name__, "state": states, "param_groups": groups}

    @staticmethod
    def _save_entry(states: dict[str, dict[str, Any]], hf_name: str, param: torch.Tensor, key: str, value: Any,
                    keep: list[torch.Tensor]) -> None:
        shaped = isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim() > 0
        rank = state.mesh.coordinates(state.rank)[1]
        for piece in pieces(state.model._model, hf_name):
            name = f"{STATE}{piece.name}/{key}"
            if not isinstance(value, torch.Tensor):
                states[piece.name][key] = value
            elif shaped and rank % piece.copies == 0:
                states[piece.name][key] = make_leaf(piece.read(value), keep, name, piece)
            elif not shaped and rank == 0:  # a counter, the same on every tensor-parallel rank
                states[piece.name][key] = make_leaf(value, keep, name)

    def read_options(self, pending: weights.Pending) -> None:
        """Learning rate and the like, as soon as a checkpoint is asked for: scripts go on to write their own."""
        files = pending.index.values["optimizer"]
        pending.options_done = True
        if not files:
            logger.warning("%s has no optimizer state: it begins anew", pending.where)
            return
        saved = files[min(state.stage, len(files) - 1)]
        if saved["class"] != type(self.optimizer).__name__:
            raise Error("invalid_argument", f"{pending.where} holds the state of {saved['class']}, this optimizer is "
                                            f"{type(self.optimizer).__name__}: use load_optimizer=False to begin anew")
        self._restore_options(saved["param_groups"], pending.where)

    def read_state(self, pending: weights.Pending) -> None:
        """Once the partition is there; also where the state does not exist yet."""
        index = pending.index
        files = index.values["optimizer"]
        if not files:
            return
        plain: dict[str, dict[str, Any]] = {}
        for file in files:
            plain |= file["state"]
        keys: dict[str, list[str]] = {}
        for name in index.names():
            if name.startswith(STATE):
                logical, _, key = name.removeprefix(STATE).rpartition("/")
                keys.setdefault(logical, []).append(key)
        hf_names = {id(p): name for name, p in state.model._local.items()}
        staging = Staging()
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                self._restore_param(param, hf_names[id(param)], index, keys, plain, staging, pending.where)
        staging.read(index, where=pending.where)

    def _restore_param(self, param: torch.Tensor, hf_name: str, index: Any, keys: dict[str, list[str]],
                       plain: dict[str, dict[str, Any]], staging: Staging, where: str) -> None:
        from shardsmith import _core

        parts = pieces(state.model._model, hf_name)
        first, shape = parts[0].name, parts[0].whole
        restored: dict[str, Any] = {}
        for key in keys.get(first, []):
            for piece in parts:
                if key not in keys.get(piece.name, []):
                    raise Error("corrupt", f"{where}: optimizer state {piece.name}/{key} is missing")
            name = f"{STATE}{first}/{key}"
            dtype = getattr(torch, index.dtype(name))
            if list(index.shape(name)) == list(shape) and shape:
                restored[key] = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).detach()
                for piece in parts:
                    staging.add(f"{STATE}{piece.name}/{key}", piece.view(restored[key]), piece)
            else:
                # Step counters stay on the CPU unless the optimizer is of the kinds that keep them with the parameter.
                on_device = any(g.get("fused") or g.get("capturable") for g in self.optimizer.param_groups)
                device = param.device if on_device else torch.device("cpu")
                restored[key] = torch.empty(index.shape(name), dtype=dtype, device=device)
                staging.add(name, restored[key])
        for key, value in plain.get(first, {}).items():
            if key not in restored and not isinstance(value, _core.TensorName):
                restored[key] = value
        # The old state's order of keys doesn't matter: it is a dict by name.
        self.optimizer.state.pop(param, None)
        if restored:
            self.optimizer.state[param] = restored

    def _restore_options(self, saved: list[dict[str, Any]], where: str) -> None:
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise Error("invalid_argument", f"{where} has {len(saved)} parameter groups, this optimizer {len(groups)}")
        for group, options in zip(groups, saved):
            for key, value in options.items():
                if key == "params":
                    continue
                if isinstance(group.get(key), torch.Tensor) and not isinstance(value, torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = copy.deepcopy(value)


def _plain_option(value: Any) -> Any:
    """lr may be a tensor; its value is what counts."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_option(item) for item in value)
    return value
