"""The launcher of local ranks, with small programs as ranks."""
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from smp_helpers import environment

PROGRAM = """
import sys
from shardsmith.launcher.local import Launcher
import os
worker = [sys.executable, "-c", {body!r}]
def started(pids):
    print("pids", *pids, flush=True)
outcome = Launcher(worker, {ranks}, 1, stop_grace={stop_grace}, failure_grace={failure_grace}, on_start=started).run()
print("outcome", outcome.exit_code, outcome.error, flush=True)
"""
HEAD = """
import os, sys, time, signal
from shardsmith.errors import Error
from shardsmith.launcher import failure
from shardsmith.launcher.orphan import die_with_launcher
die_with_launcher()
rank = int(os.environ["RANK"])
def fail(kind, text):
    failure.report(rank, Error(kind, text)); os._exit(Error(kind, text).exit_code)
"""


def start(body, ranks=2, stop_grace=20.0, failure_grace=2.0):
    program = PROGRAM.format(body=HEAD + textwrap.dedent(body), ranks=ranks, stop_grace=stop_grace,
                             failure_grace=failure_grace)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True,
                               env=environment())
    pids = [int(word) for word in process.stdout.readline().split()[1:]]
    return process, pids


def outcome(process):
    out = process.communicate(timeout=60)[0]
    line = next(line for line in out.splitlines() if line.startswith("outcome"))
    _, code, *text = line.split(" ", 2)
    return int(code), text[0] if text else ""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_ranks_know_who_they_are():
    body = """
    assert os.environ["WORLD_SIZE"] == "3" and os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"]) > 0
    assert os.environ["OMP_NUM_THREADS"] == "1"
    """
    assert outcome(start(body, ranks=3)[0]) == (0, "")


def test_the_failing_rank_is_named_and_not_those_that_suffer_from_it():
    body = """
    if rank == 0:
        fail("peer", "rank 1 has gone")
    time.sleep(0.5)
    fail("invalid_argument", "no such thing")
    """
    assert outcome(start(body)[0]) == (2, "rank 1: no such thing")


def test_a_rank_that_is_killed_is_named_with_its_signal_and_the_others_end():
    process, pids = start("time.sleep(60)", failure_grace=1.0)
    os.kill(pids[1], signal.SIGKILL)
    assert outcome(process) == (1, "rank 1 was killed by SIGKILL")
    assert not alive(pids[0])


def test_a_stopped_rank_is_ended_after_the_grace():
    process, pids = start("time.sleep(60) if rank else fail('timeout', 'rank 1 does not answer')", failure_grace=0.5)
    os.kill(pids[1], signal.SIGSTOP)
    assert outcome(process) == (1, "rank 0: rank 1 does not answer")
    assert not alive(pids[1])


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on_and_exit_codes_come_back(number, code):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143)); signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    os.write(1, b'ready' + bytes([10]))
    time.sleep(60)
    """
    process, _ = start(body)
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    assert outcome(process) == (code, "")


def test_ranks_that_do_not_end_after_a_signal_are_killed():
    process, pids = start("signal.signal(signal.SIGTERM, lambda *_: None)\nos.write(1, b'ready' + bytes([10]))\n"
                          "while True: time.sleep(1)", stop_grace=0.5)
    for _ in range(2):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGTERM)
    code, text = outcome(process)
    assert code == 143 and "SIGTERM" in text and not any(alive(pid) for pid in pids)


def test_ranks_die_with_the_launcher():
    process, pids = start("os.write(1, b'ready' + bytes([10]))\ntime.sleep(60)")
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
