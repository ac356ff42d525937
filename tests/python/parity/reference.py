"""transformers' own numbers for a case: the exact ones in float64, and how far its float32 runs are from them.

    python -m parity.reference CASE_FOLDER OUTPUT_FOLDER SLICES...

float64 takes more than `.double()`: transformers narrows to float32 inside of norms, softmax, rotary angles and the loss.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from parity import cases
from parity.compare import digests, parts, squares

VARIANTS = (("eager", torch.float64), ("eager", torch.float32), ("sdpa", torch.float32))


class NoFloat32(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class Run:
    def __init__(self, case: cases.Case, attention: str, dtype: torch.dtype):
        self.dtype = dtype
        self.model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32,
                                                          attn_implementation=attention, **case.overrides)
        # Rotary frequencies keep the values that float32 gives them: they are the model's constants.
        self.model = self.model.to(dtype).train()
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def reset(self) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.start[name])
        self.model.zero_grad()

    def loss(self, **inputs: torch.Tensor) -> torch.Tensor:
        with NoFloat32() if self.dtype == torch.float64 else nullcontext():
            loss = self.model(**inputs, use_cache=False).loss
        assert loss.dtype == self.dtype
        return loss

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def padded(self, inputs: dict[str, torch.Tensor], slices: int) -> dict[str, Any]:
        """Every slice's loss is the mean over its own labels; the batch's is the mean of these."""
        self.model.zero_grad()
        losses = []
        for number in range(slices):
            loss = self.loss(**{name: value.chunk(slices)[number] for name, value in inputs.items()})
            (loss / slices).backward()
            losses.append(loss.item())
        return {"losses": losses, "tensors": self.gradients()}

    def train(self, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> tuple[list[float], dict]:
        losses, first = [], {}
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = self.loss(input_ids=batch, labels=batch)
            loss.backward()
            losses.append(loss.item())
            if number == 0:
                first = self.gradients()
            optimizer.step()
        return losses, first

    def all(self, case: cases.Case, data: dict[str, Any], slices: list[int], done: Callable[[str, dict], None]) -> None:
        for number in slices:
            done(f"padded{number}", self.padded(data["padded"], number))
        losses, first = self.train(torch.optim.SGD(self.model.parameters(), lr=case.sgd_rate), data["batches"])
        done("first", {"losses": losses[:1], "tensors": first})
        del first
        done("sgd", {"losses": losses, "tensors": self.weights(), "moved": self.moved()})
        self.reset()
        losses, _ = self.train(torch.optim.AdamW(self.model.parameters(), lr=case.adamw_rate, fused=True), data["batches"])
        norm = sum(squares(dict(self.model.named_parameters())).values()) ** 0.5
        done("adamw", {"losses": losses, "tensors": {}, "norm": norm})

    def moved(self) -> dict[str, float]:
        """How far training has brought each part."""
        result = {}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                for (part, after), (_, before) in zip(parts(name, p), parts(name, self.start[name])):
                    result[part] = (after - before).norm().item()
        return result


def distances(exact: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    result = {"losses": [abs(a - b) for a, b in zip(exact["losses"], run["losses"])], "tensors": {}}
    for name, tensor in exact["tensors"].items():
        for part, wide in parts(name, tensor):
            result["tensors"][part] = (dict(parts(name, run["tensors"][name]))[part].double() - wide).norm().item()
    if "norm" in exact:
        result["norm"] = abs(exact["norm"] - run["norm"])
    return result


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    case, data = cases.read(source)
    slices = [int(text) for text in sys.argv[3:]]
    noise: dict[str, list[Any]] = {}

    def save(name: str, result: dict[str, Any]) -> None:
        torch.save(result, target / f"{name}.pt")

    def judge(name: str, result: dict[str, Any]) -> None:
        noise.setdefault(name, []).append(distances(torch.load(target / f"{name}.pt", mmap=True), result))

    for attention, dtype in VARIANTS:
        exact = dtype == torch.float64
        run = Run(case, attention, dtype)
        run.all(case, data, slices, save if exact else judge)
        if not exact:
            torch.save({"noise": noise, "start": digests(run.start)}, target / "noise.pt")


if __name__ == "__main__":
    main()
