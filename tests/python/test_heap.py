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
    heap.set_up(int(sys.argv[sys.argv.index("set_up") + 1]))
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
def test_a_rank_has_an_arena_for_each_thread_that_computes_at_a_time(tmp_path):
    assert arenas(tmp_path) > 2
    for threads in (1, 2):
        assert arenas(tmp_path, **heap.environment({}, threads)) == threads
        assert arenas(tmp_path, "set_up", str(threads)) == threads
    assert arenas(tmp_path, "set_up", "1", MALLOC_ARENA_MAX="8") > 1


def test_what_the_user_sets_holds():
    assert list(heap.environment({"PATH": "x"}, 1)) == ["GLIBC_TUNABLES"]
    assert heap.environment({"GLIBC_TUNABLES": "glibc.malloc.check=3"}, 1) == {}
    assert heap.environment({"MALLOC_ARENA_MAX": "4"}, 1) == {}
