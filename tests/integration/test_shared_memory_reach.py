"""Shared memory is chosen between processes that reach each other's abstract sockets, and between no others."""

import shutil
import subprocess
import sys

import pytest

from flowrt.transport.lanes.lane import available_transports

ASK = [
    sys.executable,
    "-c",
    "from flowrt.transport.lanes.lane import available_transports; print(available_transports()[0])",
]


def said(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def elsewhere() -> list[str]:
    """What a command begins with that runs in a network namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("a network namespace of one's own takes root, and unshare (package util-linux)")
    return [unshare, "-n"]


def test_a_child_is_in_the_same_place() -> None:
    assert available_transports()[0].startswith("shm:")
    assert said(ASK) == available_transports()[0]


def test_process_in_another_network_namespace_is_another_host(elsewhere: list[str]) -> None:
    there = said([*elsewhere, *ASK])
    assert there.startswith("shm:")
    assert there != available_transports()[0]
    assert there.split("/")[0] == available_transports()[0].split("/")[0]  # the same boot of the same kernel
