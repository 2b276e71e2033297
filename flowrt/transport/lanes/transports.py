"""Transports: how a lane moves bytes. The interface, and those that work on this host.

- A channel carries messages in order, in one direction, for one incarnation of a lane.
- A message is one run per column: rows of one dtype, concatenated without padding. Both ends have the sizes of all
  rows, so there are no headers.
- All calls block and come from the lane's thread. A call fails when nothing has moved for the lane's deadline, or less
  than the minimum rate (`TransferRateLimit`).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from flowrt.runtime.host import local_address, network_namespace
from flowrt.transport.devices import cuda_is_here, has_cuda, has_npu, npu_is_here
from flowrt.transport.lanes.chunks import ColumnRun, TransferRateLimit
from flowrt.transport.lanes.device import HcclTransport, NcclTransport
from flowrt.transport.lanes.gloo import GlooTransport
from flowrt.transport.lanes.rendezvous import SignalStore
from flowrt.transport.lanes.shared_memory import ShmTransport


class Channel(Protocol):
    """One end of one incarnation of a lane. Calls raise TransferError or RuntimeError if the other end is closed."""

    def send(self, runs: Sequence[ColumnRun]) -> None:
        """Send one message when the other end is ready for it. The caller may change the rows afterwards."""
        ...

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Receive one message whose runs have rows of these sizes in bytes.

        Returns the bytes of each run. The caller may keep and change them: memory is reused once no tensor views it.
        """
        ...

    def on_idle(self) -> None:
        """Free memory that was kept for reuse; called when nothing has moved for a while."""
        ...

    def interrupt(self) -> None:
        """Make a blocked call of the lane's thread fail, at once if the transport can do that."""
        ...

    def close(self) -> None:
        """Close the channel, which fails the other end."""
        ...


class Transport(Protocol):
    """Opens channels of one kind."""

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> Channel:
        """Connect to the other end through the lane's rendezvous store. Blocks; raises when that takes too long."""
        ...


def available_transports() -> tuple[str, ...]:
    """Names of the transports that this worker supports, best first.

    Shared memory is ``shm:SCOPE``: it works between workers of one `network_namespace`. Transports of devices that this
    process does not use (yet: engines start after the handshake) come after gloo. They are used only if the run forces
    them, so that a lane alone does not create a context on a device.
    """
    found = []
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        found.append(f"shm:{network_namespace()}")
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


def make_transports(controller: str) -> Mapping[str, Transport]:
    """All transports by name, for a worker of the controller at ``tcp://HOST:PORT``.

    Raises ConfigError if this host has no route to the controller.
    """
    return {
        "shm": ShmTransport(),
        "gloo": GlooTransport(local_address(controller)),
        "nccl": NcclTransport(),
        "hccl": HcclTransport(),
    }
