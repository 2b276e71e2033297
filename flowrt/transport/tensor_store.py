"""Tensor store of a worker, by (column, id): tensors that the worker made or received, and tensors that are arriving.

Rows of one column that were stored together form one block; single rows are views, made when they are read.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flowrt.errors import LocalProtocolError, OverBudget, TransferError
from flowrt.protocol.messages import ITEM_BYTES, Column, Part
from flowrt.runtime.waits import BoundedElsewhere, wait_all
from flowrt.transport.lanes.channel import ColumnRun


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of one column, concatenated: a flat tensor, and the number of elements of each row."""

    values: torch.Tensor
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> Sequence[torch.Tensor]:
        """The rows, views of ``values``."""
        return torch.split(self.values, list(self.lengths))


def lengths_of(rows: Sequence[torch.Tensor] | Packed) -> tuple[int, ...]:
    """The number of elements of each row."""
    return tuple(rows.lengths) if isinstance(rows, Packed) else tuple(map(len, rows))


def make_contiguous(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | Packed:
    """Rows that can be stored and sent: contiguous, detached, and not a small part of larger memory.

    Rows that are consecutive in memory (a split batch, for example) are packed without a copy. Other rows are copied
    where necessary.
    """
    first = rows[0]
    if len(rows) > 1 and first.untyped_storage().nbytes() != first.nbytes:
        packed = _pack_consecutive(rows)
        if packed is not None:
            return packed
    used_bytes: Counter[int] = Counter()
    storages = [row.untyped_storage() for row in rows]
    for row, storage in zip(rows, storages, strict=True):
        used_bytes[storage.data_ptr()] += row.nbytes
    return [
        row.detach().clone(memory_format=torch.contiguous_format)
        if not row.is_contiguous() or used_bytes[storage.data_ptr()] * 2 < storage.nbytes()
        else row.detach()
        if row.requires_grad
        else row
        for row, storage in zip(rows, storages, strict=True)
    ]


def _pack_consecutive(rows: Sequence[torch.Tensor]) -> Packed | None:
    first = rows[0]
    end = first.data_ptr()
    for row in rows:
        if row.data_ptr() != end or not row.is_contiguous():
            return None
        end += row.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes() or (end - first.data_ptr()) * 2 < storage.nbytes():
        return None
    lengths = lengths_of(rows)
    return Packed(first.detach().as_strided((sum(lengths),), (1,)), lengths)


class RowBlock:
    """Rows with their ids, packed or one by one. When most of a packed block is dropped, the rest is copied out."""

    __slots__ = ("_dropped", "_index_of", "_packed", "_rows", "_starts", "ids", "lengths", "live_bytes", "size")

    def __init__(self, ids: Sequence[int], rows: Sequence[torch.Tensor] | Packed) -> None:
        self.ids = tuple(ids)
        self._index_of: dict[int, int] | None = None
        self._starts: list[int] | None = None
        self._dropped: set[int] = set()
        self._rows: list[torch.Tensor | None] = []
        self._packed: torch.Tensor | None = None
        self.lengths = lengths_of(rows)
        if isinstance(rows, Packed):
            self._packed = rows.values
            self.size = rows.values.nbytes
        else:
            self._rows = list(rows)
            self.size = sum(row.nbytes for row in rows)
        self.live_bytes = self.size

    def row(self, item: int) -> torch.Tensor:
        """The row with this id, which must not be dropped."""
        index = self._index(item)
        if self._packed is None:
            row = self._rows[index]
            assert row is not None
            return row
        start = self._start(index)
        return self._packed[start : start + self.lengths[index]]

    def drop(self, items: Iterable[int]) -> None:
        """Drop rows. A few remaining rows must not keep a whole packed block in memory, so they are copied out."""
        for item in items:
            index = self._index(item)
            self._dropped.add(index)
            if self._packed is None:
                row = self._rows[index]
                assert row is not None
                self.live_bytes -= row.nbytes
                self._rows[index] = None
            else:
                self.live_bytes -= self.lengths[index] * self._packed.itemsize
        if self._packed is None:
            self.size = self.live_bytes
        elif self.live_bytes * 2 < self.size or len(self._dropped) == len(self.ids):
            rows = torch.split(self._packed, list(self.lengths)) if len(self._dropped) < len(self.ids) else ()
            self._rows = [None if index in self._dropped else row.clone() for index, row in enumerate(rows)]
            self._packed = None
            self.size = self.live_bytes

    def has_all(self, ids: Sequence[int]) -> bool:
        """Whether these are all rows of this block, and none was dropped."""
        return not self._dropped and (self.ids is ids or self.ids == ids)

    def consecutive(self, ids: tuple[int, ...]) -> Packed | None:
        """The rows with these ids without a copy, if they are consecutive rows of a packed block; else None."""
        if self._packed is None:
            return None
        if self.has_all(ids):
            return Packed(self._packed, self.lengths)
        first = self._index(ids[0])
        last = first + len(ids)
        if self.ids[first:last] != ids:
            return None
        lengths = self.lengths[first:last]
        start = self._start(first)
        return Packed(self._packed[start : start + sum(lengths)], lengths)

    def _index(self, item: int) -> int:
        if self.ids[0] == item:
            return 0
        if self._index_of is None:
            self._index_of = {number: index for index, number in enumerate(self.ids)}
        return self._index_of[item]

    def _start(self, index: int) -> int:
        if self._starts is None:
            self._starts = [0, *accumulate(self.lengths)]
        return self._starts[index]


Rows = Sequence[torch.Tensor] | Packed


class TensorStore:
    """Tensors of one worker. Used on the event loop's thread only. Readers get the stored tensors and may keep them.

    With a budget in bytes (0: none), rows that do not fit in addition to those held and arriving raise OverBudget, with
    nothing changed. The store does not wait for room: the work that frees the held rows may depend on the new ones.
    """

    def __init__(self, columns: Sequence[Column], budget_bytes: int = 0) -> None:
        self._columns = {column.name: column for column in columns}
        self._blocks: dict[str, dict[int, RowBlock]] = {column.name: {} for column in columns}
        self._arriving: dict[str, dict[int, asyncio.Future[None]]] = {column.name: {} for column in columns}
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._arriving_bytes: dict[asyncio.Future[None], int] = {}
        # Arrivals with rows that were freed, or expected from a newer arrival, before they arrived.
        self._partly_stale: set[asyncio.Future[None] | None] = set()

    # ---- columns

    def check(self, column: str, rows: Rows) -> None:
        """Raises LocalProtocolError if the column is unknown, or a row does not have its dtype or is not 1-D."""
        dtype = self.dtype(column)
        for tensor in _tensors(rows):
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise LocalProtocolError(
                    f"column {column!r} takes 1-D {dtype}, not {tensor.dim()}-D {tensor.dtype}; convert it first"
                )
        if isinstance(rows, Packed) and sum(rows.lengths) != len(rows.values):
            raise LocalProtocolError(
                f"column {column!r}: rows of {sum(rows.lengths)} elements are packed into {len(rows.values)}"
            )

    def dtype(self, column: str) -> torch.dtype:
        dtype = getattr(torch, self._column(column).dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def scope(self, column: str) -> str:
        return self._column(column).scope

    def _column(self, column: str) -> Column:
        try:
            return self._columns[column]
        except KeyError:
            raise LocalProtocolError(
                f"there is no tensor column {column!r}; the recipe has {sorted(self._columns)}"
            ) from None

    # ---- writing

    def put(self, column: str, item: int, tensor: torch.Tensor) -> None:
        """Store a 1-D tensor, as `put_rows` does."""
        self.put_rows(column, (item,), (tensor,))

    def check_room(self, columns: Mapping[str, Rows]) -> None:
        """Raises OverBudget if these rows would not fit."""
        size = sum(row.nbytes for rows in columns.values() for row in _tensors(rows))
        self._require_room(size, f"{sum(map(len, columns.values()))} rows of {', '.join(columns)}")

    def put_rows(self, column: str, ids: Sequence[int], rows: Rows, room_checked: bool = False) -> None:
        """Store rows: the tensors themselves, or copies of those that are small parts of larger memory.

        Raises LocalProtocolError as `check`, and unless there is one id per row. Raises OverBudget if there is no room,
        but not with ``room_checked``: the caller has called `check_room`.
        """
        self.check(column, rows)
        if len(ids) != len(rows):
            raise LocalProtocolError(f"column {column!r}: {len(rows)} rows for {len(ids)} ids")
        if not ids:
            return
        block = RowBlock(ids, rows if isinstance(rows, Packed) else make_contiguous(rows))
        held = self._blocks[column]
        replaced = [item for item in ids if item in held] if held else []
        if not room_checked:
            freed = sum(held[item].row(item).nbytes for item in replaced) if self._budget_bytes else 0
            self._require_room(block.size - freed, f"{len(ids)} rows of {column}")
        self._drop(column, replaced)
        self._held_bytes += block.size
        held.update(dict.fromkeys(ids, block))

    def _require_room(self, size: int, what: str) -> None:
        held = self._held_bytes
        arriving = sum(self._arriving_bytes.values())
        if self._budget_bytes and held + arriving + size > self._budget_bytes:
            raise OverBudget(
                f"{size} bytes for {what} do not fit into this worker's store: {held} are held and {arriving} are "
                f"arriving, of {self._budget_bytes}; raise controller.store_gb, or keep fewer samples at a time"
            )

    def _drop(self, column: str, items: Iterable[int]) -> None:
        """Drop rows that are held, block by block."""
        held = self._blocks[column]
        by_block: dict[RowBlock, list[int]] = {}
        for item in items:
            by_block.setdefault(held.pop(item), []).append(item)
        for block, dropped in by_block.items():
            self._held_bytes -= block.size
            block.drop(dropped)
            self._held_bytes += block.size

    def _drop_block(self, column: str, items: Sequence[int]) -> bool:
        """Drop these rows if they are a whole block: the usual case, and much faster than `_drop`."""
        held = self._blocks[column]
        block = held.get(items[0]) if items else None
        if block is None or not block.has_all(items):
            return False
        for item in items:
            del held[item]
        self._held_bytes -= block.size
        return True

    # ---- reading

    def get(self, column: str, item: int) -> torch.Tensor:
        """A stored tensor. Raises LocalProtocolError if it is not in this store."""
        return self._block(column, item).row(item)

    def _block(self, column: str, item: int) -> RowBlock:
        try:
            return self._blocks[column][item]
        except KeyError:
            raise LocalProtocolError(f"{column} of {item} is not in this worker's store") from None

    def rows(self, column: str, ids: Sequence[int]) -> Rows:
        """Stored rows, packed if they are consecutive in memory. Raises LocalProtocolError if a row is not stored."""
        if not ids:
            return ()
        ids = tuple(ids)
        packed = self._block(column, ids[0]).consecutive(ids)
        if packed is not None and self._has(column, ids):
            return packed
        return [self._block(column, item).row(item) for item in ids]

    def runs(self, parts: Iterable[Part]) -> list[ColumnRun]:
        """The rows to send for each part.

        Raises LocalProtocolError if a row is not in this store, TransferError if a length is not the announced length.
        """
        runs = []
        for part in parts:
            rows = self.rows(part.column, part.ids)
            lengths = lengths_of(rows)
            if lengths != part.lengths:
                length, announced = next(pair for pair in zip(lengths, part.lengths, strict=True) if pair[0] != pair[1])
                raise TransferError(f"column {part.column} has {length} elements where {announced} were announced")
            sizes = self.sizes(part)
            runs.append(ColumnRun(sizes, flat=rows.values) if isinstance(rows, Packed) else ColumnRun(sizes, rows))
        return runs

    def sizes(self, part: Part) -> Sequence[int]:
        """Bytes of each row of a part."""
        item_bytes = self._item_bytes(part)
        return part.lengths if item_bytes == 1 else [length * item_bytes for length in part.lengths]

    def _item_bytes(self, part: Part) -> int:
        return ITEM_BYTES[self._column(part.column).dtype]

    # ---- arrivals

    def expect(self, parts: Sequence[Part], arrival: asyncio.Future[None]) -> None:
        """Register rows that are arriving until ``arrival`` is done, and drop held copies of them.

        Raises OverBudget, with nothing changed, when there is no room for them.
        """
        size = sum(sum(part.lengths) * self._item_bytes(part) for part in parts)
        self._require_room(size, f"{sum(len(part.ids) for part in parts)} arriving rows")
        self._arriving_bytes[arrival] = size
        self.expect_failure(parts, arrival)

    def expect_failure(self, parts: Sequence[Part], arrival: asyncio.Future[None]) -> None:
        """As `expect`, for rows that will not arrive: `wait_for` raises the error of ``arrival``. Needs no room."""
        for part in parts:
            held, arriving = self._blocks[part.column], self._arriving[part.column]
            if held:
                self._drop(part.column, held.keys() & set(part.ids))
            if arriving:
                self._partly_stale.update(map(arriving.get, part.ids))
            arriving.update(dict.fromkeys(part.ids, arrival))

    def put_arrived(self, part: Part, flat: torch.Tensor, arrival: asyncio.Future[None]) -> None:
        """Store the rows of a part that has arrived, except rows freed meanwhile or expected from a newer arrival."""
        arriving = self._arriving[part.column]
        stale: list[int] = []
        if arrival in self._partly_stale:
            stale = [item for item in part.ids if arriving.get(item) is not arrival]
        if not stale and len(arriving) == len(part.ids):
            arriving.clear()
        else:
            self._unexpect(part, arrival)
        self._arriving_bytes[arrival] = self._arriving_bytes.get(arrival, 0) - flat.nbytes
        if len(stale) == len(part.ids):
            return
        block = RowBlock(part.ids, Packed(flat.view(self.dtype(part.column)), part.lengths))
        self._held_bytes += block.size
        held = self._blocks[part.column]
        others = {item: held[item] for item in stale if item in held}
        held.update(dict.fromkeys(part.ids, block))
        self._drop(part.column, stale)
        held.update(others)

    def arrival_done(self, arrival: asyncio.Future[None]) -> None:
        """Forget an arrival of which all parts have been stored."""
        self._arriving_bytes.pop(arrival, None)
        self._partly_stale.discard(arrival)

    def arrival_failed(self, parts: Iterable[Part], arrival: asyncio.Future[None]) -> None:
        """Forget an arrival, and these parts of it, which will not arrive."""
        self.arrival_done(arrival)
        for part in parts:
            self._unexpect(part, arrival)

    def _unexpect(self, part: Part, arrival: asyncio.Future[None]) -> None:
        arriving = self._arriving[part.column]
        for item in part.ids:
            if arriving.get(item) is arrival:
                del arriving[item]

    def _has(self, column: str, ids: Sequence[int]) -> bool:
        held = self._blocks[column]
        block = held.get(ids[0]) if ids else None
        # Rows that arrived together are usually read together.
        return (block is not None and block.has_all(ids)) or all(map(held.__contains__, ids))

    def has_group(self, group: int) -> bool:
        """Whether a group column of this group is held."""
        return any(group in held for name, held in self._blocks.items() if self._columns[name].scope == "group")

    def missing(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """The parts with missing rows, reduced to these rows."""
        missing = []
        for part in parts:
            held = self._blocks[part.column]
            if self._has(part.column, part.ids):
                continue
            rows = [row for row in zip(part.ids, part.lengths, strict=True) if row[0] not in held]
            ids, lengths = zip(*rows, strict=True)
            missing.append(Part(part.column, ids, lengths))
        return tuple(missing)

    async def wait_for(self, parts: Iterable[Part], senders: str = "their owners") -> None:
        """Wait until none of these rows is arriving. Raises the error of a failed transfer."""
        futures: set[asyncio.Future[None] | None] = set()
        for part in parts:
            if self._arriving[part.column]:
                futures.update(map(self._arriving[part.column].get, part.ids))
        arrivals = {arrival for arrival in futures if arrival is not None}
        if arrivals:
            # Not gather: cancellation of one waiter must not cancel the arrival that others wait for.
            await wait_all(
                arrivals, BoundedElsewhere("the deadline of each lane"), "tensors that are arriving", senders
            )
        for arrival in arrivals:
            arrival.result()

    def free(self, columns: Sequence[str], slots: Sequence[int], groups: Sequence[int]) -> None:
        """Drop columns (empty: all) of these slots and groups."""
        for name in columns or list(self._columns):
            arriving, held = self._arriving[name], self._blocks[name]
            items = slots if self.scope(name) == "slot" else groups
            if not self._drop_block(name, items):
                self._drop(name, {item for item in items if item in held})
            if arriving:
                self._partly_stale.update([arriving.pop(item, None) for item in items])

    def inventory(self) -> tuple[Part, ...]:
        """All rows that this store holds."""
        parts = []
        for name, held in self._blocks.items():
            if held:
                ids = tuple(sorted(held))
                parts.append(Part(name, ids, tuple(len(held[item].row(item)) for item in ids)))
        return tuple(parts)

    def statistics(self) -> tuple[int, int]:
        """Number of tensors held, and the bytes of memory they occupy."""
        return sum(map(len, self._blocks.values())), self._held_bytes


def _tensors(rows: Rows) -> Sequence[torch.Tensor]:
    return (rows.values,) if isinstance(rows, Packed) else rows
