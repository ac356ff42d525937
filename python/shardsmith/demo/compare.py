"""Two partial checkpoints, tensor by tensor and value by value, as torch reads them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def differences(one: Path, other: Path) -> tuple[list[str], int]:
    """(what differs, one line each; the number of tensors compared)."""
    files = sorted(path.name for path in one.glob("*.pt"))
    found = [f"{name}: in one folder only" for name in set(files) ^ {path.name for path in other.glob("*.pt")}]
    count = 0
    for name in files:
        if (other / name).exists():
            a, b = (torch.load(folder / name, weights_only=True, mmap=True) for folder in (one, other))
            count += _compare(a, b, name, found)
    return found, count


def _compare(a: Any, b: Any, where: str, found: list[str]) -> int:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not _same_bits(a, b):
            found.append(where)
        return 1
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return sum(_compare(a[key], b[key], f"{where}/{key}", found) for key in a if key not in _OF_THE_RUN)
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return sum(_compare(x, y, f"{where}/{i}", found) for i, (x, y) in enumerate(zip(a, b)))
    if type(a) is not type(b) or a != b:
        found.append(f"{where}: {a!r} and {b!r}")
    return 0


# The configuration in the user content tells the run's own folder and how it was started.
_OF_THE_RUN = {"output_dir", "resume_from_checkpoint"}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
