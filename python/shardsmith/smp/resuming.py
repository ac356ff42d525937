"""`smp.resume_from_checkpoint`."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import rng, weights
from shardsmith.smp.finding import find
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Staging
from shardsmith.smp.values import decode


def resume_from_checkpoint(path: Any, tag: Any = None, partial: bool = True, strict: bool = True,
                           load_optimizer: bool = True, load_sharded_optimizer_state: bool = True,
                           translate_function: Callable[..., Any] | None = None,
                           load_optimizer_states: bool | None = None) -> Any:
    """After both wrappers. Returns the user content at once; weights are read when the partition is made (now, if it is)."""
    state.require()
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states
    if not strict:
        raise Error("unsupported", "resume_from_checkpoint(strict=False) is not there in this version")
    path = os.fspath(path)
    tag = None if tag is None else str(tag)

    # Rank 0 looks; a shared file system may show the others old names.
    found = state.together(lambda: find(path, tag, partial) if state.rank == 0 else None)
    found = json.loads(state.exchange(json.dumps(found).encode())[0])
    if found["kind"] == "partial":
        return _resume_partial(found, load_optimizer)
    return _resume_full(found, translate_function)


def read_values(file: str) -> Any:
    """A file of plain values and tensors, tensors read."""
    from shardsmith import _core

    index = _core.read_pt(file)
    staging = Staging()

    def tensor(name: Any) -> torch.Tensor:
        result = torch.empty(index.shape(name.name), dtype=getattr(torch, index.dtype(name.name)))
        staging.add(name.name, result)
        return result

    # Numpy arrays share their tensors' memory, so reading afterwards fills them too.
    values = decode(index.values, tensor)
    if staging.wants:
        staging.read(index, where=file)
    return values


def _resume_partial(found: dict[str, Any], load_optimizer: bool) -> Any:
    from shardsmith import _core

    folder, manifest = found["folder"], found["manifest"]
    same_layout = all(manifest[key] == value for key, value in (
        ("world_size", state.size), ("pp", state.mesh.pp_size), ("tp", state.mesh.tp_size), ("rdp", state.mesh.rdp_size)))
    names = set(os.listdir(folder))

    def read() -> Any:
        index = _core.read_partial(folder)
        same_stages = manifest["pp"] == state.mesh.pp_size
        if state.model is not None and state.model._first and same_stages:
            same_stages = list(manifest["first"]) == list(state.model._first)
        state.pending = weights.Pending(folder, index, prefix="model/",
                                        first=list(manifest["first"]) if same_stages else None,
                                        load_optimizer=load_optimizer)
        state.optimizer_steps = int(manifest["step"])
        own = f"rng_{state.rank}.pt"
        if same_layout and own in names:
            values = read_values(os.path.join(folder, own))
            rng.restore(values)
            state.step_calls = int(values["step_calls"])
        else:
            if "rng_0.pt" in names:
                state.step_calls = int(read_values(os.path.join(folder, "rng_0.pt"))["step_calls"])
            rng.reseed((state.optimizer_steps << 20) + state.rank)
            if state.rank == 0:
                logger.warning("%s was saved with another number of ranks: random generators are seeded anew", folder)
        if state.model is not None and state.model.partitioned:
            weights.read_parameters(state.model, state.pending)
        return read_values(os.path.join(folder, "user_content.pt")) if "user_content.pt" in names else {}

    content = state.together(read)
    weights.load_pending_optimizer()
    logger.info("[%d] resuming from %s, step %d", state.rank, folder, state.optimizer_steps)
    return content


def _resume_full(found: dict[str, Any], translate_function: Callable[..., Any] | None) -> Any:
    from shardsmith import _core

    if translate_function is not None:
        raise Error("unsupported", "resume_from_checkpoint(translate_function=...) is not there in this version")

    def read() -> Any:
        if state.model is None:
            raise Error("invalid_argument", "resume_from_checkpoint comes after smp.DistributedModel")
        folder = found["folder"]
        read_logical = _core.read_hf_logical if found["kind"] == "hf" else _core.read_pt_logical
        state.pending = weights.Pending(folder, read_logical(folder, state.model._model))
        if state.model.partitioned:
            weights.read_parameters(state.model, state.pending)
        companion = os.path.join(found["path"], f"user_content_{found['tag']}")
        return read_values(companion) if found["tag"] and os.path.isfile(companion) else {}

    return state.together(read)
