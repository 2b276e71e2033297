"""Shared memory of a program that was killed is removed; what another one has mapped stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrt.engines import leftovers

PROGRAM = """
import multiprocessing, sys
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Semaphore()
memory = SharedMemory(sys.argv[1], create=sys.argv[2] == "make", size=4096)
print("ready", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system names no shared memory in files")


@contextmanager
def program(name: str, how: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", PROGRAM, name, how]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
            yield one
        finally:
            os.killpg(one.pid, signal.SIGKILL)


def test_names_go_with_the_program_that_was_killed_unless_another_has_them() -> None:
    name = f"flowrt-test-{os.getpid()}"
    with program(name, "make") as owner:
        owned = leftovers.named_by(owner.pid)
    paths = {path for path, _ in owned}
    assert len(paths) == 2, "the memory, and the semaphore under the name that it has in the end"
    assert Path("/dev/shm", name) in paths
    assert all(path.exists() for path in paths)
    with program(name, "take") as other:
        others = leftovers.named_by(other.pid)
        leftovers.remove(owned)
        assert [path for path in paths if path.exists()] == [Path("/dev/shm", name)]
    leftovers.remove(owned | others)
    assert not any(path.exists() for path, _ in owned | others)
