"""A replica's state by logical names: digests of whole tensors, put together from what the ranks hold."""
from __future__ import annotations

import os
import zlib
from typing import Any

import torch

import shardsmith.smp as smp
from shardsmith.smp.slices import pieces

Entry = tuple[str, list[int], list[int], torch.Tensor]  # name, the whole's shape, where the part begins, the part


def _entries(model: Any, optimizer: Any) -> list[Entry]:
    """What this rank has: weights, and of what its optimizer updates masters, moments and step counters."""
    entries: list[Entry] = []
    for name, parameter in model._local.items():
        for piece in pieces(model._model, name):
            entries.append((f"weight/{piece.name}", piece.whole, piece.box, piece.read(parameter.detach()).contiguous()))
    for name, parameter in model.optimized.items():
        values = dict(optimizer.state.get(parameter, {}))
        if model.masters is not None:
            values["master"] = parameter.detach()
        for key, value in values.items():
            for piece in model.optimized_pieces(name):
                if value.shape != parameter.shape or not value.dim():
                    entries.append((f"{key}/{piece.name}", list(value.shape), [0] * value.dim(), value.detach().clone()))
                else:
                    entries.append((f"{key}/{piece.name}", piece.whole, piece.box, piece.read(value).contiguous()))
    return entries


def digests(model: Any, optimizer: Any, file: str) -> dict[str, int]:
    """On rank 0 by name; nothing elsewhere. Every element is held by some rank, and where by several then alike. `file` is
    this rank's, for a while."""
    torch.save(_entries(model, optimizer), file)
    files = smp.allgather(file, smp.WORLD)
    gathered = [torch.load(name) for name in files] if smp.rank() == 0 else []
    smp.barrier()
    os.remove(file)
    if smp.rank() != 0:
        return {}
    wholes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, shape, box, part in (entry for of_rank in gathered for entry in of_rank):
        if name not in wholes:
            wholes[name] = torch.zeros(shape, dtype=part.dtype), torch.zeros(shape, dtype=torch.bool)
        whole, known = wholes[name]
        for dimension, begin in enumerate(box):
            whole, known = (t.narrow(dimension, begin, part.shape[dimension]) for t in (whole, known))
        assert torch.equal(whole[known], part[known]), f"{name}: ranks that hold the same of it differ"
        whole.copy_(part)
        known.fill_(True)
    for name, (whole, known) in wholes.items():
        assert bool(known.all()), f"{name}: no rank holds {int((~known).sum())} of its elements"
    return {name: zlib.crc32(whole.reshape(-1).view(torch.uint8).numpy()) for name, (whole, _) in sorted(wholes.items())}
