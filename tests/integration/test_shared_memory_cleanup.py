"""Shared memory of a program that was killed is removed; what another one has mapped stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrt.engines.sglang import server_process

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


def test_shared_memory_names_of_a_killed_program_are_removed_unless_mapped_elsewhere() -> None:
    name = f"flowrt-test-{os.getpid()}"
    with program(name, "make") as owner:
        owned = server_process.mapped_names(owner.pid)
    paths = {path for path, _ in owned}
    assert len(paths) == 2, "the memory, and the semaphore under the name that it has in the end"
    assert Path("/dev/shm", name) in paths
    assert all(path.exists() for path in paths)
    with program(name, "take") as other:
        others = server_process.mapped_names(other.pid)
        server_process.remove_unused(owned)
        assert [path for path in paths if path.exists()] == [Path("/dev/shm", name)]
    server_process.remove_unused(owned | others)
    assert not any(path.exists() for path, _ in owned | others)
