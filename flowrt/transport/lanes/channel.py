"""Channels: how a lane moves bytes. The interface of a transport, and what transports share.

- A channel carries messages in order, in one direction, for one incarnation of a lane.
- A message is one run per column: rows of one dtype, concatenated without padding. Both ends have the sizes of all rows
  and split a run into chunks by these alone, so there are no headers.
- All calls block and come from the lane's thread. A call fails when nothing has moved for the lane's deadline, or less
  than the minimum rate (`TransferRateLimit`): a transfer that is far too slow fails like one that hangs.
- The two ends of a lane exchange the keys by which they connect in `SignalStore`, which sends them to the other end as
  `RendezvousKey` messages, through the controller. So a lane needs no store server, no fixed port and no world group,
  and only workers that the controller has admitted can connect.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from time import monotonic
from typing import NamedTuple, Protocol

import torch
from torch.distributed import Store

from flowrt.errors import TransferError, WaitExpired
from flowrt.protocol.messages import MAX_SIGNAL_BYTES
from flowrt.runtime.waits import poll_until_true
from flowrt.transport.buffers import copy_bytes

# ---- rendezvous

SENDER_RANK = 0
RECEIVER_RANK = 1


class SignalStore(Store):
    """The store of one lane incarnation, at one end; ``post`` sends a key to the other end.

    Waits for keys end after ``deadline_s`` seconds. torch calls the store on the lane's thread; the event loop calls
    ``deliver`` and ``close``.
    """

    def __init__(
        self, lane: str, post: Callable[[str, bytes], None], deadline_s: float, peer: str = "the other end"
    ) -> None:
        super().__init__()
        self.lane = lane
        self.peer = peer
        self._post = post
        self._deadline_s = deadline_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = ""

    def deliver(self, key: str, value: bytes) -> None:
        """Accept a key that the other end has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key, and send it to the other end. Raises TransferError if it has more than MAX_SIGNAL_BYTES."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(data) > MAX_SIGNAL_BYTES:
            raise TransferError(
                f"lane {self.lane}: its library wants to send {len(data)} bytes as key {key!r}, more than "
                f"{MAX_SIGNAL_BYTES}; choose other lanes with controller.lanes"
            )
        self.deliver(key, data)
        self._post(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises TransferError at the deadline, or if the store is closed before."""
        deadline_s = self._deadline_s if timeout is None else min(self._deadline_s, timeout.total_seconds())
        with self._changed:
            try:
                poll_until_true(
                    self._changed,
                    lambda: self._closed or self._has(keys),
                    deadline_s,
                    f"the rendezvous of lane {self.lane}",
                    self.peer,
                )
            except WaitExpired:
                reason = f"lane {self.lane}: the other end did not connect within {deadline_s:.0f} s"
                raise TransferError(reason) from None
            if not self._has(keys):
                raise TransferError(f"lane {self.lane}: {self._closed}")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return self._has(keys)

    def take(self, key: str) -> bytes:
        """Wait for a key as `wait` does, remove it, and return its value."""
        self.wait([key])
        return self._values.pop(key)

    def close(self, reason: str) -> None:
        """Fail open and later waits for keys that are not set: the other end will not connect."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


# ---- runs and chunks

MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""The largest chunk."""
STAGE_BYTES = 1024 * 1024
"""Smaller rows are gathered into chunks of about this size; larger rows are sent without a copy."""

MIN_BYTES_PER_S = 1e6
"""Default minimum rate of a transfer, in bytes per second."""


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
    """`split_run` for rows smaller than ``stage_bytes``: one iteration per chunk, not per row."""
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
        """The bytes of a chunk, 1-D uint8, without a copy; None for a chunk of several separate rows."""
        if self.flat is not None:
            return self.flat.view(torch.uint8)[chunk.start : chunk.start + chunk.size]
        if chunk.last - chunk.first == 1:
            return self.rows[chunk.first].view(torch.uint8)[chunk.offset : chunk.offset + chunk.size]
        return None

    def copy(self, chunk: Chunk, out: torch.Tensor) -> None:
        """Copy the bytes of a chunk, from any device, to ``out``: 1-D uint8, of the chunk's size."""
        view = self.view(chunk)
        if view is not None:
            copy_bytes(out, view)
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

    A transfer fails when m bytes have moved and this took longer than ``deadline_s + m / bytes_per_s`` seconds. The
    rate is checked when bytes move; a transfer on which nothing moves fails by the channel's own deadline.
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
        """Count ``size`` more bytes. Raises TransferError if the transfer is too slow."""
        self._moved += size
        took_s = monotonic() - self._begun_s
        if took_s > self.deadline_s + self._moved / self._bytes_per_s:
            raise TransferError(
                f"lane {self._lane} is too slow: {self._moved / 1e6:.1f} MB moved in {took_s:.0f} s, and after "
                f"{self.deadline_s:.0f} s at least {self._bytes_per_s / 1e6:.3g} MB/s are required; check the link, or "
                "lower controller.min_transfer_mb_per_s"
            )


# ---- the interface of a transport


class Channel(Protocol):
    """One end of one incarnation of a lane. Calls raise TransferError or RuntimeError if the other end is closed."""

    def send(self, runs: Sequence[ColumnRun]) -> None:
        """Send one message when the other end is ready for it. The caller may change the rows after the call."""
        ...

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Receive one message whose runs have rows of these sizes in bytes.

        Returns the bytes of each run, a 1-D uint8 tensor in host memory. The caller may keep and change them: memory is
        reused once no tensor views it.
        """
        ...

    def on_idle(self) -> None:
        """Free memory that was kept for reuse; called when nothing has moved for a while."""
        ...

    def interrupt(self) -> None:
        """Make a blocked call of the lane's thread fail, at once if the transport can do that."""
        ...

    def close(self) -> None:
        """Close the channel, which fails the other end."""
        ...


class Transport(Protocol):
    """Opens channels of one kind."""

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> Channel:
        """Connect to the other end through the lane's rendezvous store. Blocks.

        Raises TransferError or RuntimeError if the other end does not connect within ``rate_limit.deadline_s``.
        """
        ...
