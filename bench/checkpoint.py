"""The file verbs, and saving and resuming, beside the disk and beside other tools.

In one run, alternating: each of our operations beside a plain copy loop of the same bytes (O_DIRECT, a reading and a
writing thread), `verify` beside a plain cold read, and `convert` of a DCP folder beside torch's dcp_to_torch_save of the
same folder. Then saving, resuming and the like of a training state: checkpoint_state.py. Medians of `--pairs` pairs, with the
spread. Cold means that the page cache was dropped before (root only).

    python bench/checkpoint.py --scale small
    python bench/checkpoint.py --scale full --json results.json     # GPT-2 medium with AdamW: 4.26 GB; 20 GB of disk
    python bench/checkpoint.py --scale full --only save,resume,layout,background,tiny      # 20 GB of memory
"""
from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint_state

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "bench" / "peers"
BLOCK = 8 << 20
PREPARE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, state
scale, folder = sys.argv[2], sys.argv[3]
built = state.build(scale)
part = lambda prefix: {k[len(prefix):]: v for k, v in built.items() if k.startswith(prefix)}
model, m1, m2 = part("model."), part("exp_avg."), part("exp_avg_sq.")
moments = {k: {"exp_avg": m1[k], "exp_avg_sq": m2[k], "step": torch.tensor(20.0)} for k in model}
torch.save({"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-4, "params": list(model)}]}},
           folder + "/state.pt")
torch.save(model, folder + "/model.bin")
"""
PREPARE_DCP = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, state, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
built = state.sharded(sys.argv[2], init_device_mesh("cpu", (2,)))
dcp.save(built, storage_writer=dcp.FileSystemWriter(sys.argv[3] + "/dcp", thread_count=1))
dist.destroy_process_group()
"""
TORCH_MERGE = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""


class Clock:
    """One run of something: seconds, and of a child process its peak memory."""

    def __init__(self, seconds: float, peak: int = 0):
        self.seconds, self.peak = seconds, peak


def drop_caches() -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("the page cache can't be dropped: cold figures are not cold", file=sys.stderr)


def files_below(paths: list[Path]) -> list[Path]:
    return [f for p in paths for f in ([p] if p.is_file() else sorted(x for x in p.rglob("*") if x.is_file()))]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for beside in path.parent.glob(f"*_{path.name}"):
        beside.unlink()


def sync(path: Path) -> None:
    for name in [*files_below([path]), path.parent]:
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def child(words: list[str]) -> Clock:
    """Runs it; its own peak resident set, which the kernel counts per child."""
    begin = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"failed: {' '.join(words)}")
    return Clock(seconds, usage.ru_maxrss * 1024)


def buffers(count: int) -> list[memoryview]:
    made = []
    for _ in range(count):
        block = mmap.mmap(-1, BLOCK)
        block.write(b"\1" * BLOCK)
        made.append(memoryview(block))
    return made


def copy_loop(sources: list[Path], to: Path, limit: int) -> Clock:
    """`limit` bytes of the sources into one file: one thread reads, one writes, both around the page cache."""
    free: queue.Queue = queue.Queue()
    full: queue.Queue = queue.Queue()
    for block in buffers(4):
        free.put(block)
    size = limit // BLOCK * BLOCK

    def read() -> None:
        left = size
        for source in sources:
            descriptor = os.open(source, os.O_RDONLY | os.O_DIRECT)
            length = os.fstat(descriptor).st_size // BLOCK * BLOCK
            for at in range(0, min(length, left), BLOCK):
                block = free.get()
                os.preadv(descriptor, [block], at)
                full.put(block)
            left -= min(length, left)
            os.close(descriptor)
        full.put(None)

    begin = time.perf_counter()
    thread = threading.Thread(target=read)
    thread.start()
    descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    os.posix_fallocate(descriptor, 0, size)
    at = 0
    while (block := full.get()) is not None:
        os.pwritev(descriptor, [block], at)
        at += BLOCK
        free.put(block)
    thread.join()
    os.fsync(descriptor)
    os.close(descriptor)
    # Whole blocks only: what is left out is counted in.
    return Clock((time.perf_counter() - begin) * limit / max(at, 1))


def read_loop(sources: list[Path]) -> Clock:
    """Plain cold reads with two requests under way."""
    blocks, jobs, done = buffers(2), queue.Queue(), []
    total = sum(f.stat().st_size for f in sources)
    for source in sources:
        for at in range(0, source.stat().st_size // BLOCK * BLOCK, BLOCK):
            jobs.put((source, at))

    def read(block: memoryview) -> None:
        opened: dict[Path, int] = {}
        while True:
            try:
                source, at = jobs.get_nowait()
            except queue.Empty:
                break
            if source not in opened:
                opened[source] = os.open(source, os.O_RDONLY | os.O_DIRECT)
            done.append(os.preadv(opened[source], [block], at))
        for descriptor in opened.values():
            os.close(descriptor)

    begin = time.perf_counter()
    threads = [threading.Thread(target=read, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Clock((time.perf_counter() - begin) * total / max(sum(done), 1))


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.dir = args, Path(args.dir)
        self.program = args.program
        self.results: dict[str, dict] = {}

    def shardsmith(self, *words: object) -> Clock:
        return child([self.program, *map(str, words), "-q"])

    def prepare(self) -> None:
        if (self.dir / "ready").exists() and (self.dir / "ready").read_text() == self.args.scale:
            return
        for name in list(self.dir.iterdir()):
            remove(name)
        subprocess.run([sys.executable, "-c", PREPARE, PEERS, self.args.scale, self.dir], check=True)
        self.shardsmith("convert", self.dir / "state.pt", self.dir / "one", "--to", "partial", "--family", "gpt2")
        self.shardsmith("reshard", self.dir / "one", self.dir / "four", "--pipeline-parallel-degree", 2,
                        "--tensor-parallel-degree", 2)
        remove(self.dir / "state.pt")
        remove(self.dir / "one")
        script = self.dir / "prepare_dcp.py"
        script.write_text(PREPARE_DCP)
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                        script, PEERS, self.args.scale, self.dir], check=True, stderr=subprocess.DEVNULL)
        (self.dir / "ready").write_text(self.args.scale)

    def pairs(self, name: str, ours: Callable[[], Clock], theirs: Callable[[], Clock], bar: float) -> None:
        """`ours` and `theirs` in turn; the ratio is theirs / ours: how fast ours is beside it."""
        mine, other, peak = [], [], 0
        for _ in range(self.args.pairs):
            for run, seconds in ((ours, mine), (theirs, other)):
                drop_caches()
                clock = run()
                seconds.append(clock.seconds)
                if run is ours:
                    peak = max(peak, clock.peak)
        self.report(name, mine, other, bar, f"peak {peak / (1 << 20):.0f} MiB")
        self.results[name]["peak_rss"] = peak

    def report(self, name: str, mine: list[float], other: list[float], bar: float | None, note: str = "") -> None:
        """Of seconds in pairs. No bar: the figure is told for what the note says."""
        ratios = [b / a for a, b in zip(mine, other)]
        ratio = statistics.median(ratios)
        self.results[name] = {
            "ours": statistics.median(mine), "beside": statistics.median(other), "ratio": ratio,
            "spread": [min(ratios), max(ratios)], "bar": bar, "note": note,
        }
        told = "" if bar is None else f"; bar {bar:.3g}"
        print(f"{name:<58} {statistics.median(mine):7.2f} s  beside {statistics.median(other):7.2f} s  ratio {ratio:5.2f}"
              f"  ({min(ratios):.2f} to {max(ratios):.2f}{told})  {note}", flush=True)

    def copies(self, name: str, words: list[object], sources: list[Path], out: Path) -> None:
        """A verb beside a copy loop of as many bytes as it writes."""
        size = 0

        def ours() -> Clock:
            nonlocal size
            remove(out)
            clock = self.shardsmith(*words)
            size = sum(f.stat().st_size for f in files_below([out]))
            remove(out)
            return clock

        def theirs() -> Clock:
            clock = copy_loop(sources, self.dir / "copy", size)
            remove(self.dir / "copy")
            return clock

        self.pairs(name, ours, theirs, 0.85)
        told = json.loads(subprocess.run([self.program, *map(str, words), "--json"], check=True, capture_output=True).stdout)
        self.results[name]["read_over_needed"] = told["bytes_read"] / told["bytes"]
        print(f"{'':<42} bytes read over bytes needed: {told['bytes_read'] / told['bytes']:.3f} (bar: at most 1.05)")
        remove(out)

    def run(self) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        wanted = tuple(word for word in self.args.only.split(",") if word) or ("",)
        if any(name.startswith(wanted) for name in self.verbs()):
            self.prepare()
        state = checkpoint_state.StateBench(self.dir, self.args.scale, self.args.pairs, self.report)
        for name, job in (self.verbs() | state.jobs()).items():
            if name.startswith(wanted):
                job()

    def verbs(self) -> dict[str, Callable[[], None]]:
        """The jobs over what has been prepared."""
        four, out = self.dir / "four", self.dir / "out"
        models, everything = sorted(four.glob("model_*.pt")), sorted(four.glob("*.pt"))
        return {
            "merge pt": lambda: self.copies("merge 2 x 2 to pt", ["merge", four, out], models, out),
            "merge safetensors": lambda: self.copies(
                "merge 2 x 2 to safetensors", ["merge", four, out, "--to", "safetensors"], models, out),
            "convert bin": lambda: self.copies(
                "convert .bin to safetensors", ["convert", self.dir / "model.bin", out, "--to", "safetensors"],
                [self.dir / "model.bin"], out),
            "reshard": lambda: self.copies(
                "reshard 4 -> 2", ["reshard", four, out, "--tensor-parallel-degree", 1], everything, out),
            "verify": lambda: self.pairs("verify beside a cold read", lambda: self.shardsmith("verify", four),
                                         lambda: read_loop(everything), 0.9),
            "dcp": lambda: self.pairs("convert dcp to pt beside dcp_to_torch_save", self.from_dcp, self.torch_merge, 2.5),
        }

    def from_dcp(self) -> Clock:
        out = self.dir / "out.pt"
        remove(out)
        clock = self.shardsmith("convert", self.dir / "dcp", out, "--to", "pt")
        remove(out)
        return clock

    def torch_merge(self) -> Clock:
        out = self.dir / "out.pt"
        begin = time.perf_counter()
        child([sys.executable, "-c", TORCH_MERGE, str(self.dir / "dcp"), str(out)])
        sync(out)
        seconds = time.perf_counter() - begin
        # Its start-up is no merge: importing torch and the checkpoint package takes it about this long.
        start = child([sys.executable, "-c", "import torch.distributed.checkpoint.format_utils"]).seconds
        remove(out)
        return Clock(seconds - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=["small", "full"], default="small")
    parser.add_argument("--dir", default=str(ROOT / "out" / "bench"), help="on the disk to be measured")
    parser.add_argument("--program", default=str(ROOT / ".venv" / "bin" / "shardsmith"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="", help="comma-separated beginnings: merge, convert, reshard, verify, dcp, save, "
                                                      "resume, layout, background, tiny")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--keep", action="store_true", help="keep what was prepared, for the next run")
    args = parser.parse_args()
    bench = Bench(args)
    bench.run()
    if args.json:
        Path(args.json).write_text(json.dumps(bench.results, indent=2) + "\n")
    if not args.keep:
        shutil.rmtree(args.dir)


if __name__ == "__main__":
    main()
