"""`smp.set_activation_checkpointing`: which layers, or branches of layers, keep their input only and are computed again
when their backward is due.

As for the partition, a wish is kept at its module. What is computed again is a whole layer, several, or a layer's
attention or feed-forward; what a single norm or linear layer keeps is its input anyway, so that for those (and for an
embedding or a head) there is nothing to do.
"""
from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from torch import nn

from shardsmith.errors import Error
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import pieces

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel

_MARK = "_smp_activation_checkpointing"  # in a module's __dict__: (number of the call, strategy)
_calls = itertools.count()

# By layer: (segment or -1, attention, output), as the engine takes it.
Plan = list[tuple[int, bool, bool]]


def set_activation_checkpointing(module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False,
                                 strategy: str = "each") -> None:
    """Of `module`, before the first step. `strategy` says how a sequence of layers is taken: "each", "contiguous" (all
    neighbours on a stage as one) or "group_N". Dropout's masks are the same again whatever `preserve_rng_state` says."""
    from shardsmith.smp.model import DistributedModel

    state.require()
    if not isinstance(module, nn.Module):
        raise Error("invalid_argument",
                    f"smp.set_activation_checkpointing takes a torch.nn.Module, not {type(module).__name__}")
    group_size(strategy)
    if pack_args_as_tuple:
        logger.warning("smp.set_activation_checkpointing: pack_args_as_tuple changes nothing and is deprecated")
    if isinstance(module, DistributedModel):
        module = module.module
    if state.step_calls:
        raise Error("invalid_argument", "smp.set_activation_checkpointing after the first step: it is to come before")
    if strategy != "each" and not isinstance(module, (nn.Sequential, nn.ModuleList)):
        raise Error("invalid_argument", f"smp.set_activation_checkpointing: strategy '{strategy}' is for a sequence of "
                                        f"modules (torch.nn.Sequential or ModuleList), not for {type(module).__name__}")
    module.__dict__[_MARK] = (next(_calls), strategy)


def group_size(strategy: str) -> int | None:
    """Layers of one segment; None: as many as there are."""
    match = re.fullmatch(r"group_(\d+)", strategy) if isinstance(strategy, str) else None
    if match and int(match[1]) > 0:
        return int(match[1])
    if strategy not in ("each", "contiguous"):
        raise Error("invalid_argument", f"activation checkpointing strategy {strategy!r}: it is 'each', 'contiguous' or "
                                        "'group_N' with a number N above 0")
    return 1 if strategy == "each" else None


def decide(model: DistributedModel, first: list[int]) -> Plan:
    """For the partition `first`."""
    places = {name: place for name, _, place, _ in model._model.tensors}
    count = model._model.description["num_layers"]
    whole: list[set[str]] = [set() for _ in range(count)]
    for name, place in places.items():
        if 0 <= place < count:
            whole[place].add(name)
    names = {id(p): name for name, p in model._named().items()}
    plan: Plan = [(-1, False, False)] * count
    numbers = itertools.count()
    for path, module, strategy in _marked(model.module):
        inside = {names[id(p)] for p in module.parameters()}
        layers = [layer for layer in range(count) if whole[layer] and whole[layer] <= inside]
        if not layers:
            _mark_branches(model, inside, places, plan)
        elif isinstance(module, (nn.Sequential, nn.ModuleList)):
            size = group_size(strategy)
            for position, layer in enumerate(layers):
                if size is None and position == 0 or size is not None and position % size == 0:
                    number = next(numbers)
                plan[layer] = (number, False, False)
        elif len(layers) == 1 or _is_on_one_stage(path, layers, first):
            number = next(numbers)
            for layer in layers:
                plan[layer] = (number, False, False)
    if any(segment >= 0 or attention or output for segment, attention, output in plan):
        logger.info("[%d] activation checkpointing: %s", state.rank, _summary(plan))
    return plan


def _marked(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """In the order of the calls: of two wishes for one layer the last one counts. transformers'
    gradient_checkpointing_enable() marks each layer."""
    marked = []
    for path, inside in module.named_modules(remove_duplicate=False):
        number, strategy = inside.__dict__.get(_MARK, (-1, "each"))
        if number >= 0 or (_is_layer(inside) and inside.gradient_checkpointing is True):
            marked.append((number, path, inside, strategy))
    return [(path, inside, strategy) for _, path, inside, strategy in sorted(marked, key=lambda entry: entry[0])]


def _is_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _mark_branches(model: DistributedModel, inside: set[str], places: dict[str, int], plan: Plan) -> None:
    """A part of one layer: its attention or its feed-forward where it holds that branch's weights."""
    layers = {places[name] for name in inside}
    if len(layers) != 1 or not 0 <= (layer := next(iter(layers))) < len(plan):
        return
    found = []
    for branch in ("attention", "output"):
        weights = {name for name, place in places.items() if place == layer
                   for piece in pieces(model._model, name) if f".{branch}." in piece.name and len(piece.whole) == 2}
        found.append(bool(weights) and weights <= inside)
    segment, attention, output = plan[layer]
    if any(found):
        plan[layer] = (-1, attention or found[0], output or found[1])


def _is_on_one_stage(path: str, layers: list[int], first: list[int]) -> bool:
    stages = {stage for stage in range(len(first) - 1) for layer in layers if first[stage] <= layer < first[stage + 1]}
    if len(stages) == 1:
        return True
    text = f"smp.set_activation_checkpointing: module '{path}' is spread over the stages {min(stages)} to {max(stages)}"
    if not state.cfg.auto_partition:
        raise Error("invalid_argument", f"{text}: checkpoint its layers instead")
    logger.warning("%s, so it is not checkpointed: checkpoint its layers instead", text)
    return False


def _summary(plan: Plan) -> str:
    segments: dict[int, list[int]] = {}
    for layer, (segment, _, _) in enumerate(plan):
        if segment >= 0:
            segments.setdefault(segment, []).append(layer)
    parts = [f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
             for layers in segments.values()]
    for word, branch in (("attention", 1), ("feed-forward", 2)):
        if layers := [str(layer) for layer, entry in enumerate(plan) if entry[branch]]:
            parts.append(f"{word} of layers {', '.join(layers)}")
    return "; ".join(parts)
