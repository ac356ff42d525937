"""One rank: trains a case through smp and writes losses, gradients and weights for the parent to compare.

    python -m parity.rank CASE_FOLDER OUTPUT_FOLDER STAGES REPLICAS
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import shardsmith.smp as smp
from parity import cases
from parity.compare import digests, squares


class Rank:
    def __init__(self, case: cases.Case, replicas: int, target: Path):
        self.case, self.replicas, self.target = case, replicas, target
        torch.manual_seed(1)
        with smp.model_creation(dtype=torch.float32):
            module = AutoModelForCausalLM.from_pretrained(case.folder, **case.overrides)
        self.model = smp.DistributedModel(module)
        self.model.train()

        @smp.step
        def train_step(model: Any, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)["loss"]
            model.backward(loss)
            return loss

        self.train_step = train_step

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This replica's rows; on later stages what scripts give there, a placeholder."""
        if smp.pp_rank() > 0:
            return torch.empty(tensor.shape[0] // self.replicas, 0)
        return tensor.chunk(self.replicas)[smp.rdp_rank()]

    def step(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
             labels: torch.Tensor | None = None) -> list[float]:
        """Returns the losses of this replica's microbatches."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        loss = self.train_step(self.model, self.part(input_ids), self.part(mask),
                               self.part(input_ids if labels is None else labels))
        return loss.stack().double().tolist()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.local_named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.local_named_parameters()}

    def write(self, name: str, losses: list[list[float]], tensors: dict[str, torch.Tensor], whole: bool = True) -> None:
        """Digests from all ranks, as replicas must agree to the bit; whole tensors from the first replica, if wanted."""
        torch.save({"losses": losses, "tensors": tensors if whole and smp.rdp_rank() == 0 else {},
                    "squares": squares(tensors), "digests": digests(tensors), "replica": smp.rdp_rank()},
                   self.target / f"{name}_{smp.rank()}.pt")

    def train(self, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> tuple[list[list[float]], dict]:
        losses, first = [], {}
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            losses.append(self.step(batch))
            if number == 0:
                first = self.gradients()
            optimizer.step()
        return losses, first

    def all(self, data: dict[str, Any]) -> None:
        case = self.case
        sgd = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=case.sgd_rate))
        padded = self.step(**data["padded"])
        start = self.weights()
        self.write("start", [], start, whole=False)
        self.write("padded", [padded], self.gradients())
        losses, first = self.train(sgd, data["batches"])
        self.write("first", losses[:1], first)
        self.write("sgd", losses, self.weights())
        with torch.no_grad():
            for name, param in self.model.local_named_parameters():
                param.copy_(start[name])
        adamw = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=case.adamw_rate, fused=True))
        losses, _ = self.train(adamw, data["batches"])
        self.write("adamw", losses, self.weights(), whole=False)


def main() -> None:
    folder, target, stages, replicas = sys.argv[1:]
    smp.init({"pipeline_parallel_degree": int(stages), "microbatches": cases.MICROBATCHES, "ddp": int(replicas) > 1,
              "peer_timeout": 240})
    case, data = cases.read(Path(folder))
    Rank(case, int(replicas), Path(target)).all(data)
    smp.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
