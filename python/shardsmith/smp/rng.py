"""A rank's random number generators as plain data."""
from __future__ import annotations

import random
import sys
from typing import Any

import torch

from shardsmith.smp.slices import make_leaf


def saved(keep: list[torch.Tensor]) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    values: dict[str, Any] = {
        "torch": make_leaf(torch.get_rng_state(), keep),
        "python": [version, list(numbers), gauss],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        values["numpy"] = [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available():
        values["cuda"] = make_leaf(torch.cuda.get_rng_state(), keep)
    return values


def restore(values: dict[str, Any]) -> None:
    torch.set_rng_state(values["torch"])
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in values:
        import numpy

        kind, keys, position, has_gauss, cached = values["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in values and torch.cuda.is_available():
        torch.cuda.set_rng_state(values["cuda"])


def reseed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
