"""Samples on their way: messages are received and put into the store, and sent from it."""

import asyncio
from collections.abc import Callable

import torch

from flowrt.errors import FlowError, OverBudget, TransferError
from flowrt.transport.lane import LaneSet
from flowrt.transport.settling import seen
from flowrt.transport.store import TensorStore
from flowrt.wire.messages import Serve
from flowrt.wire.records import Incoming


class Arrivals:
    """Receives what grants announce, and serves it; ``undelivered`` is called for what does not come."""

    def __init__(self, store: TensorStore, lanes: LaneSet, undelivered: Callable[[Incoming, str], None]) -> None:
        self._store = store
        self._lanes = lanes
        self._undelivered = undelivered
        self._loop = asyncio.get_running_loop()

    def serve(self, order: Serve) -> None:
        """Send what this turn of its lane is to bring to somebody else."""
        try:
            runs = self._store.runs(order.parts)
        except FlowError as error:
            # The receiver waits for this turn: the lane fails, and it alone.
            self._lanes.refuse(order.turn, str(error))
        else:
            self._lanes.send(order.turn, runs).add_done_callback(seen)

    def begin(self, incoming: Incoming) -> None:
        """Take this turn of its lane: the store expects the parts from now on, or the turn is refused."""
        arrival: asyncio.Future[None] = self._loop.create_future()
        arrival.add_done_callback(seen)
        try:
            self._store.expect(incoming.parts, arrival)
        except OverBudget as error:
            self._lanes.refuse(incoming.turn, str(error))
            self._store.refuse(incoming.parts, arrival)
            arrival.set_exception(TransferError(str(error)))
            self._undelivered(incoming, str(error))
            return

        def on_packet(received: asyncio.Future[list[torch.Tensor]]) -> None:
            try:
                for part, flat in zip(incoming.parts, received.result(), strict=True):
                    self._store.arrive(part, flat, arrival)
            except FlowError as error:
                self._store.fail(incoming.parts, arrival)
                self._undelivered(incoming, str(error))
                arrival.set_exception(error)
                return
            self._store.arrived(arrival)
            arrival.set_result(None)

        sizes = [self._store.sizes(part) for part in incoming.parts]
        self._lanes.receive(incoming.turn, sizes).add_done_callback(on_packet)
