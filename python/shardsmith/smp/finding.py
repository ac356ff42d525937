"""What `smp.resume_from_checkpoint` is to read: the rank that looks decides for all.

A folder of checkpoints may hold partial ones (folders) and full ones (files); `newest` names one of either. What is asked
for by name is taken whatever its kind; without a name the newest of the kind that is asked for.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardsmith.errors import Error

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SUFFIX = "_partial"


def find(path: str, tag: str | None, partial: bool) -> dict[str, Any]:
    """{"kind": "partial" or "other", "at": folder or file, "manifest" of a partial one, "folder" and "tag" for companions,
    "passed_over": lines}."""
    if not path:
        raise Error("invalid_argument", "resume_from_checkpoint: the path is empty")
    if tag is not None and (not tag or os.sep in tag):
        raise Error("invalid_argument", f"resume_from_checkpoint: the tag is {tag!r}: it may not be empty and holds no '/'")
    if os.path.islink(path):
        path = os.path.realpath(path)
    if not os.path.exists(path):
        raise Error("not_found", f"{path}: there is no such folder to resume from")
    path = os.path.abspath(path) if path.endswith(os.sep) else path
    if not os.path.isdir(path):
        if tag is not None:
            raise Error("invalid_argument", f"{path} is a file: resume without a tag, or from the folder that holds it")
        return _other(path)
    if tag is not None:
        return _tagged(path, tag, partial)
    if os.path.isfile(os.path.join(path, "manifest.json")):
        return _complete(os.path.abspath(path))
    return _newest_partial(path) if partial else _newest_full(path)


def _other(at: str, passed_over: list[str] | None = None) -> dict[str, Any]:
    folder, name = os.path.split(at)
    return {"kind": "other", "at": at, "folder": folder, "tag": name, "passed_over": passed_over or []}


def _partial(found: dict[str, Any], passed_over: list[str]) -> dict[str, Any]:
    return {"kind": "partial", "at": found["folder"], "manifest": found["manifest"], "passed_over": passed_over}


def _complete(folder: str) -> dict[str, Any]:
    """The partial checkpoint in a folder that is one."""
    from shardsmith import _core

    path, name = os.path.split(folder)
    found, passed_over = _core.find_checkpoint(path, name)
    if found is None:
        raise Error("corrupt", passed_over[0] if passed_over else f"{folder}: there is no complete checkpoint")
    return _partial(found, passed_over)


def _tagged(path: str, tag: str, partial: bool) -> dict[str, Any]:
    from shardsmith import _core

    at = os.path.join(path, tag)
    is_partial = os.path.isdir(at) and os.path.isfile(os.path.join(at, "manifest.json"))
    if not partial and not is_partial:
        if (full := _full_named(path, tag)) is not None:
            return full
        if os.path.exists(at):
            return _other(at)
    if not partial and not os.path.exists(at):
        for entry in _core.scan_full(path):  # a save that replaced it has died: its files are in `.old`
            if entry["name"] == tag and entry["complete"]:
                return _other(entry["folder"])
    if not partial and not is_partial and not tag.endswith(_SUFFIX):
        if weights := _weights_in(path):
            return _other(weights)  # the Trainer asks for pytorch_model.bin in a folder that it wrote as safetensors
    found, passed_over = _core.find_checkpoint(path, tag.removesuffix(_SUFFIX))
    if found is not None:
        return _partial(found, passed_over)
    if passed_over:
        raise Error("corrupt", f"{path}: there is no complete checkpoint {tag}: {passed_over[0]}")
    if (full := _full_named(path, tag)) is not None:
        return full
    if os.path.exists(at):
        return _other(at)
    names = sorted(entry["name"] for entry in [*_core.scan(path), *_core.scan_full(path)])
    there = f"; there are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
    raise Error("not_found", f"{at}: there is no such checkpoint{there}")


def _full_named(path: str, tag: str) -> dict[str, Any] | None:
    """A full checkpoint of ours; where a save died while it replaced one, the one that was there before."""
    from shardsmith import _core

    entry = next((entry for entry in _core.scan_full(path) if entry["name"] == tag), None)
    if entry is None:
        return None
    if not entry["complete"]:
        raise Error("corrupt", f"{os.path.join(path, tag)}: not complete: {entry['why_not']}")
    return _other(entry["folder"])


def _weights_in(path: str) -> str | None:
    """What to open of a folder with weights as transformers names them: itself, or its one file of weights."""
    names = [name for name in _WEIGHTS if os.path.isfile(os.path.join(path, name))]
    if not names:
        return None
    if os.path.isfile(os.path.join(path, "config.json")) or names[0].endswith(".json"):
        return path
    return os.path.join(path, names[0])


def _itself_or_error(path: str, what: str, passed_over: list[str],
                     others: Callable[[], list[str]]) -> dict[str, Any]:
    """A folder that is one model or checkpoint, not a folder of them. `others`: what is there of the other kind."""
    from shardsmith import _core

    if not passed_over:
        weights = _weights_in(path)
        if weights is not None or _core.detect_format(path):
            return _other(weights or path)
    why = f" (passed over: {passed_over[0]})" if passed_over else ""
    if there := others():
        why = f"; there is {there[0]}"
    raise Error("corrupt", f"{path}: there is no {what} to resume from{why}")


def _newest_name(path: str) -> str:
    try:
        with open(os.path.join(path, "newest"), encoding="utf-8") as file:
            name = file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if os.sep in name else name


def _newest_partial(path: str) -> dict[str, Any]:
    from shardsmith import _core

    found, passed_over = _core.find_checkpoint(path)
    newest = _newest_name(path)
    if newest and os.path.isfile(os.path.join(path, newest)):
        passed_over = [f"{newest}: a full checkpoint, and a partial one is asked for" if line.startswith("newest names")
                       else line for line in passed_over]
    if found is not None:
        return _partial(found, passed_over)
    return _itself_or_error(path, "complete checkpoint", passed_over, lambda: [
        f"the full one {entry['name']}, for partial=False" for entry in _core.scan_full(path) if entry["complete"]])


def _newest_full(path: str) -> dict[str, Any]:
    from shardsmith import _core

    newest = _newest_name(path)
    if newest and os.path.isfile(os.path.join(path, newest)) and newest not in (
            entry["name"] for entry in _core.scan_full(path)):
        return _other(os.path.join(path, newest))  # another tool's file, that someone has pointed at
    found, passed_over = _core.find_checkpoint(path, full=True)
    if found is not None:
        return _other(found["folder"], passed_over)
    return _itself_or_error(path, "complete full checkpoint", passed_over, lambda: [
        f"the partial one {entry['name']}, for partial=True" for entry in _core.scan(path) if entry["complete"]])
