"""Samples on their way here: packets are received, cut into tensors, and put into the store."""

import asyncio
from collections.abc import Callable

import torch

from flowrt.errors import FlowError
from flowrt.transport.lane import LaneSet, seen
from flowrt.transport.packets import packet_bytes, unpack
from flowrt.transport.store import TensorStore
from flowrt.wire.records import Incoming


class Arrivals:
    """Receives what grants announce; ``undelivered`` is called for what does not come."""

    def __init__(self, store: TensorStore, lanes: LaneSet, undelivered: Callable[[Incoming, str], None]) -> None:
        self._store = store
        self._lanes = lanes
        self._undelivered = undelivered
        self._loop = asyncio.get_running_loop()

    def begin(self, incoming: Incoming) -> None:
        """Take this turn of its lane: the store expects the parts from now on."""
        packet = torch.empty(packet_bytes(self._store, incoming.parts), dtype=torch.uint8)
        arrival: asyncio.Future[None] = self._loop.create_future()
        arrival.add_done_callback(seen)
        self._store.expect(incoming.parts, arrival)

        def on_packet(received: asyncio.Future[None]) -> None:
            try:
                received.result()
                for column, item, tensor in unpack(self._store, incoming.parts, incoming.turn.sequence, packet):
                    self._store.arrive(column, item, tensor, arrival)
            except FlowError as error:
                self._store.fail(incoming.parts, arrival)
                self._undelivered(incoming, str(error))
                arrival.set_exception(error)
                return
            arrival.set_result(None)

        self._lanes.transfer(incoming.turn, [packet]).add_done_callback(on_packet)
