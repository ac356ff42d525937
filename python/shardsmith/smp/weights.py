"""Reads weights and optimizer state into a partition that has just been made."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.errors import Error
from shardsmith.smp import weightless
from shardsmith.smp.precision import MASTER
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Piece, Staging, cut, initialize, pieces

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel


STATE = "optimizer/state/"  # names of state tensors in a checkpoint


class Pending:
    """A checkpoint that has been asked for. `index` has logical names under `prefix`."""

    def __init__(self, where: str, index: Any, prefix: str = "", first: list[int] | None = None,
                 load_optimizer: bool = False, strict: bool = True):
        self.where = where
        self.index = index
        self.prefix = prefix
        self.first = first
        self.strict = strict
        self.model_done = False
        self.optimizer_done = not load_optimizer
        self.options_done = not load_optimizer


def load_model(model: DistributedModel, pending: Pending | None) -> bool:
    """This rank's slices. Returns whether replicas may differ, so that parameters have to be broadcast."""
    source = weightless.source_of(model.module)
    if source is not None and (written := source.written(model.module)):
        logger.warning("[%d] values written to %d parameters before the partition are replaced (%s, ...)", state.rank,
                       len(written), written[0])
    if pending is not None and not pending.model_done:
        read_parameters(model, pending)
        return False
    if source is None:
        return True
    if source.folder is not None:
        from shardsmith import _core

        index = _core.read_hf_logical(source.folder, model._model)
        read_parameters(model, Pending(source.folder, index))
        return False
    config = json.loads(model._config_text)
    shapes = {name: shape for name, shape, _, _ in model._whole.tensors}
    for name, param in model._local.items():
        if list(param.shape) == shapes[name]:
            initialize(name, param, model._seed, config)
            continue
        whole = torch.empty(shapes[name], dtype=param.dtype)  # a function of the whole's indices
        initialize(name, whole, model._seed, config)
        with torch.no_grad():
            cut(model._whole, model._model, name, whole, param)
    return False


def read_parameters(model: DistributedModel, pending: Pending) -> None:
    staging = Staging()
    index = pending.index
    names = set(index.names())

    def read(tensor: torch.Tensor, parts: list[Piece]) -> None:
        for piece in parts:
            # Where there are masters they are the weights; the model's own tensors are their rounding.
            master = f"{STATE}{piece.name}/{MASTER}"
            staging.add(master if master in names else pending.prefix + piece.name, piece.view(tensor), piece)

    for name, master in (model.masters or {}).items():
        read(master, model.optimized_pieces(name))
    if model.masters is None or model.shards is not None:  # else they are rounded afterwards
        for name, param in model._local.items():
            read(param, pieces(model._model, name))
    report = staging.read(index, where=pending.where)
    if report["cast"] and model.masters is None:
        logger.warning("[%d] %s: %d tensors are cast to the model's dtype (%s, ...)", state.rank, pending.where,
                       len(report["cast"]), report["cast"][0])
    if source := weightless.source_of(model.module):
        source.versions.clear()
    model.masters_changed()
    pending.model_done = True


def load_pending_optimizer() -> None:
    """Options once there is an optimizer, state once the partition is there too."""
    pending, optimizer, model = state.pending, state.optimizer, state.model
    if pending is not None and optimizer is not None and not pending.options_done:
        optimizer.read_options(pending)
    if pending is None or pending.optimizer_done or optimizer is None or model is None or not model._local:
        return
    state.together(lambda: optimizer.read_state(pending))
    pending.optimizer_done = True
