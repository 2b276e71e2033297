"""Lanes over TCP between CPUs: one two-rank gloo group per lane.

gloo's send is a rendezvous: no byte moves before the other end has posted its receive. Large rows are sent and received
without a copy; small ones are gathered into chunks on the sending side.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

from flowrt.runtime.waits import blocking
from flowrt.transport.buffers import BufferPool
from flowrt.transport.lanes.channel import (
    RECEIVER_RANK,
    SENDER_RANK,
    STAGE_BYTES,
    Chunk,
    ColumnRun,
    SignalStore,
    TransferRateLimit,
    split_run,
)

IN_FLIGHT = 4
TAGS = 1 << 30


class _Work(Protocol):
    def wait(self) -> object: ...


class GlooTransport:
    """Opens gloo channels on the address ``host``. One listening thread serves all groups of this transport."""

    def __init__(self, host: str) -> None:
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def make_group(self, store: Store, rank: int, deadline_s: float) -> ProcessGroup:
        """Make a group with the other rank. Blocks; raises RuntimeError if that does not connect in ``deadline_s``."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=deadline_s)
        return ProcessGroupGloo(store, rank, 2, options)  # type: ignore[return-value]

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> "GlooChannel":
        rank = SENDER_RANK if sending else RECEIVER_RANK
        return GlooChannel(self.make_group(store, rank, rate_limit.deadline_s), store, rate_limit)


class GlooChannel:
    """One end of a two-rank group. The deadline of a chunk counts from the completion of the previous chunk."""

    def __init__(self, group: ProcessGroup, store: SignalStore, rate_limit: TransferRateLimit) -> None:
        self._group: ProcessGroup | None = group
        self._lane = store.lane
        self._peer = store.peer
        self._rate_limit = rate_limit
        self._chunks = 0
        self._staging: list[torch.Tensor] = []
        self._buffers = BufferPool()

    def send(self, runs: Sequence[ColumnRun]) -> None:
        group = self._group
        assert group is not None
        in_flight: deque[tuple[_Work, int]] = deque()
        for run in runs:
            for chunk in split_run(run.sizes):
                if len(in_flight) == IN_FLIGHT:
                    self._complete(*in_flight.popleft())
                in_flight.append((group.send([self._chunk_of(run, chunk)], RECEIVER_RANK, self._tag()), chunk.size))
        for work, size in in_flight:
            self._complete(work, size)

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        group = self._group
        assert group is not None
        received = [self._buffers.take(sum(rows)) for rows in sizes]
        in_flight: deque[tuple[_Work, int]] = deque()
        for flat, rows in zip(received, sizes, strict=True):
            for chunk in split_run(rows):
                if len(in_flight) == IN_FLIGHT:
                    self._complete(*in_flight.popleft())
                target = flat[chunk.start : chunk.start + chunk.size]
                in_flight.append((group.recv([target], SENDER_RANK, self._tag()), chunk.size))
        for work, size in in_flight:
            self._complete(work, size)
        return received

    def on_idle(self) -> None:
        self._staging.clear()
        self._buffers.release_idle()

    def interrupt(self) -> None:
        """No effect: a wait of gloo only ends when the other end closes its socket, or at the deadline."""

    def close(self) -> None:
        self._group = None

    def _complete(self, work: _Work, size: int) -> None:
        blocking(work.wait, self._rate_limit.deadline_s, f"a chunk over lane {self._lane}", self._peer)
        self._rate_limit.moved(size)

    def _tag(self) -> int:
        self._chunks += 1
        return self._chunks % TAGS

    def _chunk_of(self, run: ColumnRun, chunk: Chunk) -> torch.Tensor:
        view = run.view(chunk)
        if view is not None and view.is_cpu:
            return view
        if chunk.size > 2 * STAGE_BYTES:
            staged = torch.empty(chunk.size, dtype=torch.uint8)
        else:
            # One buffer per chunk in flight: the earlier chunk in this buffer has completed.
            slot = self._chunks % IN_FLIGHT
            while len(self._staging) <= slot:
                self._staging.append(torch.empty(2 * STAGE_BYTES, dtype=torch.uint8))
            staged = self._staging[slot][: chunk.size]
        run.copy(chunk, staged)
        return staged
