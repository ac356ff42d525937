"""Reads weights and optimizer state into a partition that has just been made."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.smp import weightless
from shardsmith.smp.precision import MASTER
from shardsmith.smp.report import LoadReport, compare, loses
from shardsmith.smp.session import logger, state
from shardsmith.smp.slices import Staging, StoredNames, cut, initialize

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel


Reading = tuple[Staging, Any, str]  # what to read, of which index, and where that stands
STATE = "optimizer/state/"  # names of state tensors in a checkpoint


class Pending:
    """A checkpoint that has been asked for. `index` has logical names under `prefix`."""

    def __init__(self, where: str, index: Any, prefix: str = "", first: list[int] | None = None,
                 load_optimizer: bool = False, strict: bool = True, report: LoadReport | None = None,
                 seed: int | None = None):
        self.where = where
        self.index = index
        self.prefix = prefix
        self.first = first
        self.strict = strict
        self.seed = seed  # of the run that saved it, where it says
        self.names = set(index.names())
        self.has_masters = any(name.endswith(f"/{MASTER}") and name.startswith(STATE) for name in self.names)
        # Where there are masters they are the weights; the model's own tensors are their rounding.
        masters = [f"{STATE}{{}}/{MASTER}"] if self.has_masters else []
        self.stored = StoredNames([*masters, f"{prefix}{{}}"], self.names)
        self.optimizer_files: list[Any] = index.value("optimizer") or []  # their values
        self.report = report or LoadReport(where, index.format)
        self.compared = False
        self.model_done = False
        self.optimizer_done = not load_optimizer
        self.options_done = not load_optimizer

    def compare(self, model: DistributedModel) -> None:
        """Once the model is there. Raises what strict loading refuses."""
        if self.compared:
            return
        compare(model, self)
        self.compared = True
        if state.rank == 0:
            logger.info("%s", self.report)
            if lossy := [line for line in self.report.cast if loses(line)]:
                logger.warning("%s: %d tensors are cast to a narrower type (%s%s)", self.where, len(lossy), lossy[0],
                               ", ..." if len(lossy) > 1 else "")


def load_model(model: DistributedModel, pending: Pending | None) -> bool:
    """This rank's slices. Called by all ranks. Returns whether replicas may differ, so that parameters have to be broadcast."""
    source = weightless.source_of(model.module)
    if source is not None and (written := source.written(model.module)):
        logger.warning("[%d] values written to %d parameters before the partition are replaced (%s, ...)", state.rank,
                       len(written), written[0])
    if pending is None or pending.model_done:
        _fill(model, list(model._local))
        return source is None
    if hasattr(pending.index, "read_into"):  # this rank's own part: model_state.LocalIndex
        _fill(model, list(model._local))
        state.together(lambda: pending.index.read_into(model))
        pending.model_done = True
        return False
    state.together(lambda: pending.compare(model))
    if absent := set(pending.report.missing):
        _fill(model, [name for name in model._local if name in absent])
    read_parameters(model, pending)
    return source is None and bool(absent)


def _fill(model: DistributedModel, names: list[str]) -> None:
    """From where the model's own weights come. Called by all ranks."""
    source = weightless.source_of(model.module)
    if source is None:
        return
    if source.folder is None:
        state.together(lambda: _initialize(model, names))
        return

    def prepare() -> Reading:
        from shardsmith import _core

        staging = Staging()
        staging.add_parameters(model._model, {name: model._local[name] for name in names}, StoredNames(["{}"]))
        return staging, _core.read_hf_logical(source.folder, model._model), source.folder

    read_together(prepare)
    source.versions.clear()


def _initialize(model: DistributedModel, names: list[str]) -> None:
    config = json.loads(model._config_text)
    shapes = model.whole_shapes
    for name in names:
        param = model._local[name]
        if list(param.shape) == shapes[name]:
            initialize(name, param, model.seed, config)
            continue
        whole = torch.empty(shapes[name], dtype=param.dtype)  # a function of the whole's indices
        initialize(name, whole, model.seed, config)
        with torch.no_grad():
            cut(model._whole, model._model, name, whole, param)


def read_together(prepare: Callable[[], Reading | None]) -> None:
    """Called by all ranks, each of which reads what its `prepare` returns: all return something, or none does. What ranks of
    one machine have in common is read from the disk once."""
    def plan() -> tuple[Staging, Any, bytes] | None:
        if (prepared := prepare()) is None:
            return None
        staging, index, where = prepared
        return staging, index, staging.prepare(index, where)

    if (planned := state.together(plan)) is None:
        return
    staging, index, announcement = planned
    announcements = state.exchange(announcement) if state.size > 1 else []
    state.together(lambda: staging.read_prepared(index, announcements, state.rank))


def read_parameters(model: DistributedModel, pending: Pending) -> None:
    """Called by all ranks."""
    read_together(lambda: (_wanted(model, pending), pending.index, pending.where))
    _are_read(model, pending)


def copy_parameters(model: DistributedModel, pending: Pending) -> None:
    """Of an index whose tensors are in this rank's memory."""
    _wanted(model, pending).read(pending.index)
    _are_read(model, pending)


def _wanted(model: DistributedModel, pending: Pending) -> Staging:
    """Once `pending` has been compared with the model."""
    staging = Staging()
    for name, master in (model.masters or {}).items():
        staging.add_pieces(master, pending.stored.of_pieces(model.optimized_pieces(name)))
    held = model.held()
    if model.masters is not None and model.shards is None:  # parameters are rounded afterwards
        held = {name: tensor for name, tensor in held.items() if name not in model._local}
    staging.add_parameters(model._model, held, pending.stored)
    return staging


def _are_read(model: DistributedModel, pending: Pending) -> None:
    if source := weightless.source_of(model.module):
        source.versions.clear()
    model.masters_changed()
    pending.model_done = True


def load_pending_optimizer() -> None:
    """Options once there is an optimizer, state once the partition is there too."""
    pending, optimizer, model = state.pending_optimizer, state.optimizer, state.model
    if pending is not None and optimizer is not None and not pending.options_done:
        state.together(lambda: optimizer.read_options(pending))
    if optimizer is None or model is None or not model._local:
        return
    if pending is not None and not pending.optimizer_done:
        read_together(lambda: optimizer.prepare_state(pending))
        pending.optimizer_done = True
    optimizer.load_kept()
