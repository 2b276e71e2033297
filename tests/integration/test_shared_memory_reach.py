"""Shared memory is chosen only between processes that can reach each other's abstract sockets."""

import shutil
import subprocess
import sys

import pytest

from flowrt.transport.lanes.lane import available_transports

PRINT_TRANSPORT = [
    sys.executable,
    "-c",
    "from flowrt.transport.lanes.lane import available_transports; print(available_transports()[0])",
]


def stdout_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.strip()


@pytest.fixture
def other_namespace() -> list[str]:
    """The prefix of a command that runs in its own network namespace."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("a new network namespace requires root and unshare (package util-linux)")
    return [unshare, "-n"]


def test_a_child_process_has_the_same_shared_memory_transport() -> None:
    assert available_transports()[0].startswith("shm:")
    assert stdout_of(PRINT_TRANSPORT) == available_transports()[0]


def test_another_network_namespace_has_another_shared_memory_transport(other_namespace: list[str]) -> None:
    other = stdout_of([*other_namespace, *PRINT_TRANSPORT])
    assert other.startswith("shm:")
    assert other != available_transports()[0]
    assert other.split("/")[0] == available_transports()[0].split("/")[0]  # the same boot of the same kernel
