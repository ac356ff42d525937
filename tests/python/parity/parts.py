"""A rank holds parts of tensors: what they are called, and how they are put together again.

A part is rows and columns of a logical tensor (query, say) of a Hugging Face tensor; ranks that hold the same part agree
on its key.
"""
from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch

from shardsmith.smp.slices import Piece, pieces


class Key(NamedTuple):
    tensor: str  # as Hugging Face's files call it
    number: int  # of the logical tensor in it
    box: tuple[int, ...]  # where the part begins in that
    shape: tuple[int, ...]


class Part(NamedTuple):
    key: Key
    tensor: torch.Tensor  # contiguous
    stored: bool  # of the tensor-parallel ranks that hold it this is the first


def of_rank(model: Any, tensors: dict[str, torch.Tensor], optimized: bool = False) -> list[Part]:
    """Of tensors like the rank's parameters; `optimized`: like what its optimizer updates."""
    result = []
    for name, tensor in tensors.items():
        numbers = {piece.name: number for number, piece in enumerate(pieces(model._whole, name))}
        for piece in model.optimized_pieces(name) if optimized else pieces(model._model, name):
            key = Key(name, numbers[piece.name], tuple(piece.box), tuple(piece.shape))
            result.append(Part(key, piece.read(tensor.detach()).contiguous(), piece.is_stored_by(model_rank())))
    return result


def model_rank() -> int:
    import shardsmith.smp as smp

    return smp.tp_rank()


def digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().numpy())


class Wholes:
    """Of a model by its configuration: parts of whole tensors, and whole tensors of parts."""

    def __init__(self, config: str):
        from shardsmith import _core

        self._model = _core.Model(config)
        self._shapes = {name: list(shape) for name, shape, *_ in self._model.tensors}
        self._pieces: dict[str, list[Piece]] = {}

    def _view(self, key: Key, whole: torch.Tensor) -> torch.Tensor:
        pieces_ = self._pieces.setdefault(key.tensor, pieces(self._model, key.tensor))
        view = pieces_[key.number].view(whole)
        assert list(view.shape) == pieces_[key.number].shape, "rows in runs are for other families than these"
        for dimension, (begin, length) in enumerate(zip(key.box, key.shape)):
            view = view.narrow(dimension, begin, length)
        return view

    def part(self, key: Key, whole: torch.Tensor) -> torch.Tensor:
        return self._view(key, whole).contiguous()

    def together(self, parts: dict[Key, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What no part covers is no number, which nothing is near to."""
        result: dict[str, torch.Tensor] = {}
        for key, tensor in parts.items():
            shape = self._shapes[key.tensor]
            if list(key.shape) == shape and self._view(key, tensor).is_contiguous():
                result[key.tensor] = tensor
                continue
            whole = result.setdefault(key.tensor, torch.full(shape, float("nan"), dtype=tensor.dtype))
            self._view(key, whole).copy_(tensor)
        return result
