"""Shared memory is chosen between processes that reach each other's abstract sockets, and between no others."""

import shutil
import subprocess
import sys

import pytest

from flowrt.transport.transports import abilities

ASK = [sys.executable, "-c", "from flowrt.transport.transports import abilities; print(abilities()[0])"]


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
    assert abilities()[0].startswith("shm:")
    assert said(ASK) == abilities()[0]


def test_a_process_with_a_network_of_its_own_is_elsewhere(elsewhere: list[str]) -> None:
    there = said([*elsewhere, *ASK])
    assert there.startswith("shm:")
    assert there != abilities()[0]
    assert there.split("/")[0] == abilities()[0].split("/")[0]  # the same boot of the same kernel
