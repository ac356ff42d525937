"""`smp.DistributedModel`: the user's model, computed stage by stage."""
from __future__ import annotations

import contextvars
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardsmith.errors import Error
from shardsmith.smp import (activation_checkpointing, any_module, creation, model_state, placing, precision, registering, shards,
                            weightless, weights)
from shardsmith.smp.model_queries import ModelQueries, add_depths
from shardsmith.smp.output import ModelOutput
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Piece, cut, pieces, torch_word

if TYPE_CHECKING:
    from shardsmith._engine import Stage

# The microbatch that the running thread computes; None outside of a step.
current_microbatch: contextvars.ContextVar[int | None] = contextvars.ContextVar("microbatch", default=None)

_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels")
# Arguments of transformers' forward that change nothing here unless they ask for something.
_IGNORED = ("use_cache", "return_dict", "cache_position")


class HookHandle:
    def __init__(self, hooks: list[Any], hook: Any):
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class DistributedModel(ModelQueries, nn.Module):
    """One per script. `model(...)` and `model.backward(loss)` belong into a function decorated with smp.step; with one
    stage they and plain `loss.backward()` work outside too. A step's threads call forward and backward, one at a time
    in the schedule's order; all else is for the main thread."""

    def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> DistributedModel:
        known = state.model
        if known is not None and (module is known or module is known.module or module is known.given):
            return known  # the Trainer wraps again at every evaluation
        return super().__new__(cls)

    def __init__(self, module: nn.Module, trace_device: str = "gpu", trace_execution_times: bool = False,
                 overlapping_allreduce: bool = True, backward_passes_per_step: int = 1,
                 average_grads_across_microbatches: bool = True, bucket_cap_mb: float = 25,
                 trace_memory_usage: bool = False, broadcast_buffers: bool = True, find_unused_parameters: bool = False,
                 gradient_as_bucket_view: bool = False):
        if state.model is self:
            return
        cfg = state.require().cfg
        if not isinstance(module, nn.Module):
            raise Error("invalid_argument", f"smp.DistributedModel takes a torch.nn.Module, not {type(module).__name__}")
        if state.model is not None:
            raise Error("invalid_argument", "smp.DistributedModel: one per script, and there is one already")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise Error("invalid_argument", "smp.DistributedModel takes the model without DistributedDataParallel around it")
        if trace_device not in ("gpu", "cpu"):
            raise Error("invalid_argument", f"trace_device must be 'gpu' or 'cpu', not {trace_device!r}")
        if trace_execution_times and trace_device == "cpu":
            raise Error("invalid_argument", "trace_execution_times must be False where trace_device is 'cpu'")
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise Error("invalid_argument", "backward_passes_per_step must be a whole number of at least 1, not "
                                            f"{backward_passes_per_step!r}")
        from shardsmith import _core

        super().__init__()
        self.__dict__["given"] = module  # by the script; its tensor-parallel parts are replaced in place, itself here
        self.is_plain = not any_module.is_of_a_family(module) or registering.has_inner_marks(module)
        if self.is_plain:
            if cfg.pipeline_parallel_degree > 1:
                raise Error("unsupported", f"{type(module).__name__} is of no family that this version splits into stages: "
                                           "pipeline_parallel_degree must be 1")
            module = state.together(lambda: registering.replace(module))
        self.module = module
        add_depths(module)
        self.training = module.training
        self.backward_passes_per_step = backward_passes_per_step
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self.partitioned = False
        self._partitioned_parameters: dict[str, nn.Parameter] | None = None  # of all ranks; those of others are empty
        self._bucket_cap_mb = float(bucket_cap_mb)
        self._broadcast_buffers = broadcast_buffers
        self._config_text = any_module.describe(module) if self.is_plain else weightless.config_text(module)
        tp_rank, tp_size = state.group_rank("tp"), state.mesh.tp_size
        self._whole = _core.Model(self._config_text)
        self._model = _core.Model(self._config_text, tp_rank, tp_size)
        # By Hugging Face's names: of the whole tensors, and of this rank's parts.
        self.whole_shapes = {name: list(shape) for name, shape, *_ in self._whole.tensors}
        self.own_shapes = {name: list(shape) for name, shape, *_ in self._model.tensors}
        if not self.is_plain:
            self._check_parameters()
        if tp_size > 1 and not self.is_plain:
            creation.require_tensor_parallelism(module)
            self._slice_parameters()
        self._first: list[int] | None = None  # the partition
        self._stage: Stage | None = None
        self._local: dict[str, nn.Parameter] = {}
        # Once the partition is made, by name. Under bf16 and fp16 the masters of what this rank's optimizer updates; with
        # shard_optimizer_state, and several replicas, what that is.
        self.masters: dict[str, nn.Parameter] | None = None
        self.shards: dict[str, shards.Shard] | None = None
        self._virtual: dict[str, nn.Parameter] = {}  # shards that are no masters
        self._open = False  # a forward outside of a step has begun
        self._backward_seen = False
        self._passes = 0
        self._guard = weightless.Source(None)  # holds what keeps the user's module from computing or being saved by itself
        self._going_backward: set[int] = set()  # microbatches in model.backward
        self._post_partition_hooks: list[Any] = []
        self._post_step_hooks: list[Any] = []
        self._forward_signature = inspect.signature(module.forward)
        state.model = self
        if cfg.pipeline_parallel_degree == 1:
            self.partition()

    def _named(self) -> dict[str, nn.Parameter]:
        """The module's, under the names that Hugging Face's files have; after the partition those that were there for it."""
        if self._partitioned_parameters is not None:
            return self._partitioned_parameters
        aliases, known = self._model.aliases, {name for name, *_ in self._model.tensors}
        return {name if name in known else aliases.get(name, name): p for name, p in self.module.named_parameters()}

    def dtypes(self) -> dict[str, str]:
        """What the parameters' weights are read into: under bf16 and fp16 float32 masters."""
        narrow = precision.narrow_dtype() is not None
        found = {name: "float32" if narrow else torch_word(param.dtype) for name, param in self._named().items()}
        return found | {name: torch_word(buffer.dtype) for name, buffer in self._stored_buffers().items()}

    def _stored_buffers(self) -> dict[str, torch.Tensor]:
        """What checkpoints hold besides parameters: of the engine's families nothing."""
        return any_module.persistent_buffers(self.module) if self.is_plain else {}

    def held(self) -> dict[str, torch.Tensor]:
        """All that checkpoints hold of this rank, by name; after the partition."""
        return {**self._local, **self._stored_buffers()}

    def _check_parameters(self) -> None:
        expected = {name: list(shape) for name, shape, _, _ in self._whole.tensors}
        found = {name: list(p.shape) for name, p in self._named().items()}
        # torch names a parameter once, by the first path that leads to it.
        first_path = {id(p): name for name, p in self.module.named_parameters()}
        again = {name: first_path[id(p)] for name, p in self.module.named_parameters(remove_duplicate=False)}
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                if again.get(name, name) != name:
                    raise Error("unsupported", f"parameter {name} of {type(self.module).__name__} is {again[name]} again: a "
                                               f"module is used twice, where {self._whole.description['model_type']} has two")
                raise Error("unsupported", f"parameter {name} of {type(self.module).__name__}: the configuration says "
                                           f"{expected.get(name, 'none')}, the model has {found.get(name, 'none')}")

    # The partition.
    def partition(self) -> None:
        """Decides which layers are whose, and reads this rank's weights. At the first step, called by step itself."""
        if self.partitioned:
            return
        # Rank 0's seed is everybody's, so that initial weights don't depend on the layout.
        self.seed = int(state.exchange(str(torch.initial_seed()).encode())[0]) & (2**63 - 1)
        if state.pending is not None and state.pending.seed is not None:
            self.seed = state.pending.seed
        self._first = placing.decide(self)
        begin = time.monotonic()
        state.together(self._partition)
        self._needs_sync = weights.load_model(self, state.pending)
        state.together(self._place)
        self._say_partition(time.monotonic() - begin)
        self._make_stage()
        self._make_what_is_optimized()
        self.partitioned = True
        weights.load_pending_optimizer()
        for hook in list(self._post_partition_hooks):
            hook(self, state.optimizer)

    def _say_partition(self, seconds: float) -> None:
        count = sum(p.numel() for p in self._local.values())
        if self.is_plain:
            logger.info("[%d] %s: %d parameters in %d tensors, computed by torch; %.1f s", state.rank, type(self.module).__name__,
                        count, len(self._local), seconds)
            return
        logger.info("[%d] partition: stage %d of %d holds layers %d to %d, %d parameters in %d tensors; %.1f s", state.rank,
                    state.stage, state.stages, self._first[state.stage], self._first[state.stage + 1] - 1,
                    count, len(self._local), seconds)

    def _partition(self) -> None:
        """Which parameters are this rank's, in what type."""
        parameters = self._partitioned_parameters = self._named()
        names = [name for name in self._model.stage_tensors(self._first, state.stage) if name in parameters]
        self._local = {name: parameters[name] for name in names}
        for name, param in parameters.items():
            if name not in self._local:
                weightless.free(param)
        if state.optimizer is not None:
            state.optimizer.drop_foreign_parameters()
        if precision.narrow_dtype() is not None:
            precision.widen(self._local, weightless.source_of(self.module) is not None)
            for buffer in self._stored_buffers().values():
                if buffer.is_floating_point():  # of one type with the parameters, as torch's kernels want them
                    buffer.data = buffer.data.to(precision.narrow_dtype())

    def _place(self) -> None:
        """What has been read goes where it is computed with."""
        if state.device.type != "cpu":
            for param in self._local.values():
                param.data = param.data.to(state.device)
            for buffer in self.module.buffers() if self.is_plain else ():
                buffer.data = buffer.data.to(state.device)
        source = weightless.source_of(self.module)
        if state.stages > 1:
            if source is None:  # else it is guarded already
                weightless.guard(self.module, self._guard)
            return
        if source is not None:
            weightless.release(source)
        if state.mesh.tp_size > 1 and not self.is_plain:
            weightless.guard_forward(self.module, self._guard)

    def _slice_parameters(self) -> None:
        """Parameters get the shapes of this rank's part, and its values where the module has any."""
        shapes = {name: shape for name, shape, _, _ in self._model.tensors}
        weightless_yet = weightless.source_of(self.module) is not None
        for name, param in self._named().items():
            if list(param.shape) == shapes[name]:
                continue
            own = torch.empty(shapes[name], dtype=param.dtype, device=param.device)
            if not weightless_yet:
                cut(self._whole, self._model, name, param.detach(), own)
            param.data = own

    def set_seed(self, seed: int) -> None:
        """That of a run which goes on here: its dropout masks go on too, in whatever layout."""
        self.seed = seed
        if self._stage is not None:
            self._stage.set_seed(seed)

    def _make_what_is_optimized(self) -> None:
        """Masters, shards, or the masters of shards. The weights are the same on all replicas by now."""
        dtype = precision.narrow_dtype()
        if dtype is not None:
            wide = precision.narrow(self._local, dtype)
            self._needs_sync = False
            self._make_stage()
        if state.cfg.shard_optimizer_state and state.mesh.rdp_size > 1:
            self.shards = shards.of_stage(self.stage)
        if dtype is not None:
            self.masters = precision.make_masters(self._local, wide, self.shards)
            logger.info("[%d] parameters are in %s, their masters in float32", state.rank, str(dtype).removeprefix("torch."))
        elif self.shards is not None:
            self._virtual = {name: nn.Parameter(shard.of(self._local[name].detach())) for name, shard in self.shards.items()}
        if self.shards is not None:
            logger.info("[%d] the optimizer updates %d of %d elements here", state.rank,
                        sum(p.numel() for p in self.optimized.values()), sum(p.numel() for p in self._local.values()))
        if state.optimizer is not None:
            state.optimizer.adopt_optimized()

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer updates, by name: its parameters, their masters, or shards of either."""
        if self.masters is not None:
            return self.masters
        return self._local if self.shards is None else self._virtual

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor like the parameter, what belongs to optimized[name]."""
        return tensor if self.shards is None else self.shards[name].of(tensor)

    def optimized_pieces(self, name: str) -> list[Piece]:
        """The logical tensors of which optimized[name] has elements, and where."""
        parts = pieces(self._model, name)
        return parts if self.shards is None else shards.cut_pieces(parts, self.shards[name])

    def masters_changed(self) -> None:
        """After something was written to all masters: the parameters become their rounding."""
        if self.masters is None:
            return
        with torch.no_grad():
            for name, master in self.masters.items():
                self.rows(name, self._local[name]).copy_(master)

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards of this rank, under shard_optimizer_state; after the partition."""
        self._need_partition("virtual_named_parameters")
        if self.shards is None:
            raise Error("invalid_argument", "model.virtual_named_parameters: there are some with 'shard_optimizer_state' and "
                                            "several replicas only")
        return iter(self.optimized.items())

    def _make_stage(self) -> None:
        from shardsmith import _engine

        if self.is_plain:
            self._stage = any_module.Stage(self._config_text, dict(self._local), list(self.module.buffers()),
                                           self._bucket_cap_mb, self._broadcast_buffers)
            if self._needs_sync and state.size > 1:
                self.guarded(self._stage.sync_parameters)
            return
        self._stage = _engine.Stage(
            self._config_text, self._first, state.stage, dict(self._local), state.groups["engine_pp"],
            state.groups["engine_rdp"], state.groups["engine_tp"], split_sequence=state.cfg.optimize == "memory",
            prescaled_batch=state.cfg.prescaled_batch, peer_timeout=state.limits.communication,
            seed=self.seed, bucket_cap_mb=self._bucket_cap_mb,
            pipeline=state.cfg.pipeline, active_microbatches=state.cfg.active_microbatches,
            shard_optimizer_state=state.cfg.shard_optimizer_state,
            switches=registering.engine_switches(self.module))
        if self._needs_sync and state.size > 1:
            self.guarded(self._stage.sync_parameters)

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise Error("invalid_argument", "model.cpu() has brought the model together: it trains no more" if self.partitioned else
                        "the model is not partitioned yet: that happens at the first step")
        return self._stage

    def guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call of the engine from the main thread; what it raises names the rank at fault."""
        from shardsmith.smp.session import is_communication_error

        try:
            return function(*args)
        except Exception as error:
            if is_communication_error(error):
                raise state.peer_error(str(error).splitlines()[0]) from error
            state.fail(error)
            raise

    # Computing.
    def _forward_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current_microbatch.get() is None:
            self._begin_alone(any_module.first_rows((args, kwargs)))
        dtype = precision.narrow_dtype()
        move = any_module.input_mover(state.device, dtype)
        result = self.module(*any_module.moved(args, move), **any_module.moved(kwargs, move))
        return result if dtype is None else any_module.moved(result, any_module.widened)

    def sample_place(self, microbatch: int) -> tuple[int, int, int] | None:
        """(seed, step, number of the first sample) of what is being computed, for dropout masks; None where the model is
        not at work."""
        stage = self._stage
        if not isinstance(stage, any_module.Stage) or not (self._open or current_microbatch.get() is not None):
            return None
        rows = stage.rows
        if not state.cfg.prescaled_batch:  # the group's rows as one batch
            rows *= state.mesh.tp_size
        return self.seed, stage.step, stage.first_sample + microbatch * rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_plain:
            return self._forward_plain(args, kwargs)
        inputs, as_tuple = self._inputs(args, kwargs)
        microbatch = current_microbatch.get()
        if microbatch is None:
            self._need_one_stage("model(...)")
            self._begin_alone(len(inputs["input_ids"]))
            microbatch = 0
        entries = self.stage.forward(microbatch, inputs)
        if state.stages > 1 and "loss" in entries and torch.is_grad_enabled():
            entries["loss"] = self._watched(entries["loss"], microbatch)
        stage, last, number = self.stage, state.stage == state.stages - 1, state.step_calls

        def fetch(compute: Callable[[int], torch.Tensor], what: str) -> torch.Tensor:
            if not last:
                raise Error("unsupported", f"the model's {what} are on the last stage only: pass labels= for the loss, or "
                                           "return the output from the step function, which brings it to every stage",
                            state.rank)
            if number != state.step_calls:
                raise Error("unsupported", f"the model's {what} are gone after the step: read them in the step function, or "
                                           "return them from it", state.rank)
            value = compute(microbatch)
            return value if self.masters is None else value.float()

        fetched = {"logits": functools.partial(fetch, stage.output, "logits")}
        if self._model.description["head"] == "none":
            fetched = {"last_hidden_state": functools.partial(fetch, stage.output, "hidden states")}
            if self._model.description["has_pooler"]:
                fetched["pooler_output"] = functools.partial(fetch, stage.pooled, "pooled states")
        output = ModelOutput(dict(entries), fetched)
        return output.to_tuple() if as_tuple else output

    def _watched(self, loss: torch.Tensor, microbatch: int) -> torch.Tensor:
        """Its plain backward() is an error, on every stage: it would leave out the other stages."""
        def refuse(gradient: torch.Tensor) -> None:
            if microbatch not in self._going_backward:
                raise Error("invalid_argument", "loss.backward() in a step over several stages: use model.backward(loss), which sends "
                                                "the gradients on to the other stages", state.rank)

        if not loss.requires_grad:  # stands for the last stage's
            loss = loss.detach().requires_grad_().clone()
        loss.register_hook(refuse)
        return loss

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], bool]:
        try:
            arguments = dict(self._forward_signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise Error("invalid_argument", f"model(...): {error}") from None
        for name, parameter in self._forward_signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        inputs = {}
        for name, value in arguments.items():
            if name in _INPUTS:
                if value is not None:
                    inputs[name] = self._input(name, value)
            elif name not in _IGNORED and value is not None and value is not False:
                if name == "logits_to_keep" and isinstance(value, int) and value == 0:
                    continue
                raise Error("unsupported", f"model(...): argument '{name}' is not there in this version; these are: "
                                           + ", ".join(_INPUTS))
        if "input_ids" not in inputs:
            raise Error("invalid_argument", "model(...): input_ids is missing")
        mask = inputs.get("attention_mask")
        if mask is not None and bool((mask != 0).all()):
            del inputs["attention_mask"]
        return inputs, arguments.get("return_dict") is False

    def _input(self, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise Error("invalid_argument", f"model(...): {name} must be a tensor, not {type(value).__name__}")
        if name == "labels" and self._model.description["head"] == "classification":
            return value.to(state.device)  # whole numbers or not: that says which loss is meant
        if value.dim() != 2:
            raise Error("invalid_argument", f"model(...): {name} must be [batch, sequence], not {list(value.shape)}")
        value = value.to(state.device)
        return value if name == "attention_mask" else value.to(torch.int64)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Replaces loss.backward(). Gradients are averaged over microbatches (or summed, as the model was told)."""
        if self.is_plain:
            return self._backward_plain(tensors, grad_tensors)
        if grad_tensors is not None:
            raise Error("unsupported", "model.backward(grad_tensors=...) is not there in this version")
        if isinstance(tensors, (list, tuple)):
            if len(tensors) != 1:
                raise Error("unsupported", "model.backward takes one loss in this version")
            tensors = tensors[0]
        microbatch = current_microbatch.get()
        last = state.stage == state.stages - 1
        if last and not (isinstance(tensors, torch.Tensor) and tensors.numel() == 1):
            raise Error("invalid_argument", "model.backward takes a scalar loss, not "
                        + (f"a tensor of shape {list(tensors.shape)}" if isinstance(tensors, torch.Tensor)
                           else type(tensors).__name__))
        scale = 1.0
        if microbatch is None:
            self._need_one_stage("model.backward(...)")
            microbatch = 0
        elif self.average_grads_across_microbatches:
            scale = 1.0 / state.cfg.microbatches
        self._backward_seen = True
        if last:
            self._check_loss([tensors], microbatch)
        self._going_backward.add(microbatch)
        self.stage.backward(microbatch, tensors if last else None, scale)
        self._going_backward.discard(microbatch)

    def _check_loss(self, losses: list[torch.Tensor], microbatch: int) -> None:
        if state.cfg.nan_loss == "ignore":
            return
        for loss in losses:
            if bool(torch.isfinite(loss).all()):
                continue
            said = float(loss) if loss.numel() == 1 else "not finite"
            text = f"step {state.step_calls}, microbatch {microbatch}: the loss is {said}"
            if state.cfg.nan_loss == "stop":
                raise Error("io", f"{text}; nothing was updated ('nan_loss': \"stop\")", state.rank)
            logger.warning("[%d] %s; the update will be skipped", state.rank, text)

    def _backward_plain(self, tensors: Any, grad_tensors: Any) -> None:
        losses = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        given = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(losses)
        if len(given) != len(losses) or not all(isinstance(loss, torch.Tensor) for loss in losses):
            raise Error("invalid_argument", "model.backward takes a loss or several, and as many grad_tensors")
        inside = current_microbatch.get() is not None
        scale = 1.0 / state.cfg.microbatches if inside and self.average_grads_across_microbatches else 1.0
        self._backward_seen = True
        self._check_loss(losses, current_microbatch.get() or 0)
        self.stage.backward(losses, given, scale)

    def _need_one_stage(self, what: str) -> None:
        if state.stages > 1:
            raise Error("invalid_argument", f"{what} belongs into a function decorated with smp.step where "
                                            "pipeline_parallel_degree is above 1", state.rank)

    def _begin_alone(self, rows: int) -> None:
        if self._open:
            self.finish(False)
        self.begin(1, rows)
        self._open = True

    def begin(self, microbatches: int, rows: int) -> None:
        """Of a step. `rows`: of this replica's batch."""
        if self._open:
            self.finish(False)
        self._backward_seen = False
        self._going_backward.clear()
        if state.step_calls == 0:
            if self.is_plain:
                any_module.checkpoint_activations(self.module)
            else:
                plan = state.together(lambda: activation_checkpointing.decide(self, self._first))
                self.stage.set_activation_checkpointing(plan)
        feeders = 1 if state.cfg.prescaled_batch else state.mesh.tp_size  # of samples, in a replica
        self.stage.begin_step(state.step_calls, microbatches, torch.is_grad_enabled(), self.module.training,
                              state.group_rank("rdp") * feeders * rows, rows,
                              (self._passes + 1) % self.backward_passes_per_step == 0,
                              1.0 if state.optimizer is None else state.optimizer.loss_scale)
        state.step_calls += 1

    def finish(self, in_step: bool) -> None:
        """Of a step: gradients are reduced every backward_passes_per_step-th one that went backward."""
        if self._open:
            self.stage.finish_microbatch(0)
            self._open = False
        reduce = False
        if in_step and self._backward_seen:
            self._passes += 1
            reduce = self._passes % self.backward_passes_per_step == 0
        self.stage.finish_step(reduce)

    def before_update(self) -> None:
        """Gradients made outside of a step are reduced here."""
        if self._open:
            if state.cfg.fp16 and not self._backward_seen and state.optimizer.loss_scale != 1:
                raise Error("invalid_argument", "under fp16 use model.backward(loss) instead of loss.backward(): it scales "
                                                "the loss", state.rank)
            self._open = False
            self.stage.finish_microbatch(0)
            self.guarded(self.stage.finish_step, True)

    # The module's own interface, under the user's names.
    def get_module(self) -> nn.Module:
        return self.module

    def train(self, mode: bool = True) -> DistributedModel:
        super().train(mode)
        return self

    def eval(self) -> DistributedModel:
        return self.train(False)

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True,
                      remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stage; after the partition."""
        self._need_partition("local_named_parameters")
        names = {id(p): name for name, p in self.module.named_parameters()}
        return iter([(names[id(p)], p) for p in self._local.values()])

    def local_parameters(self) -> Iterator[nn.Parameter]:
        return (param for _, param in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._need_partition("local_named_buffers")
        return self.module.named_buffers()

    def local_buffers(self) -> Iterator[torch.Tensor]:
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules with parameters of this rank's stage in them, and those without any parameters."""
        self._need_partition("local_named_modules")
        local = {id(p) for p in self._local.values()}
        for name, module in self.module.named_modules():
            parameters = list(module.parameters())
            if not parameters or any(id(p) in local for p in parameters):
                yield name, module

    def local_modules(self) -> Iterator[nn.Module]:
        return (module for _, module in self.local_named_modules())

    def _need_partition(self, what: str) -> None:
        if not self.partitioned:
            raise Error("invalid_argument", f"model.{what}: the partition is made at the first step")

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """hook(model, optimizer), once, after partitioning and before the first forward."""
        self._post_partition_hooks.append(hook)
        return HookHandle(self._post_partition_hooks, hook)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """hook(model, optimizer), once, at the end of the first step call, before optimizer.step()."""
        self._post_step_hooks.append(hook)
        return HookHandle(self._post_step_hooks, hook)

    def run_post_step_hooks(self) -> None:
        hooks, self._post_step_hooks[:] = list(self._post_step_hooks), []
        for hook in hooks:
            hook(self, state.optimizer)

    # State.
    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part: the user's names, and the mark `_smp_is_partial`."""
        self._need_partition("local_state_dict")
        return model_state.local(self)

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Mapping[str, Any]:
        """The whole model under the user's names, brought together over the replica's ranks, which all must call it. With
        gather_to_rank0 all ranks but 0 get an empty dict."""
        if state.mesh.mp_size == 1:
            values = self.module.state_dict(*args, **kwargs)
            return values if not gather_to_rank0 or state.rank == 0 else {}
        self._need_partition("state_dict")
        destination = kwargs.get("destination", args[0] if args else None)
        values = model_state.complete(self, gather_to_rank0, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        if destination is None:
            return values
        destination.update(values)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False,
                        **kwargs: Any) -> Any:
        """A whole state dict (of Hugging Face's names or ours), or parts as local_state_dict gives them: these are brought
        together, unless same_partition_load. Before the partition it is kept until then."""
        if unknown := [word for word, value in kwargs.items() if value]:
            raise Error("unsupported", f"model.load_state_dict({unknown[0]}=...): weights are copied into the model's own tensors")
        return model_state.load(self, state_dict, strict, same_partition_load)

    # Moving: parameters are on the rank's device by themselves.
    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        if not self.partitioned:
            logger.warning("model.to(...) before the partition is ignored: parameters go to %s by themselves", state.device)
            return self
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None or (device is not None and device.type != state.device.type):
            raise Error("unsupported", f"model.to({device or dtype}) after the partition: the stage computes on "
                                       f"{state.device} with the dtype that it was built with")
        return self

    def cuda(self, device: Any = None) -> DistributedModel:
        return self.to(torch.device("cuda"))

    def cpu(self) -> DistributedModel:
        """Brings parameters together over the replica's ranks, which all must call it: get_module() is then whole and on the CPU
        on each of them, as for saving it. The model trains no more."""
        self._need_partition("cpu")
        if state.mesh.mp_size > 1:
            whole = model_state.complete(self, False, "")
            for path, param in list(self.module.named_parameters(remove_duplicate=False)):
                owner, _, name = path.rpartition(".")
                made = nn.Parameter(whole[path].detach().cpu(), requires_grad=param.requires_grad)
                self.module.get_submodule(owner)._parameters[name] = made
            if hasattr(self.module, "tie_weights"):
                self.module.tie_weights()
            for source in (self._guard, weightless.source_of(self.module)):
                if source is not None:
                    weightless.release(source)
            self._stage = None
        elif state.device.type != "cpu":
            self.module.cpu()
            self._stage = None
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        raise Error("unsupported", "a DistributedModel can't be copied")
