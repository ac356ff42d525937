"""Saving and resuming a training state beside the disk, the memory and other tools: jobs of bench/checkpoint.py.

Our ranks hold their state throughout (bench/live_state.py); the disk's limits are measured beside each of their turns, and the
peers' scripts (bench/peers), which make their state anew each time, are timed in turn with ours. The limits: writing in blocks
of 16 MiB around the page cache; reading, the better of that and two threads that read through the cache, cold.
"""
from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))
import common  # noqa: E402
import limits  # noqa: E402
from live_state import Ranks  # noqa: E402

MIB = 1 << 20


class StateBench:
    """`report(name, ours, beside, bar, note)` takes lists of seconds in pairs."""

    def __init__(self, folder: Path, scale: str, pairs: int, report: Callable[..., None]):
        self.dir, self.scale, self.pairs, self.report = folder, scale, pairs, report
        self.path, self.saved = folder / "saves", 0

    # The machine's limits.

    def _limit(self, work: Callable[..., None], size: int, *options: Any, cold: bool = False) -> float:
        if cold:
            common.drop_caches()
        size = size // limits.BLOCK * limits.BLOCK
        return limits.timed(lambda: work(self.dir / "limit", size, *options))

    def write_limit(self, size: int) -> float:
        seconds = self._limit(limits.write_file, size, os.O_DIRECT, cold=True)
        common.fresh(self.dir / "limit")
        return seconds

    def read_limit(self, size: int) -> float:
        self._limit(limits.write_file, size, os.O_DIRECT)
        direct = self._limit(limits.read_file, size, os.O_DIRECT, cold=True)
        buffered = self._limit(limits.read_file, size, 0, 2, cold=True)
        common.fresh(self.dir / "limit")
        return min(direct, buffered)

    # The peers.

    def peer(self, script: str, op: str, ranks: int = 1, threads: int = 2) -> dict[str, Any]:
        args = SimpleNamespace(dir=str(self.dir), scale=self.scale, timeout=300)
        code, text = common.run_child(args, str(PEERS / script), op, ranks, threads)
        if code:
            raise SystemExit(f"{script}, {op}: {text}")
        return json.loads((self.dir / "results.jsonl").read_text().splitlines()[-1])

    # The jobs.

    def size(self, tag: str) -> int:
        return common.tree_bytes(self.path / f"{tag}_partial")

    def save(self, count: int) -> None:
        """Beside the disk's limit, and beside the peers."""
        peers = {1: {"torch.save": (("peer_torch_save.py", "save"), 3.0), "DCP": (("peer_dcp.py", "1 rank save"), 3.0),
                     "safetensors": (("peer_safetensors.py", "save"), 1.5)},
                 2: {"DCP, 2 threads each": (("peer_dcp.py", "2 ranks save 2 threads", 2, 1), 1.7)}}[count]
        ranks = self._ready(count, "pp")
        self._save(ranks)  # the first one takes memory
        pairs = [(self._save(ranks), self.write_limit(self.saved)) for _ in range(self.pairs)]
        ranks.close()  # a peer needs the memory
        self.report(f"save, {count} rank(s), beside the disk", *map(list, zip(*pairs)), 0.9)
        for name, (call, bar) in peers.items():
            ranks = self._ready(count, "pp")
            pairs = [(self._save(ranks), self._peers_save(*call)) for _ in range(self.pairs)]
            ranks.close()
            self.report(f"save, {count} rank(s), beside {name}", *map(list, zip(*pairs)), bar)

    def _save(self, ranks: Ranks) -> float:
        """Seconds; of what has been written only the size stays, in `saved`."""
        common.drop_caches()
        seconds = ranks.seconds(do="save", path=str(self.path), tag="saved")
        self.saved = self.size("saved")
        common.fresh(self.path)
        return seconds

    def _peers_save(self, *call: Any) -> float:
        seconds = self.peer(*call)["wall"]
        for left in ("state.pt", "state.safetensors", "dcp-1", "dcp-2"):
            common.fresh(self.dir / left)
        return seconds

    def _ready(self, count: int, layout: str) -> Ranks:
        """Ranks that have trained, and hold nothing but their state."""
        ranks = Ranks(self.scale, count, layout, threads=2 // count)
        ranks.ask(do="forget_gradients")
        return ranks

    def resume(self, saved: tuple[int, str], resumed: tuple[int, str], bar: float) -> None:
        """By ranks that have trained, so that memory is there, as the peers' is; and by new ones, which counts their memory."""
        ranks = self._ready(*saved)
        ranks.ask(do="save", path=str(self.path), tag="saved")
        if saved != resumed:
            ranks.close()
            ranks = self._ready(*resumed)
        size, ours, limit = self.size("saved"), [], []
        for _ in range(self.pairs):
            common.drop_caches()
            answers = ranks.ask(do="resume", path=str(self.path), tag="saved")
            ours.append(max(answer["seconds"] for answer in answers))
            limit.append(self.read_limit(size))
        ranks.close()
        title = f"resume {'x'.join(map(str, reversed(saved)))} -> {'x'.join(map(str, reversed(resumed)))}"
        read = sum(answer["read"] for answer in answers) / size
        self.report(title + ", beside the disk", ours, limit, bar, note=f"bytes read over bytes needed {read:.3f} (at most 1.05)")
        ours, limit, extra = [], [], 0
        for _ in range(self.pairs):
            ranks = Ranks(self.scale, *resumed, threads=2 // resumed[0], train=False)
            common.drop_caches()
            answers = ranks.ask(do="resume", path=str(self.path), tag="saved")
            ranks.close()
            ours.append(max(answer["seconds"] for answer in answers))
            limit.append(self.read_limit(size))
            extra = max(extra, *(answer["peak"] - answer["state"] for answer in answers))
        self.report(title + ", into new memory", ours, limit, None,
                    note=f"peak memory over the state {extra / MIB:.0f} MiB (at most 300)")
        common.fresh(self.path)

    def background(self, count: int) -> None:
        """From the second save on: the stop beside a warm copy by two threads, and what the write adds to the steps."""
        ranks = Ranks(self.scale, count, threads=2 // count)
        one = ranks.seconds(do="train", count=2) / 2
        ranks.ask(do="save", path=str(self.path), tag="0", blocking=False)
        ranks.ask(do="wait")
        common.fresh(self.path / "0_partial")
        blocking, stops, copies, added = [], [], [], []
        for _ in range(self.pairs):
            ranks.ask(do="copy", threads=2 // count)
            copies.append(ranks.seconds(do="copy", threads=2 // count))
            ranks.ask(do="forget_copies")
            common.drop_caches()
            blocking.append(ranks.seconds(do="save", path=str(self.path), tag="1"))
            common.fresh(self.path / "1_partial")
            steps = max(3, int(1.5 * blocking[-1] / one) + 2)  # longer than the write
            alone = ranks.seconds(do="train", count=steps)
            stops.append(ranks.seconds(do="save", path=str(self.path), tag="2", blocking=False))
            added.append(ranks.seconds(do="train", count=steps) - alone)
            late = ranks.seconds(do="wait")
            if late > 0.1:
                print(f"the write went on for {late:.2f} s after {steps} steps", file=sys.stderr)
            common.fresh(self.path / "2_partial")
        ranks.close()
        common.fresh(self.path)
        self.report(f"background save, {count} rank(s): the stop, beside a warm copy", stops, copies, 1 / 1.3)
        name = f"background save, {count} rank(s): seconds added to steps"
        self.report(name, added, blocking, 4.0, note=f"of a blocking save {statistics.median(added) / statistics.median(blocking):.2f}"
                                                     " (at most 0.25)")

    def tiny(self, count: int, peer: str, bar: float) -> None:
        """20,000 tensors of 1 KB."""
        ours: dict[str, list[float]] = {"save": [], "resume": []}
        theirs: dict[str, list[float]] = {"save": [], "resume": []}
        for _ in range(self.pairs):
            answers = self._tiny(count)
            for what in ours:
                ours[what].append(answers[what])
                op = f"{peer}{' 2 ranks' if count == 2 else ''} {'save' if what == 'save' else 'load cold'}"
                theirs[what].append(self.peer("peer_tiny_tensors.py", op, count, 2 // count)["wall"])
        for what in ours:
            self.report(f"20,000 tensors, {count} rank(s), {what}, beside {peer}", ours[what], theirs[what], bar)

    def _tiny(self, count: int) -> dict[str, float]:
        ranks = Ranks("tiny", count, "rdp" if count > 1 else "pp", threads=2 // count)
        saved = ranks.seconds(do="save", path=str(self.path), tag="saved")
        common.drop_caches()
        resumed = ranks.seconds(do="resume", path=str(self.path), tag="saved")
        ranks.close()
        common.fresh(self.path)
        return {"save": saved, "resume": resumed}

    def jobs(self) -> dict[str, Callable[[], None]]:
        return {
            "save 1": lambda: self.save(1),
            "save 2": lambda: self.save(2),
            "resume 1": lambda: self.resume((1, "pp"), (1, "pp"), 0.9),
            "resume 2": lambda: self.resume((2, "pp"), (2, "pp"), 0.9),
            "layout pp2 to 1": lambda: self.resume((2, "pp"), (1, "pp"), 0.8),
            "layout 1 to pp2": lambda: self.resume((1, "pp"), (2, "pp"), 0.8),
            "layout pp2 to tp2": lambda: self.resume((2, "pp"), (2, "tp"), 0.8),
            "background 1": lambda: self.background(1),
            "background 2": lambda: self.background(2),
            "tiny safetensors": lambda: self.tiny(1, "safetensors", 1.0),
            "tiny dcp 1": lambda: self.tiny(1, "dcp", 10.0),
            "tiny dcp 2": lambda: self.tiny(2, "dcp", 10.0),
        }
