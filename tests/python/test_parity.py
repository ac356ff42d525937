"""Training over stages and replicas against transformers, on the real weights of SmolLM2-135M and of a GPT-2.

The measure: against a float64 run of transformers, our float32 numbers are no farther away than twice what transformers'
own float32 runs (eager and sdpa attention) are. See parity/compare.py.
"""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from parity import cases, compare, ranks

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # stages, replicas
SAMPLE = {
    "microformer": (lambda: cases.microformer(steps=6, length=32), [(2, 1), (2, 2)]),
    "smollm2": (lambda: cases.smollm2(steps=2, length=16), [(2, 1)]),
}
WHOLE = {
    "microformer": (lambda: cases.microformer(steps=20), LAYOUTS),
    "smollm2": (lambda: cases.smollm2(steps=20, length=16), LAYOUTS),
}


class Prepared:
    """A case written down, and transformers' numbers for it: computed once in a session."""

    def __init__(self, case: cases.Case, layouts: list[tuple[int, int]], folder: Path):
        self.case, self.folder = case, folder
        case.write(folder)
        slices = sorted({cases.MICROBATCHES * replicas for _, replicas in layouts})
        command = ranks.python("parity.reference", folder, folder, *slices)
        subprocess.run(command, env=ranks.environment(threads=2), check=True, timeout=1200)
        loaded = torch.load(folder / "noise.pt")
        self.noise, self.start = loaded["noise"], loaded["start"]

    def exact(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / f"{name}.pt", mmap=True)

    def numbers(self, name: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        runs = self.noise[name]
        return self.exact(name), {key: [run[key] for run in runs] for key in runs[0]}


@pytest.fixture(scope="session")
def prepare(tmp_path_factory):
    done: dict[str, Prepared] = {}

    def prepare(kind: str, name: str) -> Prepared:
        key = f"{kind}-{name}"
        if key not in done:
            make, layouts = (SAMPLE if kind == "sample" else WHOLE)[name]
            done[key] = Prepared(make(), layouts, tmp_path_factory.mktemp(key))
        return done[key]

    yield prepare
    for prepared in done.values():
        shutil.rmtree(prepared.folder)


class Outcome:
    """What the ranks wrote of one phase, put together: any two ranks that hold the same tensor hold the same bits."""

    def __init__(self, folder: Path, phase: str, count: int):
        self.tensors: dict[str, torch.Tensor] = {}
        self.losses: list[list[float]] = []  # by step, all microbatches of all replicas in the order of their rows
        replicas: dict[int, list[list[float]]] = {}
        self.digests: dict[str, str] = {}
        self.squares: dict[str, float] = {}
        self.held: list[set[str]] = []
        for rank in range(count):
            file = torch.load(folder / f"{phase}_{rank}.pt", mmap=True)
            for name, digest in file["digests"].items():
                assert self.digests.setdefault(name, digest) == digest, f"{phase}: {name} differs between ranks"
            self.held.append(set(file["digests"]))
            self.tensors |= file["tensors"]
            self.squares |= file["squares"]
            assert replicas.setdefault(file["replica"], file["losses"]) == file["losses"], "stages were told other losses"
        for of_step in zip(*(replicas[replica] for replica in sorted(replicas))):
            self.losses.append([loss for of_replica in of_step for loss in of_replica])

    def means(self) -> list[float]:
        return [sum(losses) / len(losses) for losses in self.losses]


def check(prepared: Prepared, stages: int, replicas: int, folder: Path) -> None:
    count = stages * replicas
    command = ranks.python("parity.rank", prepared.folder, folder, stages, replicas)
    with ranks.Ranks(command, count, folder, threads=2 if count == 1 else 1) as running:
        running.succeed(timeout=900)
    start = Outcome(folder, "start", count)
    assert start.digests == prepared.start, "the weights were not read as transformers reads them"
    if stages > 1:  # each holds a part, or there would be nothing to see here
        assert all(held < prepared.start.keys() for held in start.held)

    wrong = []
    exact, noise = prepared.numbers(f"padded{cases.MICROBATCHES * replicas}")
    found = Outcome(folder, "padded", count)
    wrong += compare.judge_losses("padded", found.losses[0], exact["losses"], noise["losses"])
    wrong += compare.judge_tensors("padded", found.tensors, exact["tensors"], noise["tensors"], gradients=True)

    exact, noise = prepared.numbers("first")
    found = Outcome(folder, "first", count)
    wrong += compare.judge_losses("first step", found.means(), exact["losses"], noise["losses"])
    wrong += compare.judge_tensors("first step", found.tensors, exact["tensors"], noise["tensors"], gradients=True)

    exact, noise = prepared.numbers("sgd")
    found = Outcome(folder, "sgd", count)
    wrong += compare.judge_losses("SGD", found.means(), exact["losses"], noise["losses"])
    wrong += compare.judge_tensors("SGD", found.tensors, exact["tensors"], noise["tensors"], gradients=False)

    exact, noise = prepared.numbers("adamw")
    found = Outcome(folder, "adamw", count)
    wrong += compare.judge_losses("AdamW", found.means(), exact["losses"], noise["losses"])
    wrong += compare.judge_losses("AdamW's norm over all weights", [sum(found.squares.values()) ** 0.5], [exact["norm"]],
                                  [[norm] for norm in noise["norm"]])
    assert not wrong, "\n".join(wrong)
    shutil.rmtree(folder)  # gigabytes


def layouts(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, stages, replicas, id=f"{name}-{stages}-stages-{replicas}-replicas")
            for name, (_, which) in table.items() for stages, replicas in which]


@pytest.mark.parametrize("name, stages, replicas", layouts(SAMPLE))
def test_losses_gradients_and_weights_are_as_near_as_transformers_are(prepare, tmp_path, name, stages, replicas):
    check(prepare("sample", name), stages, replicas, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name, stages, replicas", layouts(WHOLE))
def test_every_layout_is_as_near_as_transformers_are(prepare, tmp_path, name, stages, replicas):
    check(prepare("whole", name), stages, replicas, tmp_path)


# The measure itself.
def test_the_exact_run_tells_something(prepare):
    """Key biases, and only those, have no gradient; training moves the weights far more than noise does."""
    prepared = prepare("sample", "microformer")
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
    prepared = prepare("sample", "microformer")
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
