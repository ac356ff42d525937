"""What `smp.resume_from_checkpoint` is to read."""
from __future__ import annotations

import os
from typing import Any

from shardsmith.errors import Error
from shardsmith.smp.session import logger


def find(path: str, tag: str | None, partial: bool) -> dict[str, Any]:
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
