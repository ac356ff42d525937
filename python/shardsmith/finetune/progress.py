"""What a run shows: a bar on a terminal, plain lines elsewhere, JSON objects, and metrics.jsonl. Of rank 0."""
from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from shardsmith.errors import Error
from shardsmith.words import human_bytes

METRICS_FILE = "metrics.jsonl"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class Progress:
    """`enabled` on rank 0 only. Notices go to stderr where stdout carries JSON."""

    def __init__(self, output_dir: str, total: int, enabled: bool, as_json: bool, quiet: bool):
        self.total = total
        self.enabled = enabled
        self.as_json = as_json
        self.quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._path = os.path.join(output_dir, METRICS_FILE)
        self._begin = time.monotonic()
        self._done = 0
        if enabled and not as_json and not quiet and sys.stdout.isatty():
            self._make_bar()

    def _make_bar(self) -> None:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        self._bar = Bar(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[told]}"))
        self._task = self._bar.add_task("", total=self.total, told="")
        self._bar.start()

    def notice(self, text: str) -> None:
        if not self.enabled or self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def event(self, values: dict[str, Any]) -> None:
        """Appended to metrics.jsonl, and printed with --json."""
        if not self.enabled:
            return
        line = json.dumps(values)
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise Error("io", f"{self._path}: {error.strerror}") from None
        if self.as_json:
            print(line, flush=True)

    def step(self, values: dict[str, Any], first_step: int, show: bool) -> None:
        self.event(values)
        done = values["step"] - first_step
        left = (time.monotonic() - self._begin) / max(done, 1) * (self.total - values["step"])
        told = (f"loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tokens/s  "
                f"ETA {clock(left)}  peak {human_bytes(values['peak_bytes'])}")
        if self._bar is not None:
            self._bar.update(self._task, completed=values["step"], told=told)
        elif show and not self.as_json:
            self.notice(f"step {values['step']:>{len(str(self.total))}}/{self.total}  {told}")

    def start_clock(self) -> None:
        self._begin = time.monotonic()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
