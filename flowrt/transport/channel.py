"""What every transport offers: a channel between two workers, made on demand for one incarnation of a lane.

A channel carries messages in order, in one direction. A message is a few runs, one a column; a run is rows of one dtype
that lie end to end, without padding. Both ends know the sizes of all rows beforehand, so nothing is parsed. All calls
block and come from the lane's own thread; every one of them ends within the lane's deadline when nothing moves: that
counts from the last piece that moved. A large message over a slow link may take long, but not for ever: see pace.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from flowrt.transport.pace import Pace
from flowrt.transport.pieces import Run
from flowrt.transport.rendezvous import SignalStore


class Channel(Protocol):
    """One end of one incarnation of a lane. Raises TransferError or RuntimeError when the other is gone."""

    def send(self, runs: Sequence[Run]) -> None:
        """Send one message, as soon as the other end is ready for it. The rows are the caller's again afterwards."""
        ...

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Receive one message whose runs have rows of these sizes in bytes; returns the bytes of each run.

        They are the caller's to keep and to change; nothing writes to them as long as a tensor looks at them.
        """
        ...

    def rest(self) -> None:
        """Nothing was moved for a while: give back memory that was only kept warm."""
        ...

    def interrupt(self) -> None:
        """Make a call that is blocked in another thread fail, at once where the transport can do that."""
        ...

    def close(self) -> None:
        """End the channel: the other end fails at once."""
        ...


class Transport(Protocol):
    """A way of making channels; a plain value of a worker."""

    def open(self, store: SignalStore, sending: bool, pace: Pace) -> Channel:
        """Meet the other end through the lane's own store and connect. Blocks; raises when it does not come."""
        ...
