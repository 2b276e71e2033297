"""A worker's tensors by (column, id): what it made, what it fetched, and what is on its way here."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import torch

from flowrt.errors import LocalProtocolError, OverBudget, TransferError
from flowrt.transport.pieces import Run
from flowrt.transport.rows import Block, Packed, lengths_of, settled
from flowrt.waiting import Guard, all_of
from flowrt.wire.records import ITEM_BYTES, Column, Part

Rows = Sequence[torch.Tensor] | Packed


class TensorStore:
    """Lives on the event loop's thread. Readers get the stored tensors themselves and may keep them.

    With a budget, whatever would not fit beside what is here and what is on its way raises OverBudget and changes
    nothing: it does not wait, because what has to be freed first may be waiting for exactly this.
    """

    def __init__(self, columns: Sequence[Column], budget_bytes: int = 0) -> None:
        self._columns = {column.name: column for column in columns}
        self._blocks: dict[str, dict[int, Block]] = {column.name: {} for column in columns}
        self._arriving: dict[str, dict[int, asyncio.Future[None]]] = {column.name: {} for column in columns}
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._coming: dict[asyncio.Future[None], int] = {}
        # Arrivals of which something was freed, or is expected anew, before they were here.
        self._overtaken: set[asyncio.Future[None] | None] = set()

    # ---- what columns are

    def check(self, column: str, rows: Rows) -> None:
        """Raises LocalProtocolError when one of these is not what the column takes."""
        dtype = self.dtype(column)
        for tensor in _tensors(rows):
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise LocalProtocolError(
                    f"column {column!r} takes 1-D {dtype}, not {tensor.dim()}-D {tensor.dtype}; convert it first"
                )
        if isinstance(rows, Packed) and sum(rows.lengths) != len(rows.values):
            raise LocalProtocolError(
                f"column {column!r}: rows of {sum(rows.lengths)} elements were said to be in {len(rows.values)}"
            )

    def dtype(self, column: str) -> torch.dtype:
        found = getattr(torch, self._column(column).dtype)
        assert isinstance(found, torch.dtype)
        return found

    def scope(self, column: str) -> str:
        return self._column(column).scope

    def _column(self, column: str) -> Column:
        try:
            return self._columns[column]
        except KeyError:
            raise LocalProtocolError(
                f"there is no tensor column {column!r}; the recipe has {sorted(self._columns)}"
            ) from None

    # ---- in

    def put(self, column: str, item: int, tensor: torch.Tensor) -> None:
        """Keep a 1-D tensor, as `put_rows` does."""
        self.put_rows(column, (item,), (tensor,))

    def check_room(self, columns: Mapping[str, Rows]) -> None:
        """Raises OverBudget when these rows would not fit."""
        size = sum(row.nbytes for rows in columns.values() for row in _tensors(rows))
        self._need(size, f"{sum(map(len, columns.values()))} rows of {', '.join(columns)}")

    def put_rows(self, column: str, ids: Sequence[int], rows: Rows, promised: bool = False) -> None:
        """Keep these rows: the tensors themselves, or copies of those that are small parts of larger memory.

        Raises LocalProtocolError when a dtype or shape is not the column's, and OverBudget when there is no room
        (unless it was ``promised`` before).
        """
        self.check(column, rows)
        if len(ids) != len(rows):
            raise LocalProtocolError(f"column {column!r}: {len(rows)} rows came for {len(ids)} ids")
        if not ids:
            return
        block, held = Block(ids, rows if isinstance(rows, Packed) else settled(rows)), self._blocks[column]
        before = [item for item in ids if item in held] if held else []
        if not promised:
            replaced = sum(held[item].row(item).nbytes for item in before) if self._budget_bytes else 0
            self._need(block.size - replaced, f"{len(ids)} rows of {column}")
        self._drop(column, before)
        self._held_bytes += block.size
        held.update(dict.fromkeys(ids, block))

    def _need(self, size: int, what: str) -> None:
        held, coming = self._held_bytes, sum(self._coming.values())
        if self._budget_bytes and held + coming + size > self._budget_bytes:
            raise OverBudget(
                f"{size} bytes for {what} do not fit into this worker's store: {held} are held and {coming} on their "
                f"way, of {self._budget_bytes}; raise controller.store_gb, or keep fewer samples at a time"
            )

    def _drop(self, column: str, items: Iterable[int]) -> None:
        """Rows that are here are not wanted any more: those of one block together."""
        held = self._blocks[column]
        of: dict[Block, list[int]] = {}
        for item in items:
            of.setdefault(held.pop(item), []).append(item)
        for block, dropped in of.items():
            self._held_bytes -= block.size
            block.drop(dropped)
            self._held_bytes += block.size

    def _drop_together(self, column: str, items: Sequence[int]) -> bool:
        """What came together goes together, most often: a whole block, in a fraction of the time."""
        held = self._blocks[column]
        block = held.get(items[0]) if items else None
        if block is None or not block.has_all(items):
            return False
        for item in items:
            del held[item]
        self._held_bytes -= block.size
        return True

    # ---- out

    def get(self, column: str, item: int) -> torch.Tensor:
        """A tensor that is here. Raises LocalProtocolError when it is not."""
        return self._block(column, item).row(item)

    def _block(self, column: str, item: int) -> Block:
        try:
            return self._blocks[column][item]
        except KeyError:
            raise LocalProtocolError(f"{column} of {item} is not in this worker's store") from None

    def rows(self, column: str, ids: Sequence[int]) -> Rows:
        """Rows that are here: packed where they lie so, else one by one. Raises LocalProtocolError."""
        if not ids:
            return ()
        ids = tuple(ids)
        packed = self._block(column, ids[0]).stretch(ids)
        if packed is not None and self._has(column, ids):
            return packed
        return [self._block(column, item).row(item) for item in ids]

    def runs(self, parts: Iterable[Part]) -> list[Run]:
        """What is sent for these parts, a run for each. Raises TransferError when it is not what was announced."""
        runs = []
        for part in parts:
            rows = self.rows(part.column, part.ids)
            lengths = lengths_of(rows)
            if lengths != part.lengths:
                found, said = next(both for both in zip(lengths, part.lengths, strict=True) if both[0] != both[1])
                raise TransferError(f"column {part.column} has {found} elements where {said} were announced")
            sizes = self.sizes(part)
            runs.append(Run(sizes, flat=rows.values) if isinstance(rows, Packed) else Run(sizes, rows))
        return runs

    def sizes(self, part: Part) -> Sequence[int]:
        """Bytes of each row of a part."""
        item_bytes = self._item_bytes(part)
        return part.lengths if item_bytes == 1 else [length * item_bytes for length in part.lengths]

    def _item_bytes(self, part: Part) -> int:
        return ITEM_BYTES[self._column(part.column).dtype]

    # ---- on the way

    def expect(self, parts: Sequence[Part], arrival: asyncio.Future[None]) -> None:
        """These tensors come with ``arrival``; a copy that is here already is void from now on.

        Raises OverBudget, with nothing changed, when there is no room for them.
        """
        size = sum(sum(part.lengths) * self._item_bytes(part) for part in parts)
        self._need(size, f"{sum(len(part.ids) for part in parts)} rows that are to arrive")
        self._coming[arrival] = size
        self.refuse(parts, arrival)

    def refuse(self, parts: Sequence[Part], arrival: asyncio.Future[None]) -> None:
        """What becomes of these is said by ``arrival``, until they are freed or expected anew."""
        for part in parts:
            held, arriving = self._blocks[part.column], self._arriving[part.column]
            if held:
                self._drop(part.column, held.keys() & set(part.ids))
            if arriving:
                self._overtaken.update(map(arriving.get, part.ids))
            arriving.update(dict.fromkeys(part.ids, arrival))

    def arrive(self, part: Part, flat: torch.Tensor, arrival: asyncio.Future[None]) -> None:
        """The bytes of a part are here; rows are kept unless they were freed on their way or are expected anew."""
        arriving = self._arriving[part.column]
        late: list[int] = []
        if arrival in self._overtaken:
            late = [item for item in part.ids if arriving.get(item) is not arrival]
        if not late and len(arriving) == len(part.ids):
            arriving.clear()
        else:
            self._unexpect(part, arrival)
        self._coming[arrival] = self._coming.get(arrival, 0) - flat.nbytes
        if len(late) == len(part.ids):
            return
        block = Block(part.ids, Packed(flat.view(self.dtype(part.column)), part.lengths))
        self._held_bytes += block.size
        held = self._blocks[part.column]
        others = {item: held[item] for item in late if item in held}
        held.update(dict.fromkeys(part.ids, block))
        self._drop(part.column, late)
        held.update(others)

    def arrived(self, arrival: asyncio.Future[None]) -> None:
        """Nothing more comes with this."""
        self._coming.pop(arrival, None)
        self._overtaken.discard(arrival)

    def fail(self, parts: Iterable[Part], arrival: asyncio.Future[None]) -> None:
        """It will not come."""
        self.arrived(arrival)
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
        # What came together is asked for together, most often.
        return (block is not None and block.has_all(ids)) or all(map(held.__contains__, ids))

    def missing(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Of these parts, what is not here."""
        found = []
        for part in parts:
            held = self._blocks[part.column]
            if self._has(part.column, part.ids):
                continue
            rows = [row for row in zip(part.ids, part.lengths, strict=True) if row[0] not in held]
            ids, lengths = zip(*rows, strict=True)
            found.append(Part(part.column, ids, lengths))
        return tuple(found)

    async def wait_for(self, parts: Iterable[Part], senders: str = "their owners") -> None:
        """Return when all these tensors are here. Raises what their transfer raised."""
        found: set[asyncio.Future[None] | None] = set()
        for part in parts:
            if self._arriving[part.column]:
                found.update(map(self._arriving[part.column].get, part.ids))
        arrivals = {arrival for arrival in found if arrival is not None}
        if arrivals:
            # Not gather: a waiter that is cancelled must not cancel the arrival that others wait for.
            await all_of(arrivals, Guard("the deadline of each lane"), "tensors on their way here", senders)
        for arrival in arrivals:
            arrival.result()

    def free(self, columns: Sequence[str], slots: Sequence[int], groups: Sequence[int]) -> None:
        """Drop columns (none named: all) of these slots and groups."""
        for name in columns or list(self._columns):
            arriving, held = self._arriving[name], self._blocks[name]
            items = slots if self.scope(name) == "slot" else groups
            if not self._drop_together(name, items):
                self._drop(name, {item for item in items if item in held})
            if arriving:
                self._overtaken.update([arriving.pop(item, None) for item in items])

    def inventory(self) -> tuple[Part, ...]:
        """All that is here."""
        parts = []
        for name, held in self._blocks.items():
            if held:
                ids = tuple(sorted(held))
                parts.append(Part(name, ids, tuple(len(held[item].row(item)) for item in ids)))
        return tuple(parts)

    def statistics(self) -> tuple[int, int]:
        """Tensors held, and the bytes of memory that they keep."""
        return sum(map(len, self._blocks.values())), self._held_bytes


def _tensors(rows: Rows) -> Sequence[torch.Tensor]:
    return (rows.values,) if isinstance(rows, Packed) else rows
