"""What the ranks wrote, put together; and the numbers it is judged by, computed once for a case."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from parity import cases, parts, ranks
from parity.compare import distance, judge_losses, judge_tensors
from parity.layouts import Layout


class Outcome:
    """Of one phase: any two ranks that hold the same part hold the same bits."""

    def __init__(self, folder: Path, phase: str, count: int):
        self.digests: dict[parts.Key, int] = {}
        self.squares: dict[parts.Key, float] = {}
        self.held: list[set[parts.Key]] = []
        self.names: dict[str, str] = {}  # by those of Hugging Face's files: the module's
        fed: dict[int, Any] = {}
        found: dict[parts.Key, torch.Tensor] = {}
        for rank in range(count):
            file = torch.load(folder / f"{phase}_{rank}.pt", mmap=True)
            digests = {parts.Key(*key): value for key, value in file["digests"].items()}
            for key, digest in digests.items():
                assert self.digests.setdefault(key, digest) == digest, f"{phase}: {key} differs between ranks"
            self.held.append(set(digests))
            self.squares |= {parts.Key(*key): value for key, value in file["squares"].items()}
            self.names |= file["names"]
            found |= {parts.Key(*key): tensor for key, tensor in file["parts"].items()}
            losses, outputs = fed.setdefault(file["feeder"], (file["losses"], file["outputs"]))
            assert losses == file["losses"], f"{phase}: ranks of one batch were told other losses"
            for name, tensor in outputs.items():
                assert torch.equal(tensor, file["outputs"][name]), f"{phase}: ranks of one batch were given other outputs"
        in_order = [fed[feeder] for feeder in sorted(fed)]
        # By step, all microbatches in the order of their rows.
        self.losses = [[loss for of_feeder in of_step for loss in of_feeder] for of_step in zip(*(f[0] for f in in_order))]
        self.outputs = {name: torch.cat([outputs[name] for _, outputs in in_order]) for name in in_order[0][1]}
        self.wholes = parts.Wholes(file["config"])
        self.tensors = {self.names[name]: tensor for name, tensor in self.wholes.together(found).items()}

    def means(self) -> list[float]:
        return [sum(losses) / len(losses) for losses in self.losses]


def run_ranks(case: cases.Case, source: Path, layout: Layout, folder: Path, mode: str) -> None:
    job = json.dumps({"mode": mode, "layout": layout.asdict()})
    threads = 2 if layout.ranks == 1 else 1
    with ranks.Preloaded("parity.rank", [source, folder, job], layout.ranks, folder, threads) as running:
        running.succeed(timeout=600)


class Prepared:
    """A case written down, and transformers' numbers for it."""

    def __init__(self, case: cases.Case, folder: Path, *words: object):
        self.case, self.folder = case, folder
        case.write(folder)
        self.expected: dict[parts.Key, int] = {}
        if words:
            with ranks.Preloaded("parity.reference", [folder, folder, *words], 1, folder, threads=2) as running:
                running.succeed(timeout=600)
        self.noise = torch.load(folder / "noise.pt") if (folder / "noise.pt").exists() else {}

    def exact(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / f"{name}.pt", mmap=True)

    def numbers(self, name: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        runs = self.noise[name]
        return self.exact(name), {key: [run[key] for run in runs] for key in runs[0]}

    def require_start(self, start: Outcome) -> None:
        """The weights are those that transformers reads, all of them, by the bit."""
        weights = self.exact("start")
        assert set(start.names.values()) == weights.keys()
        covered = dict.fromkeys(start.names, 0)
        for key, digest in start.digests.items():
            if key not in self.expected:
                self.expected[key] = parts.digest(start.wholes.part(key, weights[start.names[key.tensor]]))
            assert digest == self.expected[key], f"{key} was not read as transformers reads it"
            covered[key.tensor] += torch.Size(key.shape).numel()
        assert covered == {name: weights[own].numel() for name, own in start.names.items()}

    def check(self, layout: Layout, folder: Path) -> None:
        """Trains in a layout: everything is as near to the exact numbers as twice what transformers is."""
        run_ranks(self.case, self.folder, layout, folder, "parity")
        start = Outcome(folder, "start", layout.ranks)
        self.require_start(start)
        if layout.pp * layout.tp > 1:  # each holds a part, or there would be nothing to see here
            assert all(held < start.digests.keys() for held in start.held)

        wrong = []
        for phase, name, what in ((f"padded{layout.slices(self.case.rows)}", "padded", "padded"),
                                  ("first", "first", "first step"), ("sgd", "sgd", "SGD")):
            exact, noise = self.numbers(phase)
            found = Outcome(folder, name, layout.ranks)
            if self.case.bare:  # its losses are one number, which may be anything; its outputs are many
                for output, tensor in found.outputs.items():
                    wrong += judge_tensors(what, {output: tensor}, {output: exact["outputs"][output]}, noise["outputs"], False)
            else:
                losses = found.losses[0] if name == "padded" else found.means()
                wrong += judge_losses(what, losses, exact["losses"], noise["losses"])
            wrong += judge_tensors(what, found.tensors, exact["tensors"], noise["tensors"], gradients=name != "sgd")
        if self.case.adamw_rate:
            exact, noise = self.numbers("adamw")
            found = Outcome(folder, "adamw", layout.ranks)
            wrong += judge_losses("AdamW", found.means(), exact["losses"], noise["losses"])
            wrong += judge_losses("AdamW's norm over all weights", [sum(found.squares.values()) ** 0.5], [exact["norm"]],
                                  [[norm] for norm in noise["norm"]])
        assert not wrong, "\n".join(wrong)
        shutil.rmtree(folder)  # gigabytes

    def ratios(self, layout: Layout, folder: Path) -> dict[str, float]:
        """How much farther from the exact numbers a run in bf16 or fp16 is than a plain loop of PyTorch. By medians over
        losses, batches and tensors: a token whose layer norm divides by next to nothing magnifies the roundings before it
        a hundredfold, and in a sum of squares such a batch would be all that counts."""
        run_ranks(self.case, self.folder, layout, folder, "narrow")
        exact, plain = self.exact("narrow"), self.exact(f"narrow_{layout.precision}")

        def apart(some: list[float], others: list[float]) -> float:
            return median(abs(a - b) for a, b in zip(some, others, strict=True))

        fixed = [Outcome(folder, f"fixed{step}", layout.ranks) for step in range(self.case.steps)]
        trained = Outcome(folder, "sgd", layout.ranks)
        right = [loss for step in exact["fixed"] for loss in step["losses"]]
        losses = [loss for step in trained.losses for loss in step]
        ratios = {"losses": apart([loss for step in fixed for loss in step.losses[0]], right) /
                            apart(plain["fixed losses"], right),
                  "gradients": median(distance(step.tensors, its["tensors"]) / theirs
                                      for step, its, theirs in zip(fixed, exact["fixed"], plain["fixed"], strict=True)),
                  "trained losses": apart(losses, exact["losses"]) / apart(plain["losses"], exact["losses"]),
                  "trained weights": median(distance({name: tensor}, {name: exact["tensors"][name]}) / plain["weights"][name]
                                            for name, tensor in trained.tensors.items())}
        shutil.rmtree(folder)
        return ratios
