"""Local ranks: started, watched, signalled, ended together.

Ranks stay in the launcher's process group, so that a SIGKILL to the group ends all, and ask the kernel to be killed
when the launcher dies (launcher/orphan.py). SIGINT and SIGTERM are passed on: the ranks save and end by themselves.
"""
from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardsmith import heap
from shardsmith.errors import EXIT_CODES
from shardsmith.launcher import failure
from shardsmith.launcher.orphan import LAUNCHER_PID

POLL_SECONDS = 0.05
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Outcome:
    exit_code: int
    error: str = ""  # the first failing rank's, one line


@dataclass
class Launcher:
    """run() is for the main thread: it takes over SIGINT and SIGTERM while the ranks live."""

    command: list[str]
    ranks: int
    threads: int
    stop_grace: float = 600.0  # after SIGINT or SIGTERM
    failure_grace: float = 20.0  # for the others after one rank has failed
    environment: dict[str, str] = field(default_factory=dict)
    on_start: Callable[[list[int]], None] | None = None  # process ids by rank; for tests

    def run(self) -> Outcome:
        self._stopping: signal.Signals | None = None
        self._deadline: float | None = None
        self._killed: set[int] = set()  # ranks that we killed ourselves
        self._failures = tempfile.mkdtemp(prefix="shardsmith-")
        self._children: list[subprocess.Popen[bytes]] = []
        before = {number: signal.signal(number, self._on_signal) for number in STOPPED}
        try:
            self._start()
            return self._watch()
        finally:
            self._end(self._children)
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(self._failures, ignore_errors=True)

    def _start(self) -> None:
        common = {
            **os.environ, **heap.environment({**os.environ, **self.environment}, self.threads), **self.environment,
            "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": str(self.threads),
            LAUNCHER_PID: str(os.getpid()), failure.FOLDER: self._failures,
        }
        for rank in range(self.ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._children.append(subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL))
        if self.on_start:
            self.on_start([child.pid for child in self._children])

    def _on_signal(self, number: int, frame: object) -> None:
        if self._stopping is None:
            self._stopping = signal.Signals(number)
            self._deadline = time.monotonic() + self.stop_grace
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _watch(self) -> Outcome:
        first: int | None = None  # the rank that was seen to fail first
        while True:
            running = [child for child in self._children if child.poll() is None]
            failed = [rank for rank, child in enumerate(self._children) if child.returncode not in (None, 0)]
            if first is None and failed and not self._stopped_well(failed):
                first = failed[0]
                grace = time.monotonic() + self.failure_grace
                self._deadline = grace if self._deadline is None else min(grace, self._deadline)
            if not running:
                break
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end(running)
                if first is None:
                    return Outcome(STOPPED[self._stopping], f"the ranks did not end within {self.stop_grace:g} s of "
                                                            f"{self._stopping.name} and were killed")
                break
            time.sleep(POLL_SECONDS)
        if first is None:
            return Outcome(max(child.returncode for child in self._children))
        return self._failed(first)

    def _stopped_well(self, failed: list[int]) -> bool:
        """Ranks that saved and ended because of a signal."""
        return all(self._children[rank].returncode in STOPPED.values() for rank in failed)

    def _failed(self, first: int) -> Outcome:
        failures = failure.read(self._failures)
        own = [f for f in failures if not f.consequence]
        by_rank = {f.rank for f in failures}
        # A rank that was killed from outside says nothing; one that we killed ourselves is not at fault.
        silent = [rank for rank, child in enumerate(self._children)
                  if child.returncode < 0 and rank not in by_rank and rank not in self._killed]
        code = self._children[first].returncode
        if own:
            return Outcome(EXIT_CODES.get(own[0].kind, 1), f"rank {own[0].rank}: {own[0].text}")
        if silent:
            name = signal.Signals(-self._children[silent[0]].returncode).name
            return Outcome(1, f"rank {silent[0]} was killed by {name}")
        if failures:
            return Outcome(EXIT_CODES.get(failures[0].kind, 1), f"rank {failures[0].rank}: {failures[0].text}")
        if code < 0:
            return Outcome(1, f"rank {first} was killed by {signal.Signals(-code).name}")
        return Outcome(code, f"rank {first} ended with exit code {code}")

    def _end(self, children: list[subprocess.Popen[bytes]]) -> None:
        for child in children:
            if child.poll() is None:
                self._killed.add(self._children.index(child))
                child.kill()  # works on a stopped process too
        for child in children:
            child.wait()


def free_port() -> int:
    """One that was free a moment ago: another program may take it, and then the ranks say so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def worker_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
