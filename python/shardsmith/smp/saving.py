"""`smp.save_checkpoint`."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import rng, weightless, whole
from shardsmith.smp.model import DistributedModel
from shardsmith.smp.optimizer import DistributedOptimizer
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import make_leaf, pieces
from shardsmith.smp.values import Encoder

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
    _agree(path, tag)
    pp, tp, rdp = state.mesh.coordinates(state.rank)
    keep: list[torch.Tensor] = []
    files: list[tuple[str, Any]] = []

    def gather() -> tuple[str, str]:
        config = weightless.saved_config_text(model.module) if model is not None else ""
        hf = _write_hf_folder(path, model, config) if state.rank == 0 and model is not None else ""
        skip = whole.stored_elsewhere()
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


def _agree(path: str, tag: str) -> None:
    """Before anything is written."""
    answers = [json.loads(answer) for answer in state.exchange(json.dumps([path, tag]).encode())]
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise Error("invalid_argument", f"save_checkpoint: rank {rank} saves {answer[1]} in {answer[0]}, rank 0 "
                                            f"{answers[0][1]} in {answers[0][0]}: path and tag must be the same on every rank", rank)


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
