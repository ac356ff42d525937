"""Training in every layout against transformers, on the real weights of SmolLM2-135M, of a GPT-2 and of a bare BERT.

The measure: against a float64 run of transformers, our float32 numbers are no farther away than twice what transformers'
own float32 runs (eager and sdpa attention) are; bf16 and fp16 are no farther than 1.5 times a plain loop. See
parity/compare.py.
"""
from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from parity import cases, compare, models
from parity.layouts import Layout, degrees, plain, varied
from parity.outcome import Outcome, Prepared, run_ranks
from smp_helpers import run

POWERS = (1, 2, 4, 8)
MICROFORMER = degrees(POWERS, tp=(1, 2, 4, 8))  # 8 layers, 8 heads
MINILM = degrees(POWERS, tp=(1, 2, 4), pp=(1, 2, 4), rdp=(1, 2))  # 6 layers, 12 heads
SMOLLM2 = degrees(POWERS, tp=(1,))  # 30 layers, 9 heads, 3 of keys and values
THIRDS = [each for each in degrees((3, 6, 9), tp=(1, 3, 9))]

# Name: the case and its layouts.
SAMPLE = {
    "microformer": (lambda: cases.microformer(steps=4),
                    [Layout(2, 2, 1, "each", prescaled=False), Layout(1, 2, 2, "group_2", True, "speed", placement="TPD")]),
    "minilm": (lambda: cases.minilm(steps=2), [Layout(2, 2, 1)]),
    "smollm2": (lambda: cases.smollm2(steps=1, rows=2), [Layout(1, 3, 1)]),
}
WHOLE = {
    "microformer": (lambda: cases.microformer(steps=6), plain(MICROFORMER) + varied(MICROFORMER, 8)),
    "microformer-20": (lambda: cases.microformer(steps=20),
                       [Layout(), Layout(4), Layout(2, 2), Layout(1, 2, 2, shard=True), Layout(2, 1, 2, "each", True)]),
    "minilm": (lambda: cases.minilm(steps=4), plain(MINILM) + varied(MINILM, 8)),
    "smollm2": (lambda: cases.smollm2(steps=2), plain(SMOLLM2[:3]) + varied(SMOLLM2, 8)),
    "smollm2-thirds": (lambda: cases.smollm2(steps=2, rows=18, length=8), plain([(1, 3, 1)]) + varied(THIRDS, 18)),
}
NARROW = [Layout(2, precision="bf16"), Layout(2, precision="fp16"), Layout(1, 2, precision="bf16"),
          Layout(1, 2, precision="fp16"), Layout(1, 1, 2, precision="bf16"), Layout(1, 1, 2, precision="fp16"),
          Layout(1, 2, 2, shard=True, precision="bf16")]


@pytest.fixture(scope="session")
def prepare(tmp_path_factory):
    """Computed once in a session."""
    done: dict[str, Prepared] = {}

    def prepare(name: str, make: Any, *words: object) -> Prepared:
        if name not in done:
            done[name] = Prepared(make(), tmp_path_factory.mktemp(name), *words)
        return done[name]

    yield prepare
    for prepared in done.values():
        shutil.rmtree(prepared.folder)


def check(prepare: Any, kind: str, table: dict[str, Any], name: str, layout: Layout, folder: Any) -> None:
    make, which = table[name]
    slices = sorted({each.slices(make().rows) for each in which})
    prepare(f"{kind}-{name}", make, *slices).check(layout, folder)


def layouts(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, layout, id=f"{name}-{layout}") for name, (_, which) in table.items() for layout in which]


@pytest.mark.parametrize("name, layout", layouts(SAMPLE))
def test_losses_gradients_and_weights_are_as_near_as_transformers_are(prepare, tmp_path, name, layout):
    check(prepare, "sample", SAMPLE, name, layout, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name, layout", layouts(WHOLE))
def test_every_layout_is_as_near_as_transformers_are(prepare, tmp_path, name, layout):
    check(prepare, "whole", WHOLE, name, layout, tmp_path)
