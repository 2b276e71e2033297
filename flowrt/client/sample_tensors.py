"""Sample tensors of a worker: the batch that a pull returns, and transfers into and out of its store.

- `Batch` has leased slots with their tensors and inline values.
- `SampleTransfers` moves tensors between the store and the lanes, on the controller's orders.
- `UncommittedColumns` holds the tensors of offers and commits that the controller has not answered yet. They enter the
  store when the answer is received, not where it is awaited: the next message may already be the order to send them,
  and the caller may have stopped waiting.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from flowrt.errors import FlowError, LocalProtocolError, OverBudget, TransferError
from flowrt.protocol.messages import Grant, Incoming, Message, SendSamples, TransferFailed
from flowrt.transport.lanes.lane import LaneSet, ignore_exception
from flowrt.transport.tensor_store import Packed, Rows, TensorStore

OF_SLOTS = ("slots", "groups", "members", "prompts", "epochs", "attempts", "spans", "exact", "kept")
"""Fields of a grant with one value for each slot; some are empty where no slot has one."""


def _no_column(kind: str, column: str, there_is: Iterable[str]) -> KeyError:
    """The error for a column that a batch does not have."""
    names = ", ".join(map(repr, there_is))
    if not names:
        return KeyError(
            f"the batch has no {kind} {column!r}, and no others: a batch without rows has none, as the last one of a "
            "step or stream (Batch.closed, len(batch) 0), and a stage receives the columns and tags of its needs"
        )
    return KeyError(
        f"the batch has no {kind} {column!r}; there is {names}: a stage receives the columns and tags of its needs"
    )


class Columns(Mapping[str, list[torch.Tensor]]):
    """Tensor columns, one 1-D tensor for each slot; rows of a packed column are created on first access.

    Raises KeyError, with the columns there are, for any other.
    """

    def __init__(self, columns: Mapping[str, Sequence[torch.Tensor] | Packed]) -> None:
        self._columns = dict(columns)
        self._rows: dict[str, list[torch.Tensor]] = {}

    def __getitem__(self, column: str) -> list[torch.Tensor]:
        if column not in self._rows:
            rows = self._of(column)
            self._rows[column] = list(rows.rows() if isinstance(rows, Packed) else rows)
        return self._rows[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def packed(self, column: str) -> Packed:
        """All rows of a column in one flat tensor; without a copy if the store has them packed."""
        rows = self._of(column)
        if not isinstance(rows, Packed):
            rows = self._columns[column] = Packed(torch.cat(list(rows)), tuple(map(len, rows)))
        return rows

    def _of(self, column: str) -> Sequence[torch.Tensor] | Packed:
        if column not in self._columns:
            raise _no_column("tensors", column, self._columns)
        return self._columns[column]


class Numbers(dict[str, list[float]]):
    """Inline columns, one number for each slot. Raises KeyError, with the columns there are, for any other."""

    def __missing__(self, column: str) -> list[float]:
        raise _no_column("numbers", column, self)


@dataclass(slots=True)  # not frozen: construction of a frozen one takes three times as long
class Batch:
    """Leased slots in issue order; slots of one group are adjacent.

    Example:
        batch = await session.pull("reward", slots=8)
        for row, response in enumerate(batch.tensors["response"]):
            print(batch.slots[row], response, batch.inline["length"][row])
    """

    grant: Grant
    tensors: Columns
    """``tensors[column][row]`` is a 1-D tensor; slots of a group share the tensor of a group column."""
    inline: Numbers
    """``inline[column][row]`` is a number."""

    def __len__(self) -> int:
        return len(self.grant.slots)

    @property
    def closed(self) -> bool:
        """Whether no more slots will be ready: of this step (train stage), or of the stream."""
        return self.grant.closed

    @property
    def slots(self) -> Sequence[int]:
        """The leased slots; row r of the columns belongs to ``slots[r]``."""
        return self.grant.slots

    @property
    def leases(self) -> Sequence[int]:
        """The lease on each slot, for `Session.commit`."""
        return (self.grant.lease,) * len(self.grant.slots)

    @property
    def refused(self) -> Sequence[int]:
        """Leases of the batch that the pull reported as done, if they had ended before; its slots are granted again."""
        return self.grant.refused

    @property
    def flows(self) -> Sequence[str]:
        """The flow of each slot."""
        flows = self.grant.flows
        return flows if len(flows) != 1 else flows * len(self.grant.slots)

    @property
    def groups(self) -> Sequence[int]:
        """The group of each slot."""
        return self.grant.groups

    def only(self, rows: Sequence[int]) -> "Batch":
        """The batch with these rows alone."""
        grant = self.grant
        of_rows: dict[str, Any] = {
            name: tuple(of[row] for row in rows) for name in OF_SLOTS if (of := getattr(grant, name))
        }
        kept = replace(grant, **of_rows, flows=tuple(self.flows[row] for row in rows))
        tensors = {name: [self.tensors[name][row] for row in rows] for name in self.tensors}
        return Batch(
            kept,
            Columns(tensors),
            Numbers({name: [values[row] for row in rows] for name, values in self.inline.items()}),
        )

    def versions(self, row: int) -> torch.Tensor:
        """The policy version that generated each response token of a row (1-D, int64)."""
        span = torch.tensor(self.grant.spans[row])
        return span[::2].repeat_interleave(span[1::2])

    def oldest_version(self, row: int) -> int:
        """The oldest policy version that generated a token of a row."""
        return min(self.grant.spans[row][::2])


ColumnRows = Mapping[str, Rows]


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
            # Fails this lane, and no other, so that the receiver does not wait for its deadline.
            self._lanes.refuse(order.turn, str(error))
        else:
            self._lanes.send(order.turn, runs).add_done_callback(ignore_exception)

    def receive(self, incoming: Incoming) -> None:
        """Receive the samples of this turn of a lane. If the store has no room for them, refuse the turn."""
        arrival: asyncio.Future[None] = self._loop.create_future()
        arrival.add_done_callback(ignore_exception)
        try:
            self._store.expect(incoming.parts, arrival)
        except OverBudget as error:
            self._lanes.refuse(incoming.turn, str(error))
            self._store.expect_failure(incoming.parts, arrival)
            arrival.set_exception(TransferError(str(error)))
            self._send_message(TransferFailed(incoming, str(error), is_full=True))
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
    """Tensor columns of offers and commits by request number, until the request is answered."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._offers: dict[int, ColumnRows] = {}
        self._commits: dict[int, tuple[Sequence[int], ColumnRows]] = {}

    def add_offer(self, request: int, columns: ColumnRows) -> None:
        """Add columns of an offer, one row per prompt.

        Raises LocalProtocolError when a row does not fit its column, OverBudget when the store has no room.
        """
        if columns:
            self._check(columns)
            self._offers[request] = columns

    def add_commit(self, request: int, slots: Sequence[int], columns: ColumnRows) -> None:
        """Add columns of a commit. Raises as `add_offer`, and LocalProtocolError unless there is one row per slot."""
        self._check(columns)
        for column, rows in columns.items():
            if len(rows) != len(slots):
                raise LocalProtocolError(f"column {column!r} has {len(rows)} rows for {len(slots)} slots")
        self._commits[request] = slots, columns

    def _check(self, columns: ColumnRows) -> None:
        for column, rows in columns.items():
            self._store.check(column, rows)
        self._store.check_room(columns)

    def offer_accepted(self, request: int, first: int) -> None:
        """Store the columns of an accepted offer, whose groups have the ids from ``first`` on. Negative: drop them."""
        for column, rows in self._offers.pop(request, {}).items() if first >= 0 else ():
            self._store.put_rows(column, range(first, first + len(rows)), rows, room_checked=True)

    def committed(self, request: int, refused: Sequence[int]) -> None:
        """Store the columns of an accepted commit, except those of the slots in ``refused``."""
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
        """Drop the columns of a rejected offer or commit."""
        self._offers.pop(request, None)
        self._commits.pop(request, None)
