"""Shared memory of a killed program is removed, unless another program has mapped it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrt.runtime.process_sessions import mapped_names, remove_unused

PROGRAM = """
import multiprocessing, sys
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Semaphore()
memory = SharedMemory(sys.argv[1], create=sys.argv[2] == "create", size=4096)
print("ready", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


@contextmanager
def program(name: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, name, mode]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_shared_memory_of_a_killed_program_is_removed_unless_mapped_elsewhere() -> None:
    name = f"flowrt-test-{os.getpid()}"
    with program(name, "create") as owner:
        owned = mapped_names(owner.pid)
    paths = {path for path, _ in owned}
    assert len(paths) == 2, "the memory, and the semaphore under its final name"
    assert Path("/dev/shm", name) in paths
    assert all(path.exists() for path in paths)
    with program(name, "attach") as other:
        others = mapped_names(other.pid)
        remove_unused(owned)
        assert [path for path in paths if path.exists()] == [Path("/dev/shm", name)]
    remove_unused(owned | others)
    assert not any(path.exists() for path, _ in owned | others)
