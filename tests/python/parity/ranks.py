"""Starts ranks as processes over torch.distributed, with a deadline, and says what the failing ones said."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
AFTER_A_FAILURE = 20.0  # seconds for the other ranks to end by themselves


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        self.children = []
        for rank in range(count):
            with open(self.log(rank), "wb") as log:
                self.children.append(subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                                      stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                      start_new_session=True))

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
                os.killpg(child.pid, signal.SIGKILL)  # works on a stopped process too
            child.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def python(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]
