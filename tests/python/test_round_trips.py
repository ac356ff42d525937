"""A checkpoint goes on in any layout: every pair of pipeline, tensor and data parallel degrees, with sharded optimizer or not.

Under their logical names weights, masters, moments and counters are the same bits; loss scale, schedule and place in the
data are those of the save. The next steps' losses are those of the run that was not interrupted: the same bits in the
same layout, as near as rounding lets them be in another one.
"""
from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.layouts import Layout, degrees
from parity.ranks import Preloaded
from round_trips.rank import AFTER, BEFORE, ROWS, SAMPLES
from smp_helpers import make_models
from test_cli import PROGRAM


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


ALL = [Layout(*each, shard=shard, batches=min(2, each[0])) for each in degrees((1, 2, 4), (1, 2, 4))
       for shard in ([False, True] if each[2] > 1 else [False])]


def item(layout: Layout, source: Layout | None = None, **more: Any) -> dict[str, Any]:
    name = f"{source}--{layout}" if source else str(layout)
    return {"name": name, "layout": layout.asdict(), "source": None if source is None else str(source), **more}


def run_all(folder: Path, models: Path, family: str, items: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """By name; one group of processes for each number of ranks goes through all of its layouts."""
    results = {}
    for ranks in sorted({Layout(**i["layout"]).ranks for i in items}):
        of_size = [i for i in items if Layout(**i["layout"]).ranks == ranks]
        job = folder / f"job{ranks}_{len(list(folder.glob('job*.json')))}.json"
        job.write_text(json.dumps({"folder": str(folder), "models": str(models), "family": family, "items": of_size}))
        with Preloaded("round_trips.rank", [job], ranks, folder / job.stem) as running:
            running.succeed(60 + seconds * len(of_size))
        results |= json.loads(job.with_suffix(".results").read_text())
    return results


def tensors_differ(a: Path, b: Path) -> str:
    """By the program, which reads both without any of the code that resumes."""
    command = [PROGRAM, "diff", a / "t_partial", b / "t_partial", "--include", "model/*", "--include", "optimizer/state/*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{a.name} and {b.name}: {done.stdout}{done.stderr}"


# Of a loss, relative. Another layout adds the same numbers in another order; what comes out is rounded to 24, 8 or 11 bits, and
# so are the parameters that follow their masters. A loss is a mean over 120 tokens of a model in which such roundings
# add up at random: an eighth of one rounding, or in float32 (where the loss itself is one) 16 of them. A resume without
# moments, or with another run's dropout, is 2e-3 away and more (test_the_next_losses_tell).
ROUNDING = {"": 2.0**-20, "bf16": 2.0**-11, "fp16": 2.0**-14}


def near(a: float, b: float, precision: str) -> bool:
    return abs(a - b) <= ROUNDING[precision] * abs(b)


def judge(found: dict[str, Any], expected: dict[str, Any], source: Layout, target: Layout) -> list[str]:
    """A resumed run against the one that went on without a break; one line for each thing that is wrong."""
    wrong = []
    names = sorted(name for name in {*found["state"], *expected["state"]}
                   if found["state"].get(name) != expected["state"].get(name))
    if names:
        wrong.append(f"{len(names)} tensors are not what was saved, the first is {names[0]}")
    for number, (ours, theirs) in enumerate(zip(found["after"], expected["after"], strict=True)):
        wrong += [f"step {number}: {word} is {ours[word]}, not {theirs[word]}" for word in ("lr", "scaler", "samples")
                  if ours[word] != theirs[word]]
        same = ours["loss"] == theirs["loss"] and ours["norm"] == theirs["norm"]
        if not (same if source == target else near(ours["loss"], theirs["loss"], source.precision)):
            wrong.append(f"step {number}: loss {ours['loss']!r}, norm {ours['norm']!r}; not interrupted {theirs['loss']!r}, "
                         f"{theirs['norm']!r}")
    return wrong


def check(folder: Path, models: Path, family: str, pairs: list[tuple[Layout, Layout]], seconds: float = 40) -> None:
    sources = list(dict.fromkeys(source for source, _ in pairs))
    saved = run_all(folder, models, family, [item(source) for source in sources], seconds)
    for source in sources:
        every = [number for step in (saved[str(source)]["before"] + saved[str(source)]["after"])[:SAMPLES // ROWS]
                 for number in step["samples"]]
        assert sorted(every) == list(range(SAMPLES)), "the data itself: an epoch takes each sample once"
    resumed = run_all(folder, models, family, [item(target, source) for source, target in pairs], seconds)
    wrong = []
    for source, target in pairs:
        name = item(target, source)["name"]
        wrong += [f"{name}: {line}" for line in judge(resumed[name], saved[str(source)], source, target)]
    with ThreadPoolExecutor(2) as pool:
        wrong += filter(None, pool.map(lambda pair: tensors_differ(folder / str(pair[0]), folder / item(pair[1], pair[0])["name"]),
                                       pairs))
    assert not wrong, f"{len(wrong)} findings:\n" + "\n".join(wrong[:40])


def of_precision(layouts: list[Layout], precision: str) -> list[Layout]:
    return [replace(layout, precision=precision) for layout in layouts]


def small(*degrees_: int, shard: bool = False) -> Layout:
    return Layout(*degrees_, shard=shard, batches=min(2, degrees_[0]))


ONE, TWO_STAGES, TWO_SLICES, TWO_REPLICAS = small(1, 1, 1), small(2, 1, 1), small(1, 2, 1), small(1, 1, 2, shard=True)
RING = [small(2, 1, 2, shard=True), small(1, 4, 1), small(4, 1, 1), small(1, 2, 2, shard=True)]
SAMPLES_OF_PAIRS = [
    ("gpt2", "", [(TWO_SLICES, TWO_SLICES), (TWO_STAGES, TWO_SLICES), (TWO_SLICES, TWO_REPLICAS), (TWO_REPLICAS, TWO_STAGES)]),
    ("gpt2", "fp16", [(ONE, ONE), (ONE, TWO_STAGES), (TWO_REPLICAS, ONE)]),
    ("llama", "bf16", [(RING[number], RING[(number + 1) % 4]) for number in range(4)])]


@pytest.mark.parametrize("family, precision, pairs", SAMPLES_OF_PAIRS, ids=[precision or "fp32" for _, precision, _ in SAMPLES_OF_PAIRS])
def test_some_pairs(models, tmp_path, family, precision, pairs):
    check(tmp_path, models, family, [tuple(of_precision(pair, precision)) for pair in pairs])


@pytest.mark.long
@pytest.mark.parametrize("family, precision", [("gpt2", ""), ("llama", "bf16"), ("gpt2", "fp16")])
def test_every_pair(models, tmp_path, family, precision):
    layouts = of_precision(ALL, precision)
    check(tmp_path, models, family, [(source, target) for source in layouts for target in layouts])


@pytest.mark.parametrize("layout", [replace(TWO_REPLICAS, precision="bf16"), TWO_STAGES], ids=str)
def test_what_is_saved_in_the_background_is_what_was_there_at_the_call(models, tmp_path, layout):
    """Though training went on while it was written, and another save came: each goes on as the run itself did."""
    saving = {**item(layout), "background": True}
    saved = run_all(tmp_path, models, "gpt2", [saving], 90)[saving["name"]]["saved"]
    assert saved["a"]["running"] and saved["b"]["running"] and not saved["a"]["running after b"]
    assert saved["c"]["names"] == ["a_partial", "b_partial", "c_partial", "hf", "newest"], "skipped ones are not there"
    resumed = run_all(tmp_path, models, "gpt2", [item(layout, layout, tag=tag) | {"name": tag} for tag in "abc"], 40)
    wrong = []
    for tag in "abc":
        expected = saved[tag] | {"after": saved[tag]["after"][:AFTER]}
        wrong += [f"{tag}: {line}" for line in judge(resumed[tag], expected, layout, layout)]
    assert not wrong, "\n".join(wrong)
    assert len({saved[tag]["state"]["exp_avg/word_embedding.weight"] for tag in "abc"}) == 3


def test_the_next_losses_tell(models, tmp_path):
    """What the tolerance lets through is far below what is wrong where anything is."""
    (saved,) = run_all(tmp_path, models, "gpt2", [item(ONE)], 40).values()
    spoiled = item(ONE, ONE, load_optimizer=False)
    (found,) = run_all(tmp_path, models, "gpt2", [spoiled], 40).values()
    assert judge(saved, saved, ONE, ONE) == []
    assert any("tensors are not what was saved" in line and "exp_avg/" in line for line in judge(found, saved, ONE, TWO_STAGES))
    far = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(found["after"][1:], saved["after"][1:])]
    assert max(far) > 5 * max(ROUNDING.values()) and max(far) > 50 * ROUNDING["fp16"]
