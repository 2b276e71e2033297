"""Sample tensors on their way into and out of the store of this worker.

- `SampleTransfers` moves them between the store and the lanes, on the controller's orders.
- `UncommittedColumns` holds those of offers and commits that the controller has not answered yet. They enter the store
  when the answer is received, not where it is awaited: the next message may already be the order to send them, and the
  caller may have stopped waiting.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch

from flowrt.errors import FlowError, LocalProtocolError, OverBudget, TransferError
from flowrt.protocol.messages import Incoming, Message, SendSamples, TransferFailed
from flowrt.transport.lanes.lane import LaneSet, ignore_exception
from flowrt.transport.samples.row_blocks import Packed
from flowrt.transport.samples.store import Rows, TensorStore

Columns = Mapping[str, Rows]


class SampleTransfers:
    """Sends and receives samples; a failed transfer is reported to the controller with ``send_message``."""

    def __init__(self, store: TensorStore, lanes: LaneSet, send_message: Callable[[Message], None]) -> None:
        self._store = store
        self._lanes = lanes
        self._send_message = send_message
        self._loop = asyncio.get_running_loop()

    def send(self, order: SendSamples) -> None:
        """Send the samples of this turn of a lane."""
        try:
            runs = self._store.runs(order.parts)
        except FlowError as error:
            # The receiver waits for this turn: only this lane fails.
            self._lanes.refuse(order.turn, str(error))
        else:
            self._lanes.send(order.turn, runs).add_done_callback(ignore_exception)

    def receive(self, incoming: Incoming) -> None:
        """Receive the samples of this turn of a lane; without room in the store, refuse the turn."""
        arrival: asyncio.Future[None] = self._loop.create_future()
        arrival.add_done_callback(ignore_exception)
        try:
            self._store.expect(incoming.parts, arrival)
        except OverBudget as error:
            self._lanes.refuse(incoming.turn, str(error))
            self._store.expect_failure(incoming.parts, arrival)
            arrival.set_exception(TransferError(str(error)))
            self._send_message(TransferFailed(incoming, str(error)))
            return

        def on_received(received: asyncio.Future[list[torch.Tensor]]) -> None:
            try:
                for part, flat in zip(incoming.parts, received.result(), strict=True):
                    self._store.put_arrived(part, flat, arrival)
            except FlowError as error:
                self._store.arrival_failed(incoming.parts, arrival)
                self._send_message(TransferFailed(incoming, str(error)))
                arrival.set_exception(error)
                return
            self._store.arrival_done(arrival)
            arrival.set_result(None)

        sizes = [self._store.sizes(part) for part in incoming.parts]
        self._lanes.receive(incoming.turn, sizes).add_done_callback(on_received)


class UncommittedColumns:
    """Columns by request number, until the request is answered."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._offers: dict[int, Columns] = {}
        self._commits: dict[int, tuple[Sequence[int], Columns]] = {}

    def add_offer(self, request: int, columns: Columns) -> None:
        """Add columns of an offer, one row per prompt.

        Raises LocalProtocolError when a row does not fit its column, OverBudget when the store has no room.
        """
        if columns:
            self._check(columns)
            self._offers[request] = columns

    def add_commit(self, request: int, slots: Sequence[int], columns: Columns) -> None:
        """Add columns of a commit, one row per slot. Raises as `add_offer` does."""
        self._check(columns)
        for column, rows in columns.items():
            if len(rows) != len(slots):
                raise LocalProtocolError(f"column {column!r} has {len(rows)} rows for {len(slots)} slots")
        self._commits[request] = slots, columns

    def _check(self, columns: Columns) -> None:
        for column, rows in columns.items():
            self._store.check(column, rows)
        self._store.check_room(columns)

    def offer_accepted(self, request: int, first: int) -> None:
        """The offer is accepted: its groups have the ids from ``first`` on. Negative: the run needs no more."""
        for column, rows in self._offers.pop(request, {}).items() if first >= 0 else ():
            self._store.put_rows(column, range(first, first + len(rows)), rows, room_checked=True)

    def committed(self, request: int, refused: Sequence[int]) -> None:
        """The commit is accepted, except for the slots in ``refused``: their rows in the store do not change."""
        slots, columns = self._commits.pop(request, ((), {}))
        excluded = set(refused)
        kept = [row for row, slot in enumerate(slots) if slot not in excluded]
        for column, rows in columns.items():
            if len(kept) == len(rows):
                self._store.put_rows(column, slots, rows, room_checked=True)
            elif kept:
                single = rows.rows() if isinstance(rows, Packed) else rows
                kept_rows = [single[row] for row in kept]
                self._store.put_rows(column, [slots[row] for row in kept], kept_rows, room_checked=True)

    def rejected(self, request: int) -> None:
        """The offer or commit is rejected: drop its columns."""
        self._offers.pop(request, None)
        self._commits.pop(request, None)
