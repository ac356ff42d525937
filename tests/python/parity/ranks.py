"""Starts ranks as processes over torch.distributed, with a deadline, and says what the failing ones said."""
from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
from shardsmith.launcher.local import free_port

ROOT = Path(__file__).resolve().parents[3]
AFTER_A_FAILURE = 20.0  # seconds for the other ranks to end by themselves


def environment(threads: int = 1) -> dict[str, str]:
    """For a child that imports this package and the tests' modules."""
    paths = [str(ROOT / "python"), str(ROOT / "tests" / "python"), os.environ.get("PYTHONPATH", "")]
    # Threads that wait busily starve the ranks beside them. Freed memory is kept: on virtual machines fresh pages are slow.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
            "MALLOC_TOP_PAD_": str(64 << 20), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Ranks:
    """`command` once per rank; output goes to files in `folder`. Use as a context manager: leaving kills what is left."""

    def __init__(self, command: list[str], count: int, folder: Path, threads: int = 1):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        common = {**environment(threads), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.children = [self.start(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self.log(rank))
                         for rank in range(count)]

    def start(self, command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen | preloaded.Process:
        with open(log, "wb") as file:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                    start_new_session=True)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def text(self, rank: int) -> str:
        return self.log(rank).read_text(errors="replace")

    def wait(self, timeout: float) -> list[int | None]:
        """Exit codes by rank, None for those that had not ended in time (and are killed)."""
        deadline = time.monotonic() + timeout
        failed = False
        while any(child.poll() is None for child in self.children) and time.monotonic() < deadline:
            if not failed and any(child.returncode for child in self.children):
                failed = True
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
            time.sleep(0.05)
        codes = [child.poll() for child in self.children]
        self.kill()
        return codes

    def succeed(self, timeout: float) -> None:
        codes = self.wait(timeout)
        if any(code != 0 for code in codes):
            tails = "\n".join(f"--- rank {rank}, exit code {code}:\n{self.text(rank)[-3000:]}"
                              for rank, code in enumerate(codes) if code != 0)
            raise AssertionError(f"exit codes {codes} after at most {timeout:g} s (None: killed)\n{tails}")

    def kill(self) -> None:
        for child in self.children:
            if child.poll() is None:
                self.kill_one(child)
            child.wait()

    def kill_one(self, child: subprocess.Popen | preloaded.Process) -> None:
        os.killpg(child.pid, signal.SIGKILL)  # works on a stopped process too

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


class Preloaded(Ranks):
    """The function `main` of a module of the tests, in processes that have imported torch and transformers already."""

    def __init__(self, module: str, arguments: list[object], count: int, folder: Path, threads: int = 1):
        super().__init__([module, *map(str, arguments)], count, folder, threads)

    def start(self, command: list[str], env: dict[str, str], log: Path) -> preloaded.Process:
        module, *arguments = command
        return preloaded.Process(_PROGRAM.format(log=str(log), paths=env["PYTHONPATH"].split(os.pathsep), module=module,
                                                 threads=env["OMP_NUM_THREADS"]), arguments, env | {"OMP_NUM_THREADS": "1"})

    def kill_one(self, child: preloaded.Process) -> None:
        child.kill()


# What environment() says to libraries when they are loaded has to be said to those that are.
_PROGRAM = """
import os, sys
_log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
os.dup2(_log, 1)
os.dup2(_log, 2)
sys.path[:0] = {paths!r}
from parity import ranks
ranks.keep_freed_memory()
import torch
torch.set_num_threads({threads})
from {module} import main
main()
"""


def keep_freed_memory() -> None:
    """As environment() does for a program that is started."""
    libc = ctypes.CDLL(None)
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        libc.mallopt(option, value)
