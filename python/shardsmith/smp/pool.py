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
LEAVE_SECONDS = 2.0  # for the other threads after one has failed


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
        self.errors: list[BaseException] = []

    def failed(self, error: BaseException) -> None:
        """Wakes the others at their waiting points; they raise an error of kind peer then."""
        own = not (isinstance(error, Exception) and is_communication_error(error))
        with self.changed:
            first = not self.errors
            self.errors.append(error)
            self.changed.notify_all()
        if own:
            state.fail(error)
        if first or own:
            self.stage.abort(f"{type(error).__name__}: {error}")

    def ended(self) -> None:
        with self.changed:
            self.running -= 1
            self.changed.notify_all()

    def wait(self) -> None:
        with self.changed:
            while self.running and not self.errors:
                self.changed.wait(POLL_SECONDS)  # signals are handled in between

    def give_up(self) -> BaseException:
        """The error that all comes from. Threads that wait for another rank are left behind."""
        with self.changed:
            self.changed.wait_for(lambda: self.running == 0, timeout=LEAVE_SECONDS)
            if self.running:
                _workers.clear()
            own = [e for e in self.errors if not (isinstance(e, Exception) and is_communication_error(e))]
            return (own or self.errors)[0]


def run_microbatches(stage: Stage, count: int, call: Callable[[int], Any]) -> list[Any]:
    """call(microbatch) in every thread, under the caller's grad mode, autocast, device and context."""
    from shardsmith import _engine

    while len(_workers) < count:
        _workers.append(_Worker(len(_workers)))
    step = _Step(stage, count)
    device = state.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def task(microbatch: int, thread_state: Any, context: contextvars.Context) -> None:
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
        arguments = (microbatch, _engine.ThreadState(), contextvars.copy_context())
        _workers[microbatch].tasks.put(lambda arguments=arguments: task(*arguments))
    try:
        step.wait()
    except BaseException as error:  # KeyboardInterrupt, or what a signal handler raised
        step.failed(error)
        step.give_up()
        raise
    if step.errors:
        raise step.give_up()
    return step.results
