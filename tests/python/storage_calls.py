"""Ranks whose calls into the file system are counted, and at a chosen one die or fail: native/storage_calls.c, preloaded."""
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

COUNT, KILL, IO_ERROR, NO_SPACE, SYNC_FAILS, STOP = range(6)
_SOURCE = Path(__file__).parent / "native" / "storage_calls.c"


@functools.cache
def library():
    """The path to preload; made once."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: processes can't be killed at a chosen call")
    target = Path(tempfile.mkdtemp(prefix="shardsmith-calls-")) / "storage_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(_SOURCE), "-ldl"], check=True)
    return str(target)


def environment():
    """Of ranks whose calls are counted."""
    return {"LD_PRELOAD": library()}


# For the program of a rank. arm(): from now on counts, and does `action` at call `at` (from 0).
HEAD = f"""
import ctypes
COUNT, KILL, IO_ERROR, NO_SPACE, SYNC_FAILS, STOP = range(6)
_calls = ctypes.CDLL(os.environ["LD_PRELOAD"])
_calls.storage_calls_count.restype = ctypes.c_long
_calls.storage_calls_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]

def arm(folder, action=COUNT, at=-1, also=0):
    _calls.storage_calls_arm(os.path.abspath(folder).encode(), action, at, also)

def calls():
    return _calls.storage_calls_count()
"""
