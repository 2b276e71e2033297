"""Limits of the memory of reward processes, by the device of a reward model."""

import subprocess
import sys

import pytest

TRY = """
import mmap
import socket

from flowrt.rewards.child import Limits, _Child

MB = 1 << 20
connection, _ = socket.socketpair()
limits = Limits(memory_bytes=64 * MB, sandbox="bwrap", task=None, timeout_s=1.0, device={device!r})
_Child(connection, [], [], limits)
outcomes = []
for take in (
    lambda: mmap.mmap(-1, 4096 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ),
    lambda: bytearray(16 * MB),
    lambda: bytearray(256 * MB),
):
    try:
        taken = take()
        outcomes.append("taken")
        del taken
    except (OSError, MemoryError):
        outcomes.append("refused")
print(*outcomes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.parametrize(("device", "reserved"), [("cpu", "refused"), ("cuda:0", "taken")])
def test_a_model_on_an_accelerator_may_reserve_address_space_but_not_take_memory(device: str, reserved: str) -> None:
    """A driver reserves far more address space than it uses."""
    command = [sys.executable, "-c", TRY.format(device=device)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed.stdout.split() == [reserved, "taken", "refused"], completed.stderr
