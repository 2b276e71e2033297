"""Blocks of rows of one column that were stored together. Single rows are views that are made when they are read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


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

    Consecutive rows, as of a batch that was split, are packed without a copy. Other rows are copied where necessary.
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
        """These rows without a copy, if they are consecutive rows of a packed block; else None."""
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
            self._index_of = {one: index for index, one in enumerate(self.ids)}
        return self._index_of[item]

    def _start(self, index: int) -> int:
        if self._starts is None:
            self._starts = [0, *accumulate(self.lengths)]
        return self._starts[index]
