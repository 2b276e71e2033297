"""Rows of one column that came together, kept together: a store holds blocks, and makes rows of them when asked."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of one column end to end: a flat tensor and how many elements each row has."""

    values: torch.Tensor
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> Sequence[torch.Tensor]:
        """The rows, views of ``values``."""
        return torch.split(self.values, list(self.lengths))


def lengths_of(rows: Sequence[torch.Tensor] | Packed) -> tuple[int, ...]:
    """Elements of each row."""
    return tuple(rows.lengths) if isinstance(rows, Packed) else tuple(map(len, rows))


def settled(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | Packed:
    """Rows as they can be kept and sent: contiguous, no part of a graph, no small part of larger memory.

    Rows that lie end to end, as those of a batch that was cut, are taken as they lie.
    """
    first = rows[0]
    if len(rows) > 1 and first.untyped_storage().nbytes() != first.nbytes:
        packed = _end_to_end(rows)
        if packed is not None:
            return packed
    covered: Counter[int] = Counter()
    memory = [row.untyped_storage() for row in rows]
    for row, where in zip(rows, memory, strict=True):
        covered[where.data_ptr()] += row.nbytes
    return [
        row.detach().clone(memory_format=torch.contiguous_format)
        if not row.is_contiguous() or covered[where.data_ptr()] * 2 < where.nbytes()
        else row.detach()
        if row.requires_grad
        else row
        for row, where in zip(rows, memory, strict=True)
    ]


def _end_to_end(rows: Sequence[torch.Tensor]) -> Packed | None:
    first, end, lengths = rows[0], rows[0].data_ptr(), lengths_of(rows)
    for row in rows:
        if row.data_ptr() != end or not row.is_contiguous():
            return None
        end += row.nbytes
    memory = first.untyped_storage()
    if end > memory.data_ptr() + memory.nbytes() or (end - first.data_ptr()) * 2 < memory.nbytes():
        return None
    return Packed(first.detach().as_strided((sum(lengths),), (1,)), lengths)


class Block:
    """Rows with their ids: packed, or one by one. A packed one that is mostly dropped is taken apart."""

    __slots__ = ("_gone", "_loose", "_packed", "_place", "_starts", "ids", "lengths", "live_bytes", "size")

    def __init__(self, ids: Sequence[int], rows: Sequence[torch.Tensor] | Packed) -> None:
        self.ids = tuple(ids)
        self._place: dict[int, int] | None = None
        self._starts: list[int] | None = None
        self._gone: set[int] = set()
        self._loose: list[torch.Tensor | None] = []
        self._packed: torch.Tensor | None = None
        if isinstance(rows, Packed):
            self._packed, self.lengths = rows.values, tuple(rows.lengths)
            self.live_bytes = self.size = rows.values.nbytes
        else:
            self._loose, self.lengths = list(rows), lengths_of(rows)
            self.live_bytes = self.size = sum(row.nbytes for row in rows)

    def row(self, item: int) -> torch.Tensor:
        index = self._index(item)
        if self._packed is None:
            row = self._loose[index]
            assert row is not None
            return row
        start = self._start(index)
        return self._packed[start : start + self.lengths[index]]

    def drop(self, items: Iterable[int]) -> None:
        """These rows are no longer wanted. One row must not keep a whole packet in memory: what is left moves out."""
        for item in items:
            index = self._index(item)
            self._gone.add(index)
            if self._packed is None:
                row = self._loose[index]
                assert row is not None
                self.live_bytes -= row.nbytes
                self._loose[index] = None
            else:
                self.live_bytes -= self.lengths[index] * self._packed.itemsize
        if self._packed is None:
            self.size = self.live_bytes
        elif self.live_bytes * 2 < self.size or len(self._gone) == len(self.ids):
            rows = torch.split(self._packed, list(self.lengths)) if len(self._gone) < len(self.ids) else ()
            self._loose = [None if place in self._gone else row.clone() for place, row in enumerate(rows)]
            self._packed, self.size = None, self.live_bytes

    def has_all(self, ids: Sequence[int]) -> bool:
        """These are the rows of this block, and all of them are here still."""
        return not self._gone and (self.ids is ids or self.ids == ids)

    def stretch(self, ids: tuple[int, ...]) -> Packed | None:
        """These rows as they lie, when they are a stretch of a packed block in its order; None otherwise."""
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
        if self._place is None:
            self._place = {one: index for index, one in enumerate(self.ids)}
        return self._place[item]

    def _start(self, index: int) -> int:
        if self._starts is None:
            self._starts = [0, *accumulate(self.lengths)]
        return self._starts[index]
