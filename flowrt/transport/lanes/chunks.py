"""Runs of rows and their chunks, the units of a transfer, and the minimum rate of a transfer.

- Both ends split a run by the sizes of its rows alone, so a chunk has no header.
- A transfer that is far too slow fails like one that hangs.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import NamedTuple

import torch

from flowrt.errors import TransferError
from flowrt.transport.buffers import copy_bytes

MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""The largest chunk."""
STAGE_BYTES = 1024 * 1024
"""Smaller rows are gathered into chunks of at least this size; larger rows are sent without a copy."""

MIN_BYTES_PER_S = 1e6
"""Default minimum rate of a transfer."""


class Chunk(NamedTuple):
    """Rows [first, last) of a run, or a part of one large row. ``offset``, ``start`` and ``size`` are bytes."""

    first: int
    last: int
    offset: int  # into row `first`
    start: int  # into the run
    size: int


def split_run(sizes: Sequence[int], stage_bytes: int = STAGE_BYTES) -> Iterator[Chunk]:
    """The chunks of a run with rows of these sizes in bytes, in order; none for a run without bytes."""
    total = sum(sizes)
    if total <= stage_bytes:
        if total:
            yield Chunk(first=0, last=len(sizes), offset=0, start=0, size=total)
        return
    if max(sizes) < stage_bytes:
        yield from _split_small(sizes, stage_bytes)
        return
    first = start = size = 0
    for row, row_size in enumerate(sizes):
        if row_size >= stage_bytes:
            if size:
                yield Chunk(first=first, last=row, offset=0, start=start, size=size)
                start += size
            for offset in range(0, row_size, MAX_CHUNK_BYTES):
                part = min(MAX_CHUNK_BYTES, row_size - offset)
                yield Chunk(first=row, last=row + 1, offset=offset, start=start, size=part)
                start += part
            first, size = row + 1, 0
            continue
        size += row_size
        if size >= stage_bytes:
            yield Chunk(first=first, last=row + 1, offset=0, start=start, size=size)
            start += size
            first, size = row + 1, 0
    if size:
        yield Chunk(first=first, last=len(sizes), offset=0, start=start, size=size)


def _split_small(sizes: Sequence[int], stage_bytes: int) -> Iterator[Chunk]:
    """The same for rows that are all small: one step per chunk, not per row."""
    ends = list(accumulate(sizes))
    first = start = 0
    while start < ends[-1]:
        last = min(bisect_left(ends, start + stage_bytes, first) + 1, len(ends))
        yield Chunk(first=first, last=last, offset=0, start=start, size=ends[last - 1] - start)
        first, start = last, ends[last - 1]


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """Rows of one dtype to send: 1-D contiguous tensors, or one tensor of all rows concatenated."""

    sizes: Sequence[int]  # bytes of each row
    rows: Sequence[torch.Tensor] = ()
    flat: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "ColumnRun":
        """A run of one row."""
        return cls((tensor.nbytes,), flat=tensor.reshape(-1))

    def view(self, chunk: Chunk) -> torch.Tensor | None:
        """The bytes of a chunk without a copy; None for a chunk of several separate rows."""
        if self.flat is not None:
            return self.flat.view(torch.uint8)[chunk.start : chunk.start + chunk.size]
        if chunk.last - chunk.first == 1:
            return self.rows[chunk.first].view(torch.uint8)[chunk.offset : chunk.offset + chunk.size]
        return None

    def copy(self, chunk: Chunk, out: torch.Tensor) -> None:
        """Copy the bytes of a chunk, from any device."""
        found = self.view(chunk)
        if found is not None:
            copy_bytes(out, found)
            return
        rows = self.rows[chunk.first : chunk.last]
        dtype = rows[0].dtype
        if not all(row.device == out.device for row in rows):
            start = 0
            for row in rows:
                out[start : start + row.nbytes].copy_(row.view(torch.uint8))
                start += row.nbytes
        elif dtype == torch.bool:
            # As bytes: a bool may hold other values than 0 and 1, and bytes are never converted.
            torch.cat([row.view(torch.uint8) for row in rows], out=out)
        else:
            torch.cat(list(rows), out=out.view(dtype))


class TransferRateLimit:
    """The deadline and minimum rate of one lane, and the progress of its current transfer.

    A transfer of n bytes ends within ``deadline_s + n / bytes_per_s`` seconds, or fails.
    """

    def __init__(self, lane: str, deadline_s: float, bytes_per_s: float = MIN_BYTES_PER_S) -> None:
        self.deadline_s = deadline_s
        self._lane = lane
        self._bytes_per_s = bytes_per_s
        self._begun_s = 0.0
        self._moved = 0

    def begin(self) -> None:
        """Start the next transfer."""
        self._begun_s = monotonic()
        self._moved = 0

    def moved(self, size: int) -> None:
        """Count ``size`` more bytes. Raises TransferError when the transfer is below the minimum rate."""
        self._moved += size
        took_s = monotonic() - self._begun_s
        if took_s > self.deadline_s + self._moved / self._bytes_per_s:
            raise TransferError(
                f"lane {self._lane} is too slow: {self._moved / 1e6:.1f} MB moved in {took_s:.0f} s, and after "
                f"{self.deadline_s:.0f} s at least {self._bytes_per_s / 1e6:.3g} MB/s are required; check the link, or "
                "lower controller.min_transfer_mb_per_s"
            )
