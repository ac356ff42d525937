"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import rng, weightless, weights
from shardsmith.smp.model import DistributedModel
from shardsmith.smp.optimizer import DistributedOptimizer
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Staging, make_leaf, pieces
from shardsmith.smp.values import Encoder, decode

HF_FOLDER = "hf"  # beside the checkpoints: what an export needs besides weights
_HF_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
)


def _plain_tag(path: Any, tag: Any) -> tuple[str, str]:
    path = os.fspath(path)
    tag = str(tag)
    if not path or not tag or "/" in tag:
        raise Error("invalid_argument", f"save_checkpoint: path {path!r} and tag {tag!r}: neither may be empty, and the tag "
                                        "holds no '/'")
    return path, tag


def save_checkpoint(path: Any, tag: Any, partial: bool = True, model: DistributedModel | None = None,
                    optimizer: DistributedOptimizer | None = None, user_content: Any = None,
                    translate_if_full: bool = True, num_kept_partial_checkpoints: int | None = None) -> None:
    """Called on every rank with the same path and tag. All files are there or none; a failing rank fails all."""
    from shardsmith import _core

    state.require()
    path, tag = _plain_tag(path, tag)
    if not partial:
        raise Error("unsupported", "save_checkpoint(partial=False) is not there in this version: save with partial=True, "
                                   "and `shardsmith export` makes one model of it")
    if model is not None and (not isinstance(model, DistributedModel) or not model.partitioned):
        raise Error("invalid_argument", "save_checkpoint: model must be the smp.DistributedModel, after its first step")
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        raise Error("invalid_argument", "save_checkpoint: optimizer must be the smp.DistributedOptimizer")
    if optimizer is not None and (state.model is None or not state.model.partitioned):
        raise Error("invalid_argument", "save_checkpoint: the optimizer can be saved after the first step")
    pp, tp, rdp = state.mesh.coordinates(state.rank)
    keep: list[torch.Tensor] = []
    files: list[tuple[str, Any]] = []

    def gather() -> tuple[str, str]:
        config = weightless.saved_config_text(model.module) if model is not None else ""
        hf = _write_hf_folder(path, model, config) if state.rank == 0 and model is not None else ""
        skip = _stored_elsewhere()
        if rdp == 0 and model is not None:
            files.append((f"model_{pp}_{tp}.pt", _model_tree(model, keep, skip)))
        is_sharded = state.model is not None and state.model.shards is not None
        if optimizer is not None and (rdp == 0 or is_sharded):
            place = f"{pp}_{tp}_{rdp}" if is_sharded else f"{pp}_{tp}"
            files.append((f"optimizer_{place}.pt", optimizer.saved_tree(keep, skip)))
            if (masters := optimizer.saved_masters(keep, skip)) is not None:
                files.append((f"fp16_states_{place}.pt", masters))
        values = {"rank": state.rank, "step_calls": state.step_calls, **rng.saved(keep)}
        files.append((f"rng_{state.rank}.pt", values))
        if state.rank == 0 and user_content is not None:
            files.append(("user_content.pt", Encoder(keep).encode(user_content)))
        return config, hf

    config, hf = state.together(gather)
    logger.info("[%d] saving partial checkpoint %s in %s", state.rank, tag, path)
    manifest = {
        "step": state.optimizer_steps, "world_size": state.size, "pp": state.mesh.pp_size, "tp": state.mesh.tp_size,
        "rdp": state.mesh.rdp_size, "placement": state.cfg.placement_strategy,
        "first": list(state.model._first) if state.model is not None and state.model._first else [],
        "model_config": config, "hf": hf,
    }
    exchange = None if state.size == 1 else state.exchange
    result = _core.save_partial(path, tag, manifest, files, state.rank, state.size, exchange,
                                num_kept_partial_checkpoints, state.cfg.peer_timeout)
    del keep
    logger.info("[%d] saved %s", state.rank, result["folder"])


def _stored_elsewhere() -> set[str]:
    """Tied tensors are stored once, by the first stage."""
    model = state.model
    if model is None or state.stages == 1 or state.stage == 0:
        return set()
    return {name for name, _, _, also_last in model._model.tensors if also_last}


def _model_tree(model: DistributedModel, keep: list[torch.Tensor], skip: set[str]) -> dict[str, Any]:
    tree = {}
    for hf_name, param in model._local.items():
        if hf_name in skip:
            continue
        for piece in pieces(model._model, hf_name):
            if piece.is_stored_by(state.group_rank("tp")):
                tree[piece.name] = make_leaf(piece.read(param), keep, f"model/{piece.name}", piece)
    return tree


def _write_hf_folder(path: str, model: DistributedModel, config: str) -> str:
    """Once, atomically. Returns its name."""
    target = os.path.join(path, HF_FOLDER)
    if os.path.isdir(target):
        return HF_FOLDER
    temporary = os.path.join(path, f".{HF_FOLDER}.tmp-{os.getpid()}")
    try:
        os.makedirs(temporary, exist_ok=True)
        source = weightless.source_of(model.module)
        if source is not None and source.folder is not None:
            for name in _HF_FILES:
                original = os.path.join(source.folder, name)
                if os.path.isfile(original):
                    shutil.copyfile(original, os.path.join(temporary, name))
        pathlib.Path(temporary, "config.json").write_text(config, encoding="utf-8")
        for name in [*(os.path.join(temporary, name) for name in os.listdir(temporary)), temporary]:
            _sync(name)
        os.rename(temporary, target)
        _sync(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise Error("io", f"{error.filename or target}: {error.strerror}") from None
    return HF_FOLDER


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Resuming.
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

    def find() -> dict[str, Any]:
        return _find(path, tag, partial)

    # Rank 0 looks; a shared file system may show the others old names.
    found = state.together(lambda: find() if state.rank == 0 else None)
    found = json.loads(state.exchange(json.dumps(found).encode())[0])
    if found["kind"] == "partial":
        return _resume_partial(found, load_optimizer)
    return _resume_full(found, translate_function)


def _find(path: str, tag: str | None, partial: bool) -> dict[str, Any]:
    """{"kind": "partial" | "hf" | "pt", "folder", "manifest", "tag"}."""
    from shardsmith import _core

    if not os.path.exists(path):
        raise Error("not_found", f"{path}: there is no such folder to resume from")
    if tag is None and os.path.isfile(os.path.join(path, "manifest.json")):
        folder = path.rstrip("/")
        found = _find_partial(os.path.dirname(os.path.abspath(folder)), os.path.basename(os.path.abspath(folder)))
        if found is not None:
            return found
    if partial:
        found = _find_partial(path, tag)
        if found is not None:
            return found
        if tag is not None:
            raise Error("corrupt", f"{path}: there is no complete checkpoint {tag}")
    candidates = [path] if tag is None else [os.path.join(path, tag)]
    if tag is not None and not os.path.exists(candidates[0]):
        candidates.append(path)  # the Trainer asks for pytorch_model.bin in a folder that holds safetensors
    for candidate in candidates:
        if os.path.isfile(candidate):
            kind = _core.detect_format(candidate)
            if kind == "pt":
                return {"kind": "pt", "folder": candidate, "tag": tag, "path": path}
            raise Error("unsupported", f"{candidate}: resuming from a file of format {kind} is not there in this version")
        if any(os.path.isfile(os.path.join(candidate, name)) for name in (
                "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")):
            return {"kind": "hf", "folder": candidate, "tag": tag, "path": path}
    if tag is not None:
        raise Error("not_found", f"{os.path.join(path, tag)}: there is no such checkpoint")
    raise Error("corrupt", f"{path}: there is no complete checkpoint to resume from")


def _find_partial(path: str, tag: str | None) -> dict[str, Any] | None:
    from shardsmith import _core

    tag = (tag or "").removesuffix("_partial")
    found, passed_over = _core.find_checkpoint(path, tag)
    for line in passed_over:
        logger.warning("passed over: %s", line)
    if found is None:
        return None
    return {"kind": "partial", "folder": found["folder"], "manifest": found["manifest"]}


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
