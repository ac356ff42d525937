"""transformers' own numbers for a case: the exact ones in float64, and how far its float32 runs are from them.

    python -m parity.reference CASE_FOLDER OUTPUT_FOLDER SLICES...
    python -m parity.reference CASE_FOLDER OUTPUT_FOLDER narrow DTYPES...

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
from transformers import AutoModel, AutoModelForCausalLM

from parity import cases
from parity.compare import distance, parts

VARIANTS = (("eager", torch.float64), ("eager", torch.float32), ("sdpa", torch.float32))
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NARROW_SLICES = 2
SCALE = 1024.0  # of the loss in float16


class NoFloat32(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class Run:
    def __init__(self, case: cases.Case, data: dict[str, Any], attention: str, dtype: torch.dtype):
        self.case, self.data, self.dtype = case, data, dtype
        auto = AutoModel if case.bare else AutoModelForCausalLM
        self.model = auto.from_pretrained(case.folder, dtype=torch.float32, attn_implementation=attention, **case.overrides)
        # Rotary frequencies keep the values that float32 gives them: they are the model's constants.
        self.model = self.model.to(dtype).train()

    def loss(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
             labels: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of a bare model its projection; with it what it computes."""
        with NoFloat32() if self.dtype == torch.float64 else nullcontext():
            if not self.case.bare:
                labels = input_ids if labels is None else labels
                loss = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False).loss
                assert loss.dtype == self.dtype or self.dtype in NARROW.values()
                return loss, {}
            output = self.model(input_ids=input_ids, attention_mask=attention_mask)
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            loss, hidden, pooled = cases.projected(self.case, output, mask, self.data["projection"])
        assert loss.dtype == hidden.dtype == self.dtype
        return loss, {"last_hidden_state": hidden, "pooler_output": pooled}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def sliced(self, inputs: dict[str, torch.Tensor], slices: int, scale: float = 1.0) -> dict[str, Any]:
        """Every slice's loss is the mean over its own labels; the batch's is the mean of these."""
        self.model.zero_grad()
        losses, outputs = [], []
        for number in range(slices):
            loss, output = self.loss(**{name: value.chunk(slices)[number] for name, value in inputs.items()})
            (loss * (scale / slices)).backward()
            losses.append(loss.item())
            outputs.append(output)
        return {"losses": losses, "tensors": self.gradients(),
                "outputs": {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}}

    def train(self, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Any]]:
        losses, first = [], {}
        for number, batch in enumerate(self.data["batches"]):
            optimizer.zero_grad()
            loss, outputs = self.loss(batch)
            loss.backward()
            losses.append(loss.item())
            if number == 0:
                first = {"losses": losses[:1], "tensors": self.gradients(), "outputs": outputs}
            optimizer.step()
        return losses, first

    def all(self, slices: list[int], done: Callable[[str, dict], None]) -> None:
        case = self.case
        start = self.weights() if self.dtype == torch.float64 else None
        for number in slices:
            done(f"padded{number}", self.sliced(self.data["padded"], number))
        losses, first = self.train(torch.optim.SGD(self.model.parameters(), lr=case.sgd_rate))
        done("first", first)
        del first
        result = {"losses": losses, "tensors": self.weights()}
        done("sgd", result | ({"moved": moved(start, result["tensors"])} if start else {}))
        del result, start
        if case.adamw_rate:
            losses, _ = self.train(torch.optim.AdamW(self.model.parameters(), lr=case.adamw_rate, fused=True))
            norm = sum(p.detach().double().square().sum().item() for p in self.model.parameters()) ** 0.5
            done("adamw", {"losses": losses, "tensors": {}, "norm": norm})


def moved(start: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far training has brought each part."""
    return {part: (after - before).norm().item() for name, tensor in tensors.items()
            for (part, after), (_, before) in zip(parts(name, tensor), parts(name, start[name]))}


def distances(exact: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    def of(exact: dict[str, torch.Tensor], run: dict[str, torch.Tensor]) -> dict[str, float]:
        return {part: (dict(parts(name, run[name]))[part].double() - wide).norm().item()
                for name, tensor in exact.items() for part, wide in parts(name, tensor)}

    result = {"losses": [abs(a - b) for a, b in zip(exact["losses"], run["losses"])],
              "tensors": of(exact["tensors"], run["tensors"]), "outputs": of(exact.get("outputs", {}), run.get("outputs", {}))}
    if "norm" in exact:
        result["norm"] = abs(exact["norm"] - run["norm"])
    return result


def reference(case: cases.Case, data: dict[str, Any], target: Path, slices: list[int]) -> None:
    noise: dict[str, list[Any]] = {}

    def save(name: str, result: dict[str, Any]) -> None:
        torch.save(result, target / f"{name}.pt")

    def judge(name: str, result: dict[str, Any]) -> None:
        noise.setdefault(name, []).append(distances(torch.load(target / f"{name}.pt", mmap=True), result))

    for attention, dtype in VARIANTS:
        run = Run(case, data, attention, dtype)
        if dtype == torch.float32 and not noise:
            save("start", run.weights())
        run.all(slices, save if dtype == torch.float64 else judge)
    torch.save(noise, target / "noise.pt")


# bf16 and fp16: a plain loop of PyTorch with float32 masters.
def train_narrow(run: Run, rate: float, scale: float) -> dict[str, Any]:
    """Losses and gradients of every batch at fixed weights; then the losses of training, and the masters."""
    masters = [torch.nn.Parameter(p.detach().to(torch.float32 if p.dtype in NARROW.values() else p.dtype))
               for p in run.masters]
    fixed = [run.sliced({"input_ids": batch, "labels": batch}, NARROW_SLICES, scale) for batch in run.data["batches"]]
    for result in fixed:
        result["tensors"] = {name: gradient.to(masters[0].dtype) / scale for name, gradient in result["tensors"].items()}
    optimizer, losses = torch.optim.SGD(masters, lr=rate), []
    for batch in run.data["batches"]:
        result = run.sliced({"input_ids": batch, "labels": batch}, NARROW_SLICES, scale)
        losses += result["losses"]
        for master, gradient in zip(masters, result["tensors"].values()):
            master.grad = gradient.to(master.dtype) / scale
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(run.model.parameters(), masters):
                p.copy_(master)
    names = [name for name, _ in run.model.named_parameters()]
    return {"fixed": fixed, "losses": losses, "tensors": dict(zip(names, (master.detach() for master in masters)))}


def narrow(case: cases.Case, data: dict[str, Any], target: Path, words: list[str]) -> None:
    exact = None
    for word in ("", *words):
        dtype = NARROW.get(word, torch.float64)
        run = Run(case, data, "sdpa", torch.float64 if exact is None else torch.float32)
        run.masters = [p.detach().clone() for p in run.model.parameters()]
        run.model.to(dtype)
        run.dtype = dtype
        result = train_narrow(run, case.sgd_rate, SCALE if word == "fp16" else 1.0)
        if exact is None:
            exact = result
            torch.save(exact, target / "narrow.pt")
            continue
        torch.save({"fixed losses": [loss for step in result["fixed"] for loss in step["losses"]], "losses": result["losses"],
                    "fixed": [distance(a["tensors"], b["tensors"]) for a, b in zip(result["fixed"], exact["fixed"])],
                    "weights": {name: distance({name: tensor}, {name: exact["tensors"][name]})
                                for name, tensor in result["tensors"].items()}}, target / f"narrow_{word}.pt")


def main() -> None:
    source, target, *words = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    case, data = cases.read(source)
    if words[0] == "narrow":
        narrow(case, data, target, words[1:])
    else:
        reference(case, data, target, [int(word) for word in words])


if __name__ == "__main__":
    main()
