"""`smp.resume_from_checkpoint`: what is found is opened as an index with our names, whatever wrote it, and read into this
rank's slices when there are any: now, or when the partition is made."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import collector, rng, weights
from shardsmith.smp.finding import find
from shardsmith.smp.report import LoadReport
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Staging
from shardsmith.smp.state_index import StateIndex
from shardsmith.smp.values_read import read_values, values_of


def resume_from_checkpoint(path: Any, tag: Any = None, partial: bool = True, strict: bool = True,
                           load_optimizer: bool = True, load_sharded_optimizer_state: bool = True,
                           translate_function: Callable[..., Any] | None = None,
                           load_optimizer_states: bool | None = None) -> Any:
    """After both wrappers, on every rank. Returns the user content at once ({} where none was saved); weights are read when
    the partition is made (now, if it is). What became of it all is in smp.state.load_report."""
    if load_optimizer_states is not None:  # its name in 1.10
        load_optimizer = load_optimizer_states
    with state.require().calling("resume_from_checkpoint"), collector.paused():
        return _resume(path, tag, bool(partial), bool(strict), bool(load_optimizer), translate_function)


def _resume(path: Any, tag: Any, partial: bool, strict: bool, load_optimizer: bool,
            translate_function: Callable[..., Any] | None) -> Any:
    if state.saving is not None:
        state.together(state.saving.wait)  # what is being written in the background may be what is asked for

    # Rank 0 looks; a shared file system may show the others old names.
    path, tag = state.together(lambda: (os.fspath(path), None if tag is None else str(tag)))
    found = state.together(lambda: find(path, tag, partial) if state.rank == 0 else None)
    found = _agree(found, {"path": path, "tag": tag, "partial": partial, "strict": strict, "load_optimizer": load_optimizer,
                           "translate_function": translate_function is not None, "a model": state.model is not None,
                           "an optimizer": state.optimizer is not None})
    if state.rank == 0:
        for line in found["passed_over"]:
            logger.warning("passed over: %s", line)
    if found["kind"] == "partial" and translate_function is not None:
        raise Error("invalid_argument", f"{found['at']}: translate_function is for full checkpoints, and this is a partial one")
    pending, content = state.together(lambda: _open_partial(found, strict, load_optimizer) if found["kind"] == "partial"
                                      else _open_other(found, strict, load_optimizer, translate_function))
    state.pending, state.pending_optimizer, state.load_report = pending, pending, pending.report

    try:
        if state.model is not None:
            state.together(lambda: pending.compare(state.model))
            if state.model.partitioned:
                weights.read_parameters(state.model, pending)
                if pending.seed is not None:
                    state.model.set_seed(pending.seed)
    except Error:
        state.pending = state.pending_optimizer = None
        raise
    weights.load_pending_optimizer()
    logger.info("[%d] resuming from %s, step %d", state.rank, pending.where, state.optimizer_steps)
    return content


def _agree(found: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 found. Every rank must have asked for the same."""
    answers = [json.loads(answer) for answer in state.exchange(json.dumps([found, asked]).encode())]
    for rank, (_, other) in enumerate(answers):
        for word, value in answers[0][1].items():
            if other[word] != value:
                raise Error("invalid_argument", f"resume_from_checkpoint: {word} is {other[word]!r} on rank {rank} and {value!r} on "
                                                "rank 0: it must be the same on every rank", rank)
    return answers[0][0]


def _make_pending(where: str, index: Any, found: dict[str, Any], strict: bool, load_optimizer: bool,
                  **more: Any) -> weights.Pending:
    report = LoadReport(where, index.format, passed_over=found["passed_over"])
    pending = weights.Pending(where, index, load_optimizer=load_optimizer, strict=strict, report=report, **more)
    if load_optimizer:
        has_state = any("param_groups" in file for file in pending.optimizer_files)
        report.optimizer = "restored" if has_state else "not there"
    return pending


def _open_partial(found: dict[str, Any], strict: bool, load_optimizer: bool) -> tuple[weights.Pending, Any]:
    from shardsmith import _core

    folder, manifest = found["at"], found["manifest"]
    mesh = state.mesh
    saved = _core.Mesh(manifest["world_size"], manifest["pp"], manifest["tp"], manifest["placement"])
    same_layout = all(getattr(saved, key) == getattr(mesh, key) for key in ("world_size", "pp_size", "tp_size", "placement"))
    index = _core.read_partial(folder)
    # The decision is the checkpoint's, unless another one is asked for by another degree.
    same_stages = manifest["pp"] == mesh.pp_size
    if state.model is not None and state.model._first and same_stages:
        same_stages = list(manifest["first"]) == list(state.model._first)
    elif state.model is not None and manifest["first"]:  # of a model with other layers, not strictly
        same_stages &= manifest["first"][-1] == state.model._model.description["num_layers"]
    pending = _make_pending(folder, index, found, strict, load_optimizer, prefix="model/",
                            first=list(manifest["first"]) if same_stages else None)
    pending.report.step = state.optimizer_steps = int(manifest["step"])
    names = set(os.listdir(folder))
    own = f"rng_{state.rank}.pt"
    counted = read_values(os.path.join(folder, "rng_0.pt")) if "rng_0.pt" in names else {}
    state.step_calls = int(counted.get("step_calls", state.step_calls))
    if (seed := counted.get("seed")) is not None:
        pending.seed = int(seed)
    if same_layout and own in names:
        rng.restore(counted if state.rank == 0 else read_values(os.path.join(folder, own)))
    else:
        rng.reseed((state.optimizer_steps << 20) + state.rank)
        pending.report.reseeded = True
        if state.rank == 0:
            logger.warning("%s was saved by another layout of ranks (%d; now %d): random generators are seeded anew", folder,
                           manifest["world_size"], state.size)
    return pending, read_values(os.path.join(folder, "user_content.pt")) if "user_content.pt" in names else {}


def _open_other(found: dict[str, Any], strict: bool, load_optimizer: bool,
                translate_function: Callable[..., Any] | None) -> tuple[weights.Pending, Any]:
    from shardsmith import _core

    model, optimizer, at = state.model, state.optimizer, found["at"]
    if model is None:
        raise Error("invalid_argument", "resume_from_checkpoint comes after smp.DistributedModel")
    if translate_function is not None:
        index = StateIndex(model, _translated(at, translate_function))
        pending, told = _make_pending(at, index, found, strict, False), index.told
    else:
        loads = load_optimizer and optimizer is not None
        parameters = [name for group in optimizer.given_names() for name in group] if loads else []
        index, told = _core.open_for_resume(at, model._model, parameters)
        pending = _make_pending(at, index, found, strict, load_optimizer, prefix="model/")
    report = pending.report
    report.format, report.unexpected, report.renamed = told["format"], list(told["unexpected"]), list(told["renamed"])
    left_out = told.get("left_out", []) if load_optimizer else []
    if left_out and state.rank == 0:
        logger.warning("%s: %s%s", at, left_out[0], f", and {len(left_out) - 1} more" if len(left_out) > 1 else "")
    if left_out and report.optimizer == "not there":
        report.optimizer = "left out"
    if (step := index.value("step")) is not None:
        report.step = state.optimizer_steps = int(step)
    saved = index.value("content")
    content = values_of(index, saved, at) if saved is not None else {}
    # Beside weights of another tool a script may have saved some.
    companion = os.path.join(found["folder"], f"user_content_{found['tag']}")
    if not content and told["format"] != "full" and os.path.isfile(companion):
        content = read_values(companion)
    return pending, content


def _translated(at: str, function: Callable[..., Any]) -> dict[str, Any]:
    """What the function makes of all weights. They are in memory as a whole for that long, on every rank."""
    from shardsmith import _core

    index = _core.open_as_is(at)
    names = {name: name for name in index.names()}
    below = {name: name.removeprefix("model/") for name in names if name.startswith("model/")}
    if index.format in ("pt", "dcp", "full"):
        names = {name: plain.replace("~1", "/").replace("~0", "~") for name, plain in (below or names).items()}
    staging, tensors = Staging(), {}
    for name, plain in names.items():
        tensors[plain] = torch.empty(index.shape(name), dtype=getattr(torch, index.dtype(name)))
        staging.add(name, tensors[plain])
    staging.read(index, where=at)
    try:
        result = function(tensors)
    except Exception as error:
        raise Error("invalid_argument", f"{at}: translate_function raised {type(error).__name__}: {error}") from error
    if not isinstance(result, dict):
        raise Error("invalid_argument", f"{at}: translate_function must return a state dict, not {type(result).__name__}")
    return result
