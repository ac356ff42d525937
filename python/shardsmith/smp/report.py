"""What became of a checkpoint: `smp.state.load_report`, and one line of it in the log."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardsmith.errors import Error
from shardsmith.smp.slices import pieces

if TYPE_CHECKING:
    from shardsmith.smp.model import DistributedModel
    from shardsmith.smp.weights import Pending

_ORDER = ("float64", "float32", "float16", "bfloat16")


@dataclass
class LoadReport:
    """The same on every rank. Names of parameters are those of the user's model, others stand as in the checkpoint."""

    source: str  # the folder or file
    format: str  # "partial", "full", "hf", "pt", "safetensors", "dcp", or "memory" after a translate_function
    step: int | None = None  # of the checkpoint, where it says
    restored: list[str] = field(default_factory=list)  # parameters
    missing: list[str] = field(default_factory=list)  # parameters that keep what they had; strict=False only
    unexpected: list[str] = field(default_factory=list)  # tensors that the model has not; strict=False only
    cast: list[str] = field(default_factory=list)  # "name: float32 -> bfloat16"
    padded: list[str] = field(default_factory=list)  # parameters with rows beyond the model's, which stay as they were
    renamed: list[tuple[str, str]] = field(default_factory=list)  # (in the checkpoint, in the model)
    tied: list[str] = field(default_factory=list)  # "name = other": stored once
    reseeded: bool = False  # random generators were seeded anew: another number of ranks
    optimizer: str = "not asked for"  # "restored", "not there", "not asked for", or why not
    passed_over: list[str] = field(default_factory=list)  # checkpoints that were not taken, and why

    def __str__(self) -> str:
        parts = [f"{len(self.restored)} tensors restored"]
        for word in ("missing", "unexpected", "cast", "padded", "tied"):
            parts += _some(word, getattr(self, word))
        parts += _some("renamed", [f"{before} -> {after}" for before, after in self.renamed])
        parts.append(f"optimizer {self.optimizer}")
        if self.reseeded:
            parts.append("random generators reseeded")
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.source} ({self.format}{step}): {', '.join(parts)}"


def _some(word: str, names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"{len(names)} {word} ({names[0]}{', ...' if len(names) > 1 else ''})"]


def compare(model: DistributedModel, pending: Pending) -> None:
    """Fills pending.report by the names alone, so that every rank says the same. Raises what strict loading refuses."""
    report, names = pending.report, pending.names
    expected: set[str] = set()
    dtypes = model.dtypes()
    for hf_name, parts in model._whole.piece_names.items():
        expected.update(pending.prefix + name for name in parts)
        stored = [pending.stored.of(name) for name in parts]
        if None in stored:
            report.missing.append(hf_name)
            continue
        report.restored.append(hf_name)
        if (dtype := pending.index.dtype(stored[0])) != dtypes[hf_name]:
            report.cast.append(f"{hf_name}: {dtype} -> {dtypes[hf_name]}")
    report.unexpected += sorted(name.removeprefix(pending.prefix) for name in names
                                if name.startswith(pending.prefix) and name not in expected)
    _note_padding(model, report)
    ties = [name for name, _, _, also_last in model._whole.tensors if also_last]
    report.tied = [f"{name} = {ties[0]}" for name in model._whole.tied_names if ties]
    count = len(report.restored) + len(report.missing)
    if not report.restored:
        found = next((name.removeprefix(pending.prefix) for name in names if name.startswith(pending.prefix)), None)
        found = report.unexpected[0] if report.unexpected else found
        raise Error("corrupt", f"{pending.where}: none of the model's {count} tensors is in it; the first of the model's is "
                               f"{report.missing[0]}, the first there {found or 'none at all'}")
    if pending.strict and report.missing:
        raise Error("corrupt", f"{pending.where}: {len(report.missing)} of the model's {count} tensors are missing, the first "
                               f"is {report.missing[0]}; strict=False keeps what the model has for them")
    if pending.strict and report.unexpected:
        raise Error("corrupt", f"{pending.where}: {len(report.unexpected)} tensors are not the model's, the first is "
                               f"{report.unexpected[0]}; strict=False leaves them out")


def loses(line: str) -> bool:
    """Whether a line of LoadReport.cast is about a narrower type."""
    before, after = line.rpartition(": ")[2].split(" -> ")
    if before not in _ORDER or after not in _ORDER:
        return True
    return _ORDER.index(after) > _ORDER.index(before) or (before, after) == ("bfloat16", "float16")


def _note_padding(model: DistributedModel, report: LoadReport) -> None:
    for hf_name, shape in model.own_shapes.items():
        if shape == model.whole_shapes[hf_name]:  # not cut, so not padded either
            continue
        held = sum(math.prod(piece.shape) for piece in pieces(model._model, hf_name))
        if math.prod(shape) > held:
            report.padded.append(hf_name)
