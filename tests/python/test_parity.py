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
    "smollm2": (lambda: cases.smollm2(steps=2, rows=2, layers=6), [Layout(1, 3, 1)]),
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
          Layout(1, 2, precision="fp16"), Layout(1, 1, 2, precision="bf16", batches=1),
          Layout(1, 1, 2, precision="fp16", batches=1), Layout(1, 2, 2, shard=True, precision="bf16", batches=1)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Here, as those of the ranks are waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


# bf16 and fp16.
def check_narrow(prepared: Prepared, layout: Layout, folder: Any) -> None:
    ratios = prepared.ratios(layout, folder)
    assert all(ratio < 1.5 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("layout", NARROW[2:3], ids=str)
def test_narrow_numbers_are_as_near_as_a_plain_loops(prepare, tmp_path, layout):
    check_narrow(prepare("sample-narrow", lambda: cases.microformer(steps=6), "narrow", "bf16"), layout, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", NARROW, ids=str)
def test_narrow_numbers_are_as_near_as_a_plain_loops_in_every_way(prepare, tmp_path, layout):
    check_narrow(prepare("narrow", lambda: cases.microformer(steps=8), "narrow", "bf16", "fp16"), layout, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(2, precision="bf16"), Layout(1, 3, precision="bf16"),
                                    Layout(1, 1, 2, precision="bf16", batches=1)], ids=str)
def test_narrow_numbers_of_a_larger_model(prepare, tmp_path, layout):
    make = lambda: cases.smollm2(steps=3, length=32, layers=12)  # noqa: E731
    check_narrow(prepare("narrow-smollm2", make, "narrow", "bf16"), layout, tmp_path)


# Dropout: masks are functions of seed, step, place, sample and element.
def dropped(prepare: Any, layout: Layout, folder: Any, case: str = "dropout") -> list[float]:
    """Losses by step."""
    make = lambda: cases.microformer(steps=4, dropout=case == "dropout")  # noqa: E731
    prepared = prepare(case, make)
    run_ranks(prepared.case, prepared.folder, layout, folder, "dropout")
    return Outcome(folder, "sgd", layout.ranks).means()


def check_dropout(prepare: Any, layouts: list[Layout], folder: Any) -> None:
    one = dropped(prepare, Layout(), folder / "one")
    without = dropped(prepare, Layout(), folder / "without", "no-dropout")
    assert all(abs(a - b) > 1e-2 for a, b in zip(one, without)), "nothing is dropped"
    for layout in layouts:
        assert dropped(prepare, layout, folder / str(layout)) == pytest.approx(one, rel=2e-6), str(layout)


def test_dropout_drops_the_same_in_another_layout(prepare, tmp_path):
    check_dropout(prepare, [Layout(2, 2, 1, "each", prescaled=False)], tmp_path)


@pytest.mark.long
def test_dropout_drops_the_same_in_every_layout(prepare, tmp_path):
    check_dropout(prepare, plain(MICROFORMER[1:]) + varied(MICROFORMER[1:10], 8), tmp_path)


# What can't be.
@pytest.mark.parametrize("family, ranks, words", [
    ("smollm2", 2, ["9 attention heads", "2 tensor-parallel ranks", "1, 3", "pipeline stages"]),
    ("microformer", 3, ["8 attention heads", "3 tensor-parallel ranks", "1, 2, 4, 8", "pipeline stages"])])
def test_degrees_that_do_not_divide_the_heads_are_refused(tmp_path, family, ranks, words):
    getattr(models, family)()
    found = run(f"""
start(1, 1, tensor_parallel_degree={ranks}, ddp=True)
from transformers import AutoModelForCausalLM
with smp.model_creation(tensor_parallelism=True):
    module = AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, {family!r}))
results["error"] = refusal(smp.DistributedModel, module)
""", ranks, models.CACHE, tmp_path)
    for rank in found:
        kind, text = rank["error"]
        assert kind == "invalid_argument" and all(word in text for word in words), text


# The measure itself.
def sample(prepare: Any) -> Prepared:
    make, which = SAMPLE["microformer"]
    return prepare("sample-microformer", make, *sorted({layout.slices(8) for layout in which}))


def test_the_exact_run_tells_something(prepare):
    """Key biases, and only those, have no gradient; training moves the weights far more than noise does."""
    prepared = sample(prepare)
    gradients = prepared.exact("first")["tensors"]
    assert compare.zeros(gradients) == {f"transformer.h.{layer}.attn.c_attn.bias[key]" for layer in range(8)}
    assert all(tensor.dtype == torch.float64 for tensor in gradients.values())
    losses = prepared.exact("sgd")["losses"]
    zeros = compare.zeros(gradients)
    for part, moved in prepared.exact("sgd")["moved"].items():
        assert part in zeros or moved > 100 * max(run["tensors"][part] for run in prepared.noise["sgd"]), part
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", ["first", "sgd"])
def test_small_mistakes_are_seen(prepare, name):
    """A replica's share forgotten in one tensor, rows swapped, a norm's weight a hundred-thousandth off."""
    prepared = sample(prepare)
    exact, noise = prepared.numbers(name)
    right = {key: tensor.float() for key, tensor in exact["tensors"].items()}

    def wrong(key: str, change: Any) -> int:
        changed = {**right, key: change(right[key].clone())}
        return len(compare.judge_tensors(name, changed, exact["tensors"], noise["tensors"], gradients=name == "first"))

    assert compare.judge_tensors(name, right, exact["tensors"], noise["tensors"], gradients=name == "first") == []
    assert wrong("transformer.h.3.mlp.c_proj.weight", lambda t: t * (1 + 1e-4))
    assert wrong("transformer.h.7.ln_2.weight", lambda t: t * (1 + 1e-4))
    assert wrong("transformer.h.0.attn.c_attn.weight", lambda t: t.roll(1, 0))
    assert wrong("transformer.wte.weight", lambda t: t.roll(1, 0))
    if name == "first":
        assert wrong("transformer.h.3.attn.c_attn.bias", lambda t: t + 1e-5 * right["transformer.wte.weight"].norm())
    assert compare.judge_losses(name, [exact["losses"][0] * (1 + 1e-5)] + exact["losses"][1:], exact["losses"],
                                noise["losses"])
