"""Which transports a worker on this machine can do, in the order in which it prefers them."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from flowrt.transport.channel import Transport
from flowrt.transport.device import HcclTransport, NcclTransport
from flowrt.transport.devices import cuda_is_here, has_cuda, has_npu, npu_is_here
from flowrt.transport.gloo import GlooTransport
from flowrt.transport.rendezvous import local_address
from flowrt.transport.shm import ShmTransport

AUTO = "auto"


def abilities() -> tuple[str, ...]:
    """The lanes that this worker can do, best first: a name, or ``name:place`` for what only works in one place.

    Behind gloo stands what this machine has devices for and this process does not work on (yet: engines come after the
    greeting): it is taken only where it is forced, so that nobody makes a context on a device for a lane alone.
    """
    found = []
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        found.append(f"shm:{_place()}")
    if has_cuda():
        found.append("nccl")
    if has_npu():
        found.append("hccl")
    idle = []
    if not has_cuda() and cuda_is_here() and torch.distributed.is_nccl_available():
        idle.append("nccl")
    if not has_npu() and npu_is_here():
        idle.append("hccl")
    return (*found, "gloo", *idle)


def _place() -> str:
    """Equal for processes that reach each other's abstract sockets: one boot of one kernel, one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def transports(controller: str) -> Mapping[str, Transport]:
    """Every transport by its name, for a worker of the controller at ``tcp://HOST:PORT``."""
    return {
        "shm": ShmTransport(),
        "gloo": GlooTransport(local_address(controller)),
        "nccl": NcclTransport(),
        "hccl": HcclTransport(),
    }
