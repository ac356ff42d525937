"""Ranks that hold a training state and save, resume and train on command, for bench/checkpoint_state.py.

The state is GPT-2 medium's with AdamW's moments in float32 (354.8M parameters, 4.26 GB), or a tenth of it; it stands in
pipeline stages, or in tensor-parallel slices. A rank reads one command a line from its standard input, as JSON, and answers
with one line of it.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench" / "peers"), str(ROOT / "python")]
from common import proc_io, proc_status  # noqa: E402

# Width, layers; as bench/peers/state.py has them. The tiny one: 20,004 tensors of 1 KB in the mean as checkpoints have them, weights alone.
SIZES = {"full": (1024, 24), "small": (384, 9), "tiny": (18, 1250)}
KEYS = {"pp": {"pipeline_parallel_degree": 2, "microbatches": 2}, "tp": {"tensor_parallel_degree": 2}, "rdp": {}}


class Ranks:
    """`count` processes, each with `threads` threads for torch. layout: what two ranks share, "pp", "tp" or "rdp"."""

    def __init__(self, scale: str, count: int = 1, layout: str = "pp", threads: int = 2, **command: Any):
        from shardsmith import heap
        from shardsmith.launcher.local import free_port

        port = free_port()
        self.processes = [subprocess.Popen(
            [sys.executable, __file__, json.dumps({"scale": scale, "layout": layout})], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | heap.environment(os.environ, threads) | {
                "PYTHONPATH": str(ROOT / "python"), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads)}) for rank in range(count)]
        self.ready = self.ask(**({"do": "build"} | command))

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Of each rank its answer."""
        for process in self.processes:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise SystemExit(f"a rank has ended at {command}")
        return [json.loads(line) for line in lines]

    def seconds(self, **command: Any) -> float:
        """Of the slowest."""
        return max(answer["seconds"] for answer in self.ask(**command))

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


class Rank:
    def __init__(self, scale: str, layout: str):
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        from shardsmith import smp

        self.torch, self.smp = torch, smp
        world = int(os.environ["WORLD_SIZE"])
        smp.init((KEYS[layout] if world == 2 else {}) | {"ddp": True, "delayed_parameter_initialization": True})
        width, layers = SIZES[scale]
        self.tiny = scale == "tiny"
        more = {"vocab_size": 64, "n_positions": 64, "n_head": 1} if self.tiny else {"n_head": width // 64}
        self.config = GPT2Config(n_embd=width, n_layer=layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more)
        self.before, self.make = proc_status("VmRSS"), GPT2LMHeadModel

    def build(self, train: bool = True) -> dict[str, Any]:
        """The model and, by one step of training, the optimizer's state."""
        torch, smp = self.torch, self.smp
        with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
            model = self.make(self.config)
        self.model = smp.DistributedModel(model)
        if self.tiny:
            self.model.partition()
            return {}
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-5))
        self.ids = torch.randint(0, 1000, (smp.num_microbatches(), 64), generator=torch.Generator().manual_seed(0))

        @smp.step
        def step(model: Any, ids: Any) -> Any:
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        self.step = step
        if train:
            self.train(1)
        return {}

    def train(self, count: int) -> dict[str, Any]:
        begin = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.step(self.model, self.ids)
            self.optimizer.step()
        return {"seconds": time.perf_counter() - begin}

    def forget_gradients(self) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        return {}

    def tensors(self) -> list[Any]:
        """The live state: weights and moments."""
        state = {} if self.tiny else self.optimizer.optimizer.state
        weights = [p.detach() for _, p in self.model.local_named_parameters()]
        return weights + [t for entry in state.values() for t in entry.values() if t.dim()]

    def save(self, path: str, tag: str, blocking: bool = True) -> dict[str, Any]:
        """Where it doesn't block: how long it stopped training."""
        self.smp.barrier()
        begin = time.perf_counter()
        self.smp.save_checkpoint(path, tag, model=self.model, optimizer=None if self.tiny else self.optimizer,
                                 blocking=blocking)
        return {"seconds": time.perf_counter() - begin}

    def wait(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.smp.wait_for_checkpoint()
        return {"seconds": time.perf_counter() - begin}

    def resume(self, path: str, tag: str) -> dict[str, Any]:
        """Into this state; or, in ranks that have not trained, into memory that nobody has touched."""
        self.smp.barrier()
        read, begin = proc_io()["read_bytes"], time.perf_counter()
        self.smp.resume_from_checkpoint(path, tag)
        self.model.partition()  # with which the weights come; the first step would make it
        return {"seconds": time.perf_counter() - begin, "read": proc_io()["read_bytes"] - read,
                "peak": proc_status("VmHWM") - self.before, "state": sum(t.numel() * t.element_size() for t in self.tensors())}

    def copy(self, threads: int = 2) -> dict[str, Any]:
        """A warm copy of the state, by so many threads."""
        tensors = [t.numpy().reshape(-1) for t in self.tensors()]
        if not hasattr(self, "copies"):
            self.copies = [t.copy() for t in tensors]
        from numpy import copyto

        pairs = sorted(zip(self.copies, tensors), key=lambda pair: -pair[1].size)
        shares: list[list[Any]] = [[] for _ in range(threads)]
        for pair in pairs:
            min(shares, key=lambda share: sum(p[1].size for p in share)).append(pair)

        def work(share: list[Any]) -> None:
            for target, source in share:
                copyto(target, source)

        workers = [threading.Thread(target=work, args=(share,)) for share in shares]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return {"seconds": time.perf_counter() - begin}

    def forget_copies(self) -> dict[str, Any]:
        del self.copies
        return {}


def main() -> None:
    rank = Rank(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(rank, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
