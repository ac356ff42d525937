"""Whole tensors of what the ranks of a replica hold in parts. Each element is brought by exactly one rank."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardsmith.errors import Error
from shardsmith.smp.session import state
from shardsmith.smp.slices import Piece, cut, pieces

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel

Part = tuple[str, list[int], torch.Tensor]  # logical name, where it begins in that tensor, the elements


def parts_of(tensor: torch.Tensor, parts: list[Piece]) -> list[Part]:
    """What this rank brings: of what several tensor-parallel ranks hold, the first of them."""
    rank = state.group_rank("tp")
    return [(piece.name, list(piece.box), piece.read(tensor.detach())) for piece in parts if piece.is_stored_by(rank)]


def assemble(model: DistributedModel, hf_name: str, parts: list[Part], what: str) -> torch.Tensor:
    """The tensor under Hugging Face's name, in its shape."""
    if not parts:
        raise Error("corrupt", f"{what}: {hf_name} is on no rank")
    whole = torch.empty(model.whole_shapes[hf_name], dtype=parts[0][2].dtype)
    filled = 0
    for piece in pieces(model._whole, hf_name):
        view = piece.view(whole)
        for name, box, own in parts:
            if name != piece.name:
                continue
            begins, lengths = list(box), list(own.shape)
            if piece.run:  # the view is [runs, run, ...], and nobody's part tears a run
                begins[:1], lengths[:1] = [begins[0] // piece.run, 0], [lengths[0] // piece.run, piece.run]
            target = view
            for dimension, (begin, length) in enumerate(zip(begins, lengths)):
                target = target.narrow(dimension, begin, length)
            target.copy_(own.reshape(target.shape))
            filled += own.numel()
    if filled != whole.numel():
        raise Error("corrupt", f"{what}: of {hf_name}'s {whole.numel()} elements the ranks brought {filled}")
    return whole


def own_part(model: DistributedModel, hf_name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, in the shape that its parameter has."""
    own_shape = model.own_shapes[hf_name]
    if list(whole.shape) == own_shape:
        return whole
    own = torch.empty(own_shape, dtype=whole.dtype, device=whole.device)
    cut(model._whole, model._model, hf_name, whole, own)
    return own


def stored_elsewhere() -> set[str]:
    """Tied tensors are brought, and stored, once: by the first stage."""
    model = state.model
    if model is None or state.stages == 1 or state.stage == 0:
        return set()
    return {name for name, _, _, also_last in model._model.tensors if also_last}
