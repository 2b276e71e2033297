"""Lanes over TCP on CPU: a two-rank gloo group for each.

gloo's send is a rendezvous: no byte moves before the other end has posted its receive. Large rows are sent from where
they are and received where they stay; small ones are gathered into pieces on the sending side.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

from flowrt.transport.pace import Pace
from flowrt.transport.pieces import STAGE_BYTES, Piece, Run, cut
from flowrt.transport.rendezvous import RECEIVER_RANK, SENDER_RANK, SignalStore
from flowrt.transport.warm import WarmMemory
from flowrt.waiting import blocking

IN_FLIGHT = 4
TAGS = 1 << 30


class _Work(Protocol):
    def wait(self) -> object: ...


class GlooTransport:
    """One device and so one listening thread for all groups of this process."""

    def __init__(self, host: str) -> None:
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def make_group(self, store: Store, rank: int, deadline_s: float) -> ProcessGroup:
        """Meet the other rank and connect. Blocks; raises RuntimeError when it does not come in time."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=deadline_s)
        return ProcessGroupGloo(store, rank, 2, options)  # type: ignore[return-value]

    def open(self, store: SignalStore, sending: bool, pace: Pace) -> "GlooChannel":
        rank = SENDER_RANK if sending else RECEIVER_RANK
        return GlooChannel(self.make_group(store, rank, pace.deadline_s), store, pace)


class GlooChannel:
    """One end of a group. A wait counts its deadline from the piece before: they follow each other on the wire."""

    def __init__(self, group: ProcessGroup, store: SignalStore, pace: Pace) -> None:
        self._group: ProcessGroup | None = group
        self._lane, self._peer = store.lane, store.peer
        self._pace = pace
        self._piece = 0
        self._staging: list[torch.Tensor] = []
        self._memory = WarmMemory()

    def send(self, runs: Sequence[Run]) -> None:
        group = self._group
        assert group is not None
        flying: deque[tuple[_Work, int]] = deque()
        for run in runs:
            for piece in cut(run.sizes):
                if len(flying) == IN_FLIGHT:
                    self._complete(*flying.popleft())
                flying.append((group.send([self._piece_of(run, piece)], RECEIVER_RANK, self._tag()), piece.size))
        for work, size in flying:
            self._complete(work, size)

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        group = self._group
        assert group is not None
        received = [self._memory.take(sum(rows)) for rows in sizes]
        flying: deque[tuple[_Work, int]] = deque()
        for flat, rows in zip(received, sizes, strict=True):
            for piece in cut(rows):
                if len(flying) == IN_FLIGHT:
                    self._complete(*flying.popleft())
                target = flat[piece.start : piece.start + piece.size]
                flying.append((group.recv([target], SENDER_RANK, self._tag()), piece.size))
        for work, size in flying:
            self._complete(work, size)
        return received

    def rest(self) -> None:
        self._staging.clear()
        self._memory.rest()

    def interrupt(self) -> None:
        """Nothing wakes a wait of gloo but the other end's socket and the deadline."""

    def close(self) -> None:
        self._group = None

    def _complete(self, work: _Work, size: int) -> None:
        blocking(work.wait, self._pace.deadline_s, f"a piece over lane {self._lane}", self._peer)
        self._pace.moved(size)

    def _tag(self) -> int:
        self._piece += 1
        return self._piece % TAGS

    def _piece_of(self, run: Run, piece: Piece) -> torch.Tensor:
        found = run.in_place(piece)
        if found is not None and found.is_cpu:
            return found
        if piece.size > 2 * STAGE_BYTES:
            staged = torch.empty(piece.size, dtype=torch.uint8)
        else:
            # As many as are in flight: the piece that was here last has been waited for.
            slot = self._piece % IN_FLIGHT
            while len(self._staging) <= slot:
                self._staging.append(torch.empty(2 * STAGE_BYTES, dtype=torch.uint8))
            staged = self._staging[slot][: piece.size]
        run.copy(piece, staged)
        return staged
