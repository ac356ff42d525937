"""One rank: trains a case through smp and writes losses, outputs, gradients and weights for the parent to compare.

    python -m parity.rank CASE_FOLDER OUTPUT_FOLDER JOB

JOB: JSON, {"mode": a method of Rank, "layout": that of layouts.Layout}.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

import shardsmith.smp as smp
from parity import cases, parts
from parity.layouts import Layout

SCALE = 1024.0  # of the loss under fp16


class Rank:
    def __init__(self, case: cases.Case, data: dict[str, Any], layout: Layout, target: Path):
        self.case, self.data, self.layout, self.target = case, data, layout, target
        torch.manual_seed(1)
        with smp.model_creation(tensor_parallelism=layout.tp > 1, dtype=torch.float32):
            auto = AutoModel if case.bare else AutoModelForCausalLM
            module = auto.from_pretrained(case.folder, **case.overrides)
        self.model = smp.DistributedModel(module)
        self.model.train()
        if layout.checkpointing:
            layers = next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
            smp.set_activation_checkpointing(layers, strategy=layout.checkpointing)
        last = smp.pp_rank() == smp.pp_size() - 1

        @smp.step(non_split_inputs=["projection"])
        def bare_step(model: Any, projection: Any, input_ids: Any, attention_mask: Any) -> Any:
            output = model(input_ids=input_ids, attention_mask=attention_mask)
            if not last:
                model.backward(None)
                return None
            result = cases.projected(case, output, attention_mask, projection)
            model.backward(result[0])
            return result

        @smp.step
        def train_step(model: Any, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)["loss"]
            model.backward(loss)
            return loss

        self.bare_step, self.train_step = bare_step, train_step

    @property
    def feeder(self) -> int:
        return smp.rdp_rank() if self.layout.prescaled else smp.dp_rank()

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows; on later stages what scripts give there, a placeholder."""
        if smp.pp_rank() > 0:
            return torch.empty(tensor.shape[0] // self.layout.feeders, 0)
        return tensor.chunk(self.layout.feeders)[self.feeder]

    def step(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
             labels: torch.Tensor | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Returns the losses of this rank's microbatches, and a bare model's outputs for its rows."""
        mask = self.part(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
        if self.case.bare:
            loss, hidden, pooled = self.bare_step(self.model, self.data["projection"], self.part(input_ids), mask)
            outputs = {"last_hidden_state": hidden.concat(), "pooler_output": pooled.concat()}
        else:
            loss = self.train_step(self.model, self.part(input_ids), mask, self.part(input_ids if labels is None else labels))
            outputs = {}
        return loss.stack().double().tolist(), outputs

    # What is written: each returns parts.
    def gradients(self, scale: float = 1.0) -> list[parts.Part]:
        """Under shard_optimizer_state those of the rows that this rank's optimizer updates: the others are undefined."""
        optimized = {name: self.model._local[name] for name in self.model.optimized}
        tensors = {name: self.model.rows(name, p.grad.float() / scale if p.grad.dtype != torch.float32 else p.grad)
                   for name, p in optimized.items()}
        return parts.of_rank(self.model, tensors, optimized=True)

    def weights(self) -> list[parts.Part]:
        return parts.of_rank(self.model, self.model._local)

    def masters(self) -> list[parts.Part]:
        return parts.of_rank(self.model, self.model.masters, optimized=True)

    def write(self, name: str, losses: list[list[float]], outputs: dict[str, torch.Tensor] | None = None,
              of_rank: list[parts.Part] | None = None, whole: bool = True) -> None:
        """Digests from all ranks, as ranks that hold the same must agree to the bit; the tensors, if wanted, from one of
        them (each shard has one)."""
        first = smp.rdp_rank() == 0 or self.layout.shard
        names = {id(p): name for name, p in self.model.module.named_parameters()}
        of_rank = of_rank or []
        torch.save({"losses": losses, "outputs": outputs or {}, "feeder": self.feeder, "config": self.model._config_text,
                    "names": {name: names[id(p)] for name, p in self.model._local.items()},
                    "digests": {tuple(part.key): parts.digest(part.tensor) for part in of_rank},
                    "squares": {tuple(part.key): part.tensor.double().square().sum().item() for part in of_rank},
                    "parts": {tuple(part.key): part.tensor for part in of_rank if whole and first and part.stored}},
                   self.target / f"{name}_{smp.rank()}.pt")

    def train(self, optimizer: torch.optim.Optimizer, first: str = "") -> list[list[float]]:
        """Losses by step. `first`: what the first step's gradients are written as."""
        losses = []
        for number, batch in enumerate(self.data["batches"]):
            optimizer.zero_grad()
            loss, outputs = self.step(batch)
            losses.append(loss)
            if number == 0 and first:
                self.write(first, losses, outputs, self.gradients())
            optimizer.step()
        return losses

    # Modes.
    def parity(self) -> None:
        case = self.case
        sgd = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=case.sgd_rate))
        self.model.partition()
        self.write("start", [], of_rank=self.weights(), whole=False)
        padded, outputs = self.step(**self.data["padded"])
        self.write("padded", [padded], outputs, self.gradients())
        losses = self.train(sgd, "first")
        self.write("sgd", losses, of_rank=self.weights())
        if case.adamw_rate:
            adamw = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=case.adamw_rate, fused=True))
            losses = self.train(adamw)
            self.write("adamw", losses, of_rank=self.weights(), whole=False)

    def dropout(self) -> None:
        sgd = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=self.case.sgd_rate))
        self.write("sgd", self.train(sgd))

    def narrow(self) -> None:
        """At fixed weights losses and gradients of every batch; then training."""
        sgd = torch.optim.SGD(self.model.parameters(), lr=self.case.sgd_rate)
        sgd = smp.DistributedOptimizer(sgd, static_loss_scale=SCALE if self.layout.precision == "fp16" else 1.0)
        for number, batch in enumerate(self.data["batches"]):
            sgd.zero_grad()
            loss, _ = self.step(batch)
            self.write(f"fixed{number}", [loss], of_rank=self.gradients(sgd.loss_scale))
        self.write("sgd", self.train(sgd), of_rank=self.masters())


def main() -> None:
    folder, target, job = sys.argv[1:]
    job = json.loads(job)
    layout = Layout(**job["layout"])
    case, data = cases.read(Path(folder))
    smp.init({**layout.config(case.rows), "peer_timeout": 240})
    getattr(Rank(case, data, layout, Path(target)), job["mode"])()
    smp.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
