"""`smp.save_checkpoint`."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import collector, rng, weightless, whole
from shardsmith.smp.background import saving
from shardsmith.smp.durable import sync
from shardsmith.smp.model import DistributedModel
from shardsmith.smp.optimizer import DistributedOptimizer
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import parameter_leaves
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
                    translate_if_full: bool = True, num_kept_partial_checkpoints: int | None = None, *,
                    blocking: bool = True, if_busy: str = "wait", optimizer_if_full: bool = False) -> None:
    """Called on every rank with the same path and tag. All files are there or none; a failing rank fails all.

    `partial=False`: the whole model in one file, under Hugging Face names where the family is known and
    `translate_if_full`; with `optimizer_if_full` its optimizer beside it. `blocking=False` returns when all is copied, and
    a thread writes: `wait_for_checkpoint`. While one does, the next save waits for it or, with `if_busy="skip"`, is none."""
    with state.require().calling("save_checkpoint"), collector.paused():
        given = {"partial": bool(partial), "blocking": bool(blocking), "if_busy": if_busy,
                 "num_kept_partial_checkpoints": num_kept_partial_checkpoints, "translate_if_full": bool(translate_if_full),
                 "optimizer_if_full": bool(optimizer_if_full), "a model": model is not None,
                 "an optimizer": optimizer is not None}
        path, tag = _agree(path, tag, given, lambda: _check(model, optimizer, if_busy))
        saver = saving()
        if if_busy == "skip" and blocking and saver.is_busy_anywhere():
            logger.warning("[%d] checkpoint %s is skipped: another one is being written", state.rank, tag)
            return
        keep: list[torch.Tensor] = []
        if partial:
            request = _partial_request(path, tag, model, optimizer, user_content, num_kept_partial_checkpoints, keep)
        else:
            request = _full_request(path, tag, model, optimizer if optimizer_if_full else None, user_content,
                                    translate_if_full, num_kept_partial_checkpoints, keep)
            saver.prepare_transport()
        logger.info("[%d] saving %s checkpoint %s in %s", state.rank, "partial" if partial else "full", tag, path)
        if blocking:
            saver.save(request, is_full=not partial)
        elif not saver.begin(request, if_busy == "skip", keep):
            logger.warning("[%d] checkpoint %s is skipped: another one is being written", state.rank, tag)


def _check(model: DistributedModel | None, optimizer: DistributedOptimizer | None, if_busy: str) -> None:
    if model is not None and (not isinstance(model, DistributedModel) or not model.partitioned):
        raise Error("invalid_argument", "save_checkpoint: model must be the smp.DistributedModel, after its first step")
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        raise Error("invalid_argument", "save_checkpoint: optimizer must be the smp.DistributedOptimizer")
    if optimizer is not None and (state.model is None or not state.model.partitioned):
        raise Error("invalid_argument", "save_checkpoint: the optimizer can be saved after the first step")
    if if_busy not in ("wait", "skip"):
        raise Error("invalid_argument", f"save_checkpoint: if_busy is {if_busy!r}, it can be 'wait' or 'skip'")


def _agree(path: Any, tag: Any, given: dict[str, Any], check: Callable[[], None]) -> tuple[str, str]:
    """Before anything is written: all ranks may save, and save the same. The path and the tag as text."""
    def mine() -> tuple[str, str]:
        texts = _plain_tag(path, tag)
        check()
        return texts

    plain_path, plain_tag = state.together(mine)
    answers = [json.loads(answer) for answer in state.exchange(json.dumps([plain_path, plain_tag, given]).encode())]
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2]:
            raise Error("invalid_argument", f"save_checkpoint: rank {rank} saves {answer[1]} in {answer[0]}, rank 0 "
                                            f"{answers[0][1]} in {answers[0][0]}: path and tag must be the same on every rank", rank)
        for key, value in answers[0][2].items():
            if answer[2][key] != value:
                raise Error("invalid_argument", f"rank {rank} calls save_checkpoint with {key}={answer[2][key]!r}, but rank 0 with "
                                                f"{key}={value!r}; nothing was written", rank)
    return plain_path, plain_tag


def _manifest(config: str, hf: str) -> dict[str, Any]:
    return {
        "step": state.optimizer_steps, "world_size": state.size, "pp": state.mesh.pp_size, "tp": state.mesh.tp_size,
        "rdp": state.mesh.rdp_size, "placement": state.cfg.placement_strategy,
        "first": list(state.model._first) if state.model is not None and state.model._first else [],
        "model_config": config, "hf": hf,
    }


def _described(path: str, model: DistributedModel | None) -> tuple[str, str]:
    """The model's configuration, and the name of the folder with what an export needs besides."""
    if model is not None and model.is_plain:
        return model._config_text, ""
    config = weightless.saved_config_text(model.module) if model is not None else ""
    hf = _write_hf_folder(path, model, config) if state.rank == 0 and model is not None else ""
    return config, hf


def _partial_request(path: str, tag: str, model: DistributedModel | None, optimizer: DistributedOptimizer | None,
                     user_content: Any, num_kept: int | None, keep: list[torch.Tensor]) -> Any:
    from shardsmith import _core

    def gather() -> Any:
        pp, tp, rdp = state.mesh.coordinates(state.rank)
        files: list[tuple[str, Any]] = []
        config, hf = _described(path, model)
        skip = whole.stored_elsewhere()
        if model is not None:
            files.append((f"model_{pp}_{tp}.pt", _model_tree(model, keep, skip)))
        is_sharded = state.model is not None and state.model.shards is not None
        shared = {name for name, _ in files}  # replicas hold them alike: each writes a share
        if optimizer is not None:
            place = f"{pp}_{tp}_{rdp}" if is_sharded else f"{pp}_{tp}"
            files.append((f"optimizer_{place}.pt", optimizer.saved_tree(keep, skip)))
            if (masters := optimizer.saved_masters(keep, skip)) is not None:
                files.append((f"fp16_states_{place}.pt", masters))
            shared |= set() if is_sharded else {name for name, _ in files}
        values = {"rank": state.rank, "step_calls": state.step_calls, **rng.saved(keep)}
        if state.model is not None and state.model.partitioned:
            values["seed"] = state.model.seed
        files.append((f"rng_{state.rank}.pt", values))
        if state.rank == 0 and user_content is not None:
            files.append(("user_content.pt", Encoder(keep).encode(user_content)))
        return _core.PartialRequest(path, tag, _manifest(config, hf), files, num_kept, state.cfg.peer_timeout,
                                    shared if state.mesh.rdp_size > 1 else set())

    return state.together(gather)


def _full_request(path: str, tag: str, model: DistributedModel | None, optimizer: DistributedOptimizer | None,
                  user_content: Any, translate: bool, num_kept: int | None, keep: list[torch.Tensor]) -> Any:
    """Every rank gives all that it holds: replicas too, as each writes a share."""
    from shardsmith import _core

    def gather() -> Any:
        if model is None:
            raise Error("invalid_argument", "save_checkpoint(partial=False) needs model: a full checkpoint is the whole model")
        config, hf = _described(path, model)
        skip = whole.stored_elsewhere()
        weights = _model_tree(model, keep, skip)
        moments = None
        if optimizer is not None:
            moments = optimizer.saved_tree(keep, skip)
            if (masters := optimizer.saved_masters(keep, skip)) is not None:
                for name, entries in masters.pop("state").items():
                    moments["state"].setdefault(name, {}).update(entries)
                moments.update(masters)
        content = Encoder(keep).encode(user_content) if state.rank == 0 and user_content is not None else None
        return _core.FullRequest(path, tag, _manifest(config, hf), weights, moments, content, bool(translate), num_kept,
                                 state.cfg.peer_timeout)

    return state.together(gather)


def _model_tree(model: DistributedModel, keep: list[torch.Tensor], skip: set[str]) -> Any:
    held = {name: tensor for name, tensor in model.held().items() if name not in skip}
    return parameter_leaves(model._model, held, state.group_rank("tp"), keep, "model/{}")


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
            sync(name)
        os.rename(temporary, target)
        sync(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise Error("io", f"{error.filename or target}: {error.strerror}") from None
    return HF_FOLDER
