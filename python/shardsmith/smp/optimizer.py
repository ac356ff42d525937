"""`smp.DistributedOptimizer`: a torch optimizer over this rank's parameters, its state known by name."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardsmith.errors import Error
from shardsmith.smp import adamw, optimizer_checkpoint, optimizer_state, precision, weights
from shardsmith.smp.optimizer_names import OptimizerNames
from shardsmith.smp.session import logger, state


class _Checked(NamedTuple):
    """What is known of the gradients that the next step takes."""

    overflow: bool = False  # one of them, on any rank, is not finite
    factor: float = 1.0  # that clipping puts on them


class DistributedOptimizer(OptimizerNames, torch.optim.Optimizer):
    """Wraps `optimizer`, which stays what computes, on float32 masters under bf16 and fp16. The loss-scale arguments matter
    under fp16 only."""

    _is_accelerate_prepared = True
    _step_supports_amp_scaling = False  # a GradScaler unscales gradients, whatever the wrapped optimizer could
    overflow = False  # whether the last step was skipped, on all ranks alike

    def __init__(self, optimizer: torch.optim.Optimizer, static_loss_scale: float | None = 1.0,
                 dynamic_loss_scale: bool = False, dynamic_loss_args: dict[str, Any] | None = None):
        state.require()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Error("invalid_argument",
                        f"smp.DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise Error("invalid_argument", "smp.DistributedOptimizer: this optimizer is one already")
        self._scaler = precision.make_scaler(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self._checked: _Checked | None = None
        self._kept: dict[str, Any] | None = None  # given to load_state_dict before the partition
        self.__dict__["optimizer"] = optimizer
        # torch's schedulers and hooks look for these on an optimizer.
        self.__dict__["_optimizer_step_pre_hooks"] = optimizer._optimizer_step_pre_hooks
        self.__dict__["_optimizer_step_post_hooks"] = optimizer._optimizer_step_post_hooks
        self._refuse_duplicates()
        self._given = [list(group["params"]) for group in optimizer.param_groups]
        state.optimizer = self
        if state.model is not None and state.model._local:
            self.drop_foreign_parameters()
            self.adopt_optimized()
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

    # Under fp16 the gradients are of the loss times this.
    @property
    def loss_scaler(self) -> Any:
        return self._scaler

    @property
    def loss_scale(self) -> float:
        return self._scaler.loss_scale

    @property
    def step_was_skipped(self) -> bool:
        return self.overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        model = state.model
        if model is not None and not model.partitioned:
            raise Error("invalid_argument", "optimizer.step() before the first step: the model is not partitioned")
        masters = None if model is None else model.masters
        result = None
        if closure is not None and masters is not None:
            with torch.enable_grad():
                result, closure = closure(), None
        if model is not None:
            model.before_update()
        skips = state.cfg.fp16 or state.cfg.nan_loss == "skip"
        if skips and self._checked is None and model is not None:
            self._checked = _Checked(not math.isfinite(model.guarded(model.stage.grad_norm)))
        checked, self._checked = self._checked or _Checked(), None
        self.overflow = checked.overflow and skips
        if self.overflow:
            logger.warning("[%d] a gradient is not finite: the update is skipped%s", state.rank,
                           f", loss scale {self.loss_scale:g}" if state.cfg.fp16 else "")
        else:
            # An update that fails on this rank is the others' error too, who go on to the next step.
            update = self._update if model is None else functools.partial(model.guarded, self._update)
            result = update(closure, checked.factor / self.loss_scale, result)
            state.optimizer_steps += 1
        self._scaler.update(self.overflow)
        return result

    def _update(self, closure: Callable[[], Any] | None, gradient_scale: float, result: Any) -> Any:
        model = state.model
        # Masters and shards, whose gradients are in the parameters.
        apart = {} if model is None or model.optimized is model._local else model.optimized
        if closure is None and adamw.is_ours(self.optimizer):
            sources = {id(p): self._source(name) for name, p in apart.items()}
            done = None if model is None or model.shards is None else model.stage.start_gather
            adamw.update(self.optimizer, sources, gradient_scale, 1 if done is None else model.stage.buckets, done)
            if done is not None:
                model.stage.finish_gather()
            return result
        with torch.no_grad():
            for name, param in apart.items():
                gradient = self._source(name).gradient
                if gradient is not None and model.masters is not None:
                    gradient = gradient.float() if gradient_scale == 1 else gradient.float().mul_(gradient_scale)
                param.grad = gradient
        given = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        for param in apart.values():
            param.grad = None
        if model is not None:
            model.masters_changed()
            if model.shards is not None:
                model.stage.gather_shards()
        return given if result is None else result

    @staticmethod
    def _source(name: str) -> adamw.Source:
        """Where the gradient of optimized[name] comes from and its rounding goes to."""
        model = state.model
        param = model._local[name]
        gradient = None if param.grad is None else model.rows(name, param.grad)
        bucket = 0 if model.shards is None else model.shards[name].bucket
        return adamw.Source(gradient, None if model.masters is None else model.rows(name, param.detach()), param, bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._checked = None
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if state.model is not None and state.model.optimized is not state.model._local:
            for param in state.model._local.values():
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad = torch.zeros_like(param.grad)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._refuse_duplicates()
        self._given.append(list(self.optimizer.param_groups[-1]["params"]))
        if state.model is not None and state.model._local:
            self.drop_foreign_parameters()
            self.adopt_optimized()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clips by the norm over all stages and tensor-parallel ranks, each parameter counted once. Returns that norm,
        before clipping and without the loss scale; -1 after an overflow under fp16: step() then skips the update."""
        model = state.model
        if model is None or not model.partitioned:
            raise Error("invalid_argument", "clip_master_grads before the first step")
        if not float(max_norm) > 0:
            raise Error("invalid_argument", f"clip_master_grads: max_norm must be above 0, not {max_norm}")
        model.before_update()
        if model.masters is None:
            norm = model.guarded(model.stage.clip_grad_norm, float(max_norm), float(norm_type))
            self._checked = _Checked(not math.isfinite(norm))
            return norm
        # Nothing is written: the update takes the factor along.
        norm = model.guarded(model.stage.grad_norm, float(norm_type)) / self.loss_scale
        self._checked = _Checked(not math.isfinite(norm), min(1.0, float(max_norm) / (norm + 1e-6)))
        return -1.0 if state.cfg.fp16 and not math.isfinite(norm) else norm

    # Parameters.
    def _names(self) -> dict[int, str]:
        if state.model is None:
            return {}
        names = {id(p): name for name, p in state.model.module.named_parameters()}
        return names | {id(p): name for name, p in state.model.optimized.items()}

    def given_names(self) -> list[list[str]]:
        """Of the groups' parameters as the script gave them, those of other stages among them. Empty without a model."""
        if state.model is None:
            return []
        names = {id(p): name for name, p in state.model._named().items()}
        return [[names[id(p)] for p in group if id(p) in names] for group in self._given]

    def _refuse_duplicates(self) -> None:
        names = self._names()
        seen: set[int | str] = set()
        twice: list[str] = []
        for number, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                known = names.get(id(param), id(param))  # a master counts as its parameter
                if known in seen:
                    twice.append(names.get(id(param), f"number {position} of group {number}, shape {list(param.shape)}"))
                seen.add(known)
        if twice:
            raise Error("invalid_argument", f"the optimizer was given parameters twice: {', '.join(twice)}")

    def drop_foreign_parameters(self) -> None:
        """Those of other stages leave the groups."""
        local = {id(p) for p in (*state.model._local.values(), *state.model.optimized.values())}
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

    def adopt_optimized(self) -> None:
        """Masters and shards take the places of their parameters, in the groups and in the state."""
        model = state.model
        if model.optimized is model._local:
            return
        names = {id(p): name for name, p in model._local.items()}

        def cut(name: str, param: torch.Tensor, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                return value
            value = model.rows(name, value)
            return value.float() if model.masters is not None else value.clone() if model.shards is not None else value

        for group in self.optimizer.param_groups:
            kept = []
            for param in group["params"]:
                name = names.get(id(param))
                target = param if name is None else model.optimized.get(name)
                old = self.optimizer.state.pop(param, None) if target is not param else None
                if target is None:  # another replica updates all of it
                    continue
                kept.append(target)
                if old is not None:
                    self.optimizer.state[target] = {key: cut(name, param, value) for key, value in old.items()}
            group["params"] = kept

    # State.
    def state_dict(self) -> dict[str, Any]:
        """The whole, in torch's form with names beside the positions. Brought together from the replica's ranks, or from all
        where it is sharded, which all must call it."""
        return optimizer_state.complete(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What state_dict() or local_state_dict() gave. Options hold at once; state before the partition is kept until then."""
        optimizer_state.check(self, state_dict)
        optimizer_checkpoint.restore_options(self, state_dict["param_groups"], "optimizer.load_state_dict")
        if (saved := state_dict.get("loss_scaler")) and state.cfg.fp16:
            precision.restore_scaler(self._scaler, saved)
        if state.model is None:
            self.optimizer.load_state_dict(state_dict)
            return
        state.pending_optimizer = None
        self._kept = state_dict
        if state.model.partitioned:
            self.load_kept()

    def load_kept(self) -> None:
        """What load_state_dict was given before the partition."""
        kept, self._kept = self._kept, None
        if kept is not None:
            optimizer_state.load(self, kept)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part. With shard_optimizer_state it is gathered to reduced-data-parallel rank 0, where `state` is a list by
        rank, unless gather_if_shard is False; then all those ranks must call it."""
        return optimizer_state.local(self, gather_if_shard)

    # Checkpoints.
    def saved_tree(self, keep: list[torch.Tensor], skip: set[str]) -> dict[str, Any]:
        return optimizer_checkpoint.saved_tree(self, keep, skip)

    def saved_masters(self, keep: list[torch.Tensor], skip: set[str]) -> dict[str, Any] | None:
        return optimizer_checkpoint.saved_masters(self, keep, skip)

    def read_options(self, pending: weights.Pending) -> None:
        optimizer_checkpoint.read_options(self, pending)

    def prepare_state(self, pending: weights.Pending) -> weights.Reading | None:
        return optimizer_checkpoint.prepare_state(self, pending)
