"""One rank: trains or resumes in one layout after the other, in a session of its own each, and writes what it saw.

    python -m round_trips.rank JOB_FILE

The job: {"folder", "models", "family", "precision", "items": [{"name", "layout", "source"}, ...]}. Without a source it trains
BEFORE steps, saves and goes on; with one it resumes that item's checkpoint, saves what it then has, and goes on.
"""
from __future__ import annotations

import datetime
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardsmith.smp as smp
from parity.layouts import Layout
from round_trips.state import digests
from shardsmith.finetune.data import Order
from shardsmith.smp import background

BEFORE, AFTER = 3, 10  # steps
ROWS, LENGTH, SAMPLES = 8, 16, 40  # of a global batch, of a row, in the data: the second epoch begins in the AFTER steps
OVERFLOWS = (1, 5)  # steps with a gradient that is infinite: the second lowers the scale if the first is remembered
SCALER = dict(init_scale=256.0, scale_window=4, delayed_shift=2)
DROPOUT = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "llama": ("attention_dropout",)}


class Session:
    """A model with its optimizer, schedule and place in the data, in a session of smp that begins anew."""

    def __init__(self, job: dict[str, Any], layout: Layout, seed: int):
        self.job, self.layout = job, layout
        smp.init({**layout.config(ROWS), "peer_timeout": 100})
        torch.manual_seed(seed)
        dropout = dict.fromkeys(DROPOUT[job["family"]], 0.1)
        with smp.model_creation(tensor_parallelism=layout.tp > 1, dtype=torch.float32):
            module = AutoModelForCausalLM.from_pretrained(os.path.join(job["models"], job["family"]), **dropout)
        self.model = smp.DistributedModel(module, bucket_cap_mb=0.02)
        self.model.train()
        parameters = list(module.parameters())
        groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=3e-3), dynamic_loss_scale=True,
                                                  dynamic_loss_args=SCALER)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.8)
        self.order, self.consumed, self.steps = Order(SAMPLES, seed=3), 0, 0

        @smp.step
        def train_step(model: Any, ids: Any) -> Any:
            loss = model(input_ids=ids, labels=ids)["loss"]
            model.backward(loss)
            return loss

        self.train_step = train_step

    def save(self, folder: str, tag: str = "t", **how: Any) -> None:
        content = {"consumed": self.consumed, "steps": self.steps, "schedule": self.schedule.state_dict()}
        smp.save_checkpoint(folder, tag, model=self.model, optimizer=self.optimizer, user_content=content, **how)

    def digests(self, folder: str) -> dict[str, int]:
        return digests(self.model, self.optimizer, f"{folder}.{smp.rank()}.parts")

    def resume(self, folder: str, load_optimizer: bool = True, tag: str | None = None) -> None:
        content = smp.resume_from_checkpoint(folder, tag=tag, load_optimizer=load_optimizer)
        self.consumed, self.steps = content["consumed"], content["steps"]
        self.schedule.load_state_dict(content["schedule"])

    def rows(self, numbers: list[int]) -> torch.Tensor:
        return torch.stack([torch.randint(1, 100, (LENGTH,), generator=torch.Generator().manual_seed(1000 + number))
                            for number in numbers])

    def step(self) -> dict[str, Any]:
        feeders = self.layout.feeders
        each = ROWS // feeders
        begin = self.consumed + (smp.rdp_rank() if self.layout.prescaled else smp.dp_rank()) * each
        samples = self.order.take(begin, each)
        self.consumed += ROWS
        self.optimizer.zero_grad()
        batch = self.rows(samples) if smp.pp_rank() == 0 else torch.empty(each, 0)
        loss = self.train_step(self.model, batch).reduce_mean()
        if self.layout.precision == "fp16" and self.steps in OVERFLOWS and smp.rank() == 0:
            for parameter in self.model.local_parameters():  # whichever of its rows this rank updates
                parameter.grad.fill_(float("inf"))
        norm = self.optimizer.clip_master_grads(0.5)
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.schedule.step()
        self.steps += 1
        is_feeder = smp.pp_rank() == 0 and (smp.tp_rank() == 0 or not self.layout.prescaled)
        seen = smp.allgather([float(loss), samples if is_feeder else []], smp.WORLD)
        losses = [entry[0] for entry in seen]
        return {"loss": sum(losses) / len(losses), "norm": norm, "lr": self.optimizer.param_groups[0]["lr"],
                "scaler": list(self.optimizer.loss_scaler.state()),
                "samples": sorted(number for _, numbers in seen for number in numbers)}


class Slow:
    """Keeps what is written in the background from going on, until it is let go."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self._exchange = background.Saving._exchange
        background.Saving._exchange = lambda *args: (self.may_go_on.wait(60), self._exchange(*args))[1]

    def let_go(self, seconds: float = 0) -> None:
        threading.Timer(seconds, self.may_go_on.set).start()


def save_while_training(session: Session, folder: str) -> dict[str, Any]:
    """Two saves in the background, the second begun while the first one runs, and others that are left out meanwhile. By
    tag what was there at the call, and the steps after it; `running` says whether it still was after them."""
    saved: dict[str, Any] = {}

    def save(tag: str, **how: Any) -> None:
        saved[tag] = {"state": session.digests(folder), "after": []}
        session.save(folder, tag, **how)

    def train(count: int) -> None:
        for _ in range(count):
            step = session.step()
            for entry in saved.values():
                entry["after"].append(step)

    slow = Slow()
    train(BEFORE)
    save("a", blocking=False)
    train(2)
    saved["a"]["running"] = smp.state.saving._is_busy()
    for tag, blocking in (("skipped", False), ("skipped too", True)):
        session.save(folder, tag, blocking=blocking, if_busy="skip")
    slow.let_go(0.5)
    save("b", blocking=False, if_busy="wait")
    saved["a"]["running after b"] = not os.path.exists(os.path.join(folder, "a_partial", "manifest.json"))
    slow.may_go_on.clear()
    train(2)
    saved["b"]["running"] = smp.state.saving._is_busy()
    slow.let_go(0.5)
    save("c", if_busy="wait")  # at once, after b is there
    saved["c"]["names"] = sorted(os.listdir(folder))
    train(AFTER)
    background.Saving._exchange = slow._exchange
    return saved


def run(job: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    layout = Layout(**item["layout"])
    session = Session(job, layout, seed=5 if item["source"] is None else 1234)
    folder = os.path.join(job["folder"], item["name"])
    result: dict[str, Any] = {}
    if "background" in item:
        return {"saved": save_while_training(session, folder)}
    if item["source"] is None:
        result["before"] = [session.step() for _ in range(BEFORE)]
    else:
        session.resume(os.path.join(job["folder"], item["source"]), item.get("load_optimizer", True), item.get("tag"))
        session.model.partition()
    result["state"] = session.digests(folder)
    session.save(folder)
    result["after"] = [session.step() for _ in range(AFTER)]
    return result


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=100)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timeout)
    results = {}
    for item in job["items"]:
        begin = time.monotonic()
        # Groups of a session before are gone, with their sockets and threads.
        if dist.is_initialized():
            dist.destroy_process_group()
        smp.state.reset()
        gc.collect()
        dist.init_process_group("gloo", store=dist.PrefixStore(item["name"], store), rank=rank, world_size=size, timeout=timeout)
        results[item["name"]] = run(job, item)
        smp.barrier()
        results[item["name"]]["seconds"] = time.monotonic() - begin
    if rank == 0:
        Path(sys.argv[1]).with_suffix(".results").write_text(json.dumps(results))
    smp.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
