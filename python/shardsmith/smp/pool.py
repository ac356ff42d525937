"""One thread a microbatch, kept from step to step."""
from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardsmith.smp.session import is_communication_error, state

if TYPE_CHECKING:
    from shardsmith._engine import Stage

POLL_SECONDS = 0.2  # how late the main thread may notice a signal


class _Worker:
    def __init__(self, number: int):
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=f"microbatch-{number}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self.tasks.get()()


_workers: list[_Worker] = []


class _Step:
    """What the threads of one step share."""

    def __init__(self, stage: Stage, count: int):
        self.stage = stage
        self.results: list[Any] = [None] * count
        self.changed = threading.Condition()
        self.running = count
        self.first: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        """The first failure wakes all others at their waiting points; what they raise then is not looked at."""
        with self.changed:
            if self.first is not None:
                return
            self.first = error
        if not (isinstance(error, Exception) and is_communication_error(error)):
            state.fail(error)
        self.stage.abort(f"{type(error).__name__}: {error}")

    def ended(self) -> None:
        with self.changed:
            self.running -= 1
            self.changed.notify_all()


def run_microbatches(stage: Stage, count: int, call: Callable[[int], Any]) -> list[Any]:
    """call(microbatch) in every thread, under the caller's grad mode, autocast, device and context."""
    from shardsmith import _engine

    while len(_workers) < count:
        _workers.append(_Worker(len(_workers)))
    thread_state = _engine.ThreadState()
    step = _Step(stage, count)
    device = state.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def task(microbatch: int, context: contextvars.Context) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(thread_state)
                if stream is not None:
                    stack.enter_context(torch.cuda.device(device))
                    stack.enter_context(torch.cuda.stream(stream))
                step.results[microbatch] = context.run(call, microbatch)
            stage.finish_microbatch(microbatch)
        except BaseException as error:
            step.failed(error)
        finally:
            step.ended()

    for microbatch in range(count):
        _workers[microbatch].tasks.put(lambda mb=microbatch, context=contextvars.copy_context(): task(mb, context))
    try:
        with step.changed:
            while step.running:
                step.changed.wait(POLL_SECONDS)  # signals are handled in between
    except BaseException as error:  # KeyboardInterrupt, or what a signal handler raised
        step.failed(error)
        with step.changed:
            step.changed.wait_for(lambda: step.running == 0, timeout=5)
        raise
    if step.first is not None:
        raise step.first
    return step.results
