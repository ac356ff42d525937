"""transformers' own numbers for a case: the exact ones in float64, and how far its float32 runs are from them.

    python -m parity.reference CASE_FOLDER OUTPUT.pt SLICES...

float64 takes more than `.double()`: transformers narrows to float32 inside of norms, softmax, rotary angles and the loss.
"""
from __future__ import annotations

import sys
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

    def all(self, case: cases.Case, data: dict[str, Any], slices: list[int]) -> dict[str, Any]:
        results = {f"padded{n}": self.padded(data["padded"], n) for n in slices}
        losses, first = self.train(torch.optim.SGD(self.model.parameters(), lr=case.sgd_rate), data["batches"])
        results["first"] = {"losses": losses[:1], "tensors": first}
        results["sgd"] = {"losses": losses, "tensors": self.weights()}
        self.reset()
        losses, _ = self.train(torch.optim.AdamW(self.model.parameters(), lr=case.adamw_rate), data["batches"])
        results["adamw"] = {"losses": losses, "tensors": {}, "norm": sum(squares(self.weights()).values()) ** 0.5}
        return results


def distances(exact: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    result = {"losses": [abs(a - b) for a, b in zip(exact["losses"], run["losses"])], "tensors": {}}
    for name, tensor in exact["tensors"].items():
        for part, wide in parts(name, tensor):
            result["tensors"][part] = (dict(parts(name, run["tensors"][name]))[part].double() - wide).norm().item()
    if "norm" in exact:
        result["norm"] = abs(exact["norm"] - run["norm"])
    return result


def main() -> None:
    case, data = cases.read(Path(sys.argv[1]))
    slices = [int(text) for text in sys.argv[3:]]
    exact: dict[str, Any] = {}
    noise: dict[str, list[Any]] = {}
    for attention, dtype in VARIANTS:
        run = Run(case, attention, dtype)
        results = run.all(case, data, slices)
        if not exact:
            exact = results
            exact["moved"] = {part: (piece - dict(parts(name, run.start[name]))[part]).norm().item()
                              for name, tensor in results["sgd"]["tensors"].items() for part, piece in parts(name, tensor)}
        else:
            for name, result in results.items():
                noise.setdefault(name, []).append(distances(exact[name], result))
    # The weights are float32 in the file.
    start = digests({name: tensor.float() for name, tensor in run.start.items()})
    torch.save({"exact": exact, "noise": noise, "start": start}, sys.argv[2])


if __name__ == "__main__":
    main()
