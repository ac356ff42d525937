"""Runs commands one by one in a folder, each with a time limit, and prints what became of them as JSON. A process of its
own that stays small: a child's peak memory, as the system counts it, begins with its parent's.
python measure.py FOLDER SECONDS < JSON list of commands"""

import json
import os
import resource
import signal
import subprocess
import sys
import time


def measure(command, folder, seconds):
    def limits():
        resource.setrlimit(resource.RLIMIT_CPU, (8 * seconds, 8 * seconds))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # what runs wild dies before the machine does

    with open(os.path.join(folder, ".out"), "w+b") as out, open(os.path.join(folder, ".err"), "w+b") as err:
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=limits)
        previous = signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(20 * seconds)
        _, status, usage = os.wait4(process.pid, 0)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        return {
            "code": process.returncode,
            "out": out.read().decode("utf-8", "replace"),
            "err": err.read().decode("utf-8", "replace"),
            "seconds": time.monotonic() - start,
            "cpu": usage.ru_utime + usage.ru_stime,
            "peak": usage.ru_maxrss * 1024,
        }


if __name__ == "__main__":
    results = [measure(command, sys.argv[1], int(sys.argv[2])) for command in json.load(sys.stdin)]
    json.dump(results, sys.stdout)
