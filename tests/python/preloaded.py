"""Python processes that begin with torch and transformers imported: forked from one that has done so, once.

An import of both costs seconds of processor time, and the tests start hundreds of ranks. A forked process runs its
program as `__main__` of a process of its own, with its own environment, and ends as any other does.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

_IMPORTS = """
import torch, transformers
import smdistributed.modelparallel.torch
import shardsmith._engine
from transformers import AutoModelForCausalLM, BertForMaskedLM, GPT2LMHeadModel, GPTNeoXForCausalLM, LlamaForCausalLM
"""


class Process:
    """What subprocess.Popen gives with stdout=PIPE, stderr=STDOUT, text=True."""

    def __init__(self, program: str, arguments: list[str], env: dict[str, str]):
        self.returncode = None
        read, write = os.pipe()
        self.stdout = os.fdopen(read, "r", errors="replace")
        told, tell = os.pipe()
        self._told = os.fdopen(told, "r")
        request = json.dumps({"program": program, "arguments": arguments, "env": env, "folder": os.getcwd()}).encode()
        server = _server(env)
        socket.send_fds(server, [len(request).to_bytes(8, "little")], [write, tell])
        server.sendall(request)
        os.close(write)
        os.close(tell)
        self.pid = int(self._told.readline())

    def poll(self, timeout=0):
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            self.returncode = int(self._told.readline() or "-9")
        return self.returncode

    def wait(self, timeout=None):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("a preloaded process", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        parts = []
        while True:
            left = None if end is None else max(0, end - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a preloaded process", timeout)
            part = os.read(self.stdout.fileno(), 1 << 16)
            if not part:
                break
            parts.append(part)
        self.wait(None if end is None else max(0, end - time.monotonic()))
        return b"".join(parts).decode(errors="replace"), None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


_servers = {}  # by what counts from the start: the threads that torch was told to use, and what is preloaded


def _server(env):
    kind = env.get("OMP_NUM_THREADS", ""), env.get("LD_PRELOAD", "")
    if kind not in _servers:
        ours, theirs = socket.socketpair()
        # Threads that wait busily starve the ranks beside them.
        process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], env=env | {"OMP_WAIT_POLICY": "PASSIVE"},
                                   pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        _servers[kind] = ours, process
    return _servers[kind][0]


def _receive(control, size):
    data = b""
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


def serve(control: socket.socket):
    """Forks for each request; returns the request in the forked process, None in the server when nobody asks any more."""
    exec(_IMPORTS, {})
    told_of = {}
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    while True:
        ready = select.select([control, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 12)
            while told_of:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with os.fdopen(told_of.pop(pid), "w") as told:
                    try:
                        told.write(f"{os.waitstatus_to_exitcode(status)}\n")
                        told.flush()
                    except BrokenPipeError:
                        pass
        if control not in ready:
            continue
        size, received, _, _ = socket.recv_fds(control, 8, 2)
        if not size:
            return None
        size += _receive(control, 8 - len(size)) if len(size) < 8 else b""
        request = _receive(control, int.from_bytes(size, "little"))
        out, tell = received
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for descriptor in (wake, waker, tell, *told_of.values()):
                os.close(descriptor)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.close(out)
            return json.loads(request)
        os.close(out)
        told_of[pid] = tell
        os.write(tell, f"{pid}\n".encode())


def _run(program):
    """As the interpreter would, but for taking its modules apart at the end, which costs a second of nothing."""
    code = 0
    try:
        exec(program, sys.modules["__main__"].__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _request = serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        os.chdir(_request["folder"])
        os.environ.clear()
        os.environ.update(_request["env"])
        sys.argv, sys.path[0] = ["-c", *_request["arguments"]], ""
        _run(compile(_request["program"], "<string>", "exec"))
