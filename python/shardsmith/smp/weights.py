"""Reads weights and optimizer state into a partition that has just been made."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardsmith.errors import Error
from shardsmith.smp import weightless
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Staging, initialize, pieces_of, resolve_hf

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel


class Pending:
    """A checkpoint that has been asked for. `index` has logical names under `prefix`, or Hugging Face names."""

    def __init__(self, where: str, index: Any, logical: bool, prefix: str = "", first: list[int] | None = None,
                 load_optimizer: bool = False, strict: bool = True):
        self.where = where
        self.index = index
        self.logical = logical
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
        read_parameters(model, Pending(source.folder, index, logical=True))
        return False
    config = json.loads(model._config_text)
    for name, param in model._local.items():
        initialize(name, param, model._seed, config)
    return False


def read_parameters(model: DistributedModel, pending: Pending) -> None:
    staging = Staging()
    index = pending.index
    if pending.logical:
        for name, param in model._local.items():
            for logical, shape, view in pieces_of(model._model, name, param):
                staging.add(pending.prefix + logical, view, shape)
    else:
        names = set(index.names())
        tied = list(model._model.tied_names)
        shapes = {name: (shape, also_last) for name, shape, _, also_last in model._model.tensors}
        for name, param in model._local.items():
            found = resolve_hf(names, name, tied if shapes[name][1] else [])
            if list(index.shape(found)) != list(param.shape):
                raise Error("corrupt", f"{pending.where}: tensor {found} has shape {list(index.shape(found))}, the model "
                                       f"expects {list(param.shape)}")
            staging.add(found, param.detach())
    report = staging.read(index, where=pending.where)
    if report["cast"]:
        logger.warning("[%d] %s: %d tensors are cast to the model's dtype (%s, ...)", state.rank, pending.where,
                       len(report["cast"]), report["cast"][0])
    if source := weightless.source_of(model.module):
        source.versions.clear()
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
