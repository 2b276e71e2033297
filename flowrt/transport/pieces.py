"""Runs of rows, and how they are cut into the pieces that move as one.

Both ends cut alike, from nothing but the sizes of the rows, so a piece needs no header.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from flowrt.transport.memory import copy_bytes

PIECE_BYTES = 16 * 1024 * 1024
"""The most that moves as one."""
STAGE_BYTES = 1024 * 1024
"""Smaller rows move together, in pieces of at least this much; a larger one is sent from where it lies."""


class Piece(NamedTuple):
    """Rows ``first`` to ``last`` of a run, or a part of one large row from ``offset`` on."""

    first: int
    last: int
    offset: int  # into row `first`
    start: int  # into the run
    size: int


def cut(sizes: Sequence[int], stage_bytes: int = STAGE_BYTES) -> Iterator[Piece]:
    """The pieces of a run with rows of these sizes, in order; none for a run without bytes."""
    total = sum(sizes)
    if total <= stage_bytes:
        if total:
            yield Piece(0, len(sizes), 0, 0, total)
        return
    if max(sizes) < stage_bytes:
        yield from _cut_small(sizes, stage_bytes)
        return
    first = start = size = 0
    for row, row_size in enumerate(sizes):
        if row_size >= stage_bytes:
            if size:
                yield Piece(first, row, 0, start, size)
                start += size
            for offset in range(0, row_size, PIECE_BYTES):
                part = min(PIECE_BYTES, row_size - offset)
                yield Piece(row, row + 1, offset, start, part)
                start += part
            first, size = row + 1, 0
            continue
        size += row_size
        if size >= stage_bytes:
            yield Piece(first, row + 1, 0, start, size)
            start += size
            first, size = row + 1, 0
    if size:
        yield Piece(first, len(sizes), 0, start, size)


def _cut_small(sizes: Sequence[int], stage_bytes: int) -> Iterator[Piece]:
    """The same for rows that are all small: thousands, looked at a piece at a time."""
    ends = list(accumulate(sizes))
    first = start = 0
    while start < ends[-1]:
        last = min(bisect_left(ends, start + stage_bytes, first) + 1, len(ends))
        yield Piece(first, last, 0, start, ends[last - 1] - start)
        first, start = last, ends[last - 1]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one dtype to be sent end to end: 1-D contiguous tensors, or one tensor that has them end to end."""

    sizes: Sequence[int]  # bytes of each row
    rows: Sequence[torch.Tensor] = ()
    flat: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Run":
        """One tensor as one row."""
        return cls((tensor.nbytes,), flat=tensor.reshape(-1))

    def in_place(self, piece: Piece) -> torch.Tensor | None:
        """The bytes of a piece where they lie; None for rows that lie apart."""
        if self.flat is not None:
            return self.flat.view(torch.uint8)[piece.start : piece.start + piece.size]
        if piece.last - piece.first == 1:
            return self.rows[piece.first].view(torch.uint8)[piece.offset : piece.offset + piece.size]
        return None

    def copy(self, piece: Piece, out: torch.Tensor) -> None:
        """Copy the bytes of a piece, from whatever device they are on."""
        found = self.in_place(piece)
        if found is not None:
            copy_bytes(out, found)
            return
        rows = self.rows[piece.first : piece.last]
        dtype = rows[0].dtype
        if not all(row.device == out.device for row in rows):
            start = 0
            for row in rows:
                out[start : start + row.nbytes].copy_(row.view(torch.uint8))
                start += row.nbytes
        elif dtype == torch.bool:
            # Whatever bytes they are, they are moved as they are.
            torch.cat([row.view(torch.uint8) for row in rows], out=out)
        else:
            torch.cat(list(rows), out=out.view(dtype))
