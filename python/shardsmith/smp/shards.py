"""`shard_optimizer_state`: of each parameter, the rows that this replica's optimizer updates.

A shard is a parameter of its own ("virtual"): rows [begin, end) of dimension 0, in the parameter's memory, or in its
own where it is a float32 master. The engine deals out the rows and brings updated ones to the other replicas.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardsmith.smp.slices import Piece

if TYPE_CHECKING:
    from shardsmith._engine import Stage


class Shard(NamedTuple):
    begin: int
    end: int
    bucket: int  # what is sent together

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.begin:self.end] if tensor.dim() else tensor


def of_stage(stage: Stage) -> dict[str, Shard]:
    """By the parameter's name; those of which this rank updates nothing are absent."""
    return {name: Shard(begin, end, bucket) for name, begin, end, bucket in stage.shards()}


def cut_pieces(pieces: list[Piece], shard: Shard) -> list[Piece]:
    """What the shard's rows are of a tensor's pieces, placed in the shard."""
    found = (_cut(piece, shard) for piece in pieces)
    return [piece for piece in found if piece is not None]


def _cut(piece: Piece, shard: Shard) -> Piece | None:
    if not piece.permutation:
        return piece
    dimension = piece.permutation.index(0)  # the logical tensor's that runs along the rows
    shape, offset, box = list(piece.shape), list(piece.offset), list(piece.box)
    if piece.run:  # rows in runs: shards are cut where a run of every piece begins
        begin, end = (row // piece.step * piece.run for row in (shard.begin, shard.end))
    else:
        begin = max(0, shard.begin - offset[0])
        end = min(shape[dimension], shard.end - offset[0])
        offset[0] = max(0, offset[0] - shard.begin)
    if begin >= end:
        return None
    shape[dimension] = end - begin
    box[dimension] += begin
    return piece._replace(shape=shape, offset=offset, box=box)
