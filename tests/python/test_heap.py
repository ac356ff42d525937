"""The settings of glibc's heap: what the launcher gives its ranks, and that a user's own hold."""
import os
import subprocess
import sys

import pytest
from smp_helpers import environment

from shardsmith import heap

# Four threads that each allocate and free, as microbatches do: how many arenas there are, and where freed memory is.
PROGRAM = """
import ctypes, sys, threading
if "set_up" in sys.argv:
    from shardsmith import heap
    heap.set_up()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(5)
def work():
    libc.free(libc.malloc(100000))
    together.wait(); together.wait()
for _ in range(4):
    threading.Thread(target=work).start()
together.wait()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
together.wait()
"""


def arenas(tmp_path, *arguments, **env):
    path = tmp_path / "info.xml"
    clean = {name: value for name, value in environment().items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    subprocess.run([sys.executable, "-c", PROGRAM, str(path), *arguments], env=clean | env, check=True)
    return path.read_text().count("<heap nr=")


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="other C libraries have other heaps")
def test_all_threads_of_a_rank_have_one_arena(tmp_path):
    assert arenas(tmp_path) > 1
    assert arenas(tmp_path, **heap.environment({})) == 1
    assert arenas(tmp_path, "set_up") == 1
    assert arenas(tmp_path, "set_up", MALLOC_ARENA_MAX="8") > 1


def test_what_the_user_sets_holds():
    assert list(heap.environment({"PATH": "x"})) == ["GLIBC_TUNABLES"]
    assert heap.environment({"GLIBC_TUNABLES": "glibc.malloc.check=3"}) == {}
    assert heap.environment({"MALLOC_ARENA_MAX": "4"}) == {}
