"""`smp.step`: the user's function once per microbatch, pipelined.

Hops of one step: stage 0's arguments to all stages (transfer.py) -> a thread per microbatch, each waiting for its turn
in Stage.forward and Stage.backward (with one stage: a plain loop) -> reduction -> the last stage's results to all.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import transfer
from shardsmith.smp.model import DistributedModel, current_microbatch
from shardsmith.smp.pool import run_microbatches
from shardsmith.smp.session import is_communication_error, logger, state
from shardsmith.smp.tree import LEAF, flatten, unflatten


class StepOutput:
    """A returned tensor of all microbatches, in `outputs`."""

    def __init__(self, outputs: list[torch.Tensor]):
        self.outputs = list(outputs)

    def reduce_mean(self) -> torch.Tensor:
        """Over microbatches."""
        return self.stack().mean(0)

    def reduce_sum(self) -> torch.Tensor:
        """Over microbatches."""
        return self.stack().sum(0)

    def concat(self) -> torch.Tensor:
        """Along the batch axis; scalars become a vector."""
        return self.stack() if self.outputs[0].dim() == 0 else torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """[microbatches, ...]."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same without gradients."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def step(function: Callable[..., Any] | None = None, *, non_split_inputs: list[str] | None = None,
         input_split_axes: dict[str, int] | None = None, detach_outputs: bool = True) -> Any:
    """Decorator, bare or with arguments. Tensor arguments are split along axis 0 or the axis given, but for those named
    in non_split_inputs."""
    if function is None:
        return functools.partial(step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes,
                                 detach_outputs=detach_outputs)
    if not callable(function):
        raise Error("invalid_argument", "smp.step: use @smp.step or @smp.step(non_split_inputs=[...], ...)")
    signature = inspect.signature(function)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for name in [*(non_split_inputs or []), *(input_split_axes or {})]:
        if name not in signature.parameters and not takes_any:
            raise Error("invalid_argument", f"smp.step: {function.__name__} has no argument '{name}'")
    rules = transfer.SplitRules(frozenset(non_split_inputs or ()), dict(input_split_axes or {}))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current_microbatch.get() is not None:
            raise Error("invalid_argument", f"smp.step: {function.__name__} is called inside of another step")
        model = _model()
        model.partition()
        bound = signature.bind(*args, **kwargs)
        return _run(model, function, bound, rules, detach_outputs)

    return call


def _model() -> DistributedModel:
    state.require()
    if state.model is None:
        raise Error("invalid_argument", "smp.step: there is no smp.DistributedModel yet: wrap the model before the first step")
    return state.model


def _run(model: DistributedModel, function: Callable[..., Any], bound: inspect.BoundArguments,
         rules: transfer.SplitRules, detach: bool) -> Any:
    microbatches = state.cfg.microbatches
    several, last = state.stages > 1, state.stage == state.stages - 1
    try:
        arguments = transfer.share_arguments(model.stage, bound, several)
        split = [transfer.microbatch_arguments(arguments, rules, microbatches, mb) for mb in range(microbatches)]

        def call(microbatch: int) -> Any:
            token = current_microbatch.set(microbatch)
            try:
                own = inspect.BoundArguments(bound.signature, split[microbatch])
                result = function(*own.args, **own.kwargs)
                # Taken apart here, while the microbatch's logits are still to be had.
                return flatten(result) if last else result
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(f"in microbatch {microbatch} on rank {state.rank}, stage {state.stage}")
                raise
            finally:
                current_microbatch.reset(token)

        model.begin(microbatches, transfer.rows(arguments, rules))
        if several:
            results = run_microbatches(model.stage, microbatches, call)
        else:
            results = []
            for microbatch in range(microbatches):
                results.append(call(microbatch))
                model.stage.finish_microbatch(microbatch)
        model.finish(in_step=True)
        leaves, spec = _collect(results, detach, several) if last else ([], None)
        if several:
            leaves, spec = transfer.share_results(model.stage, leaves, spec, results)
    except BaseException as error:
        if isinstance(error, Exception) and is_communication_error(error):
            raise state.peer_error(str(error).strip().splitlines()[0]) from error
        state.fail(error)
        raise
    model.run_post_step_hooks()
    if spec == LEAF and all(value is None for value in leaves[0]) and not state.said_none:
        state.said_none = True
        logger.warning("[%d] smp.step: %s returns None: return the loss from it to have it on every rank (said once)", state.rank,
                       function.__name__)
    return unflatten(spec, [_merged(values) for values in leaves])


def _collect(flat: list[Any], detach: bool, several: bool) -> tuple[list[list[Any]], Any]:
    """What the microbatches returned, leaf by leaf: (values by microbatch of each leaf, specification)."""
    spec = flat[0][1]
    for microbatch, (_, other) in enumerate(flat):
        if other != spec:
            raise Error("invalid_argument", f"smp.step: microbatch {microbatch} returned another structure than microbatch 0")
    leaves = [list(values) for values in zip(*(values for values, _ in flat))]
    if detach or several:
        leaves = [[v.detach() if isinstance(v, torch.Tensor) else v for v in values] for values in leaves]
    return leaves, spec


def _merged(values: list[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return StepOutput(values)
    return None if all(value is None for value in values) else values
