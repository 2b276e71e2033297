"""A process of the weight transfer tests: publishes or receives versions; transfers can be held or corrupted."""

import asyncio
import gc
import hashlib
import os
import threading
from asyncio import Future
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from flowrt.client.session import connect
from flowrt.protocol.messages import LaneTurn
from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.parent_death import die_with_parent
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights.snapshot import Snapshot

JOIN_S = 20.0
HOLD_S = 30.0


def content(model: str, version: int, size: int) -> dict[str, torch.Tensor]:
    """The tensors of a version, the same in every process."""
    generator = torch.Generator().manual_seed(version * 1000 + len(model))
    halves = (size // 2 + 3, size - size // 2 - 3)  # of odd lengths
    return {
        f"{model}.{part}": torch.randint(0, 256, (half,), dtype=torch.uint8, generator=generator)
        for part, half in enumerate(halves)
    }


def digest(tensors: Iterable[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.numpy().data)
    return total.hexdigest()


def tensor_bytes() -> int:
    """Memory of this process that tensors still reference."""
    storages = [object_.untyped_storage() for object_ in gc.get_objects() if issubclass(type(object_), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Wire:
    """The lanes of this process, which count sent bytes, and can hold and damage transfers."""

    def __init__(self, lanes: LaneSet, worker: str) -> None:
        self._lanes = lanes
        self._worker = worker
        self._changed = threading.Condition()
        self._limit: int | None = None
        self.spoil = 0
        self.sent_bytes = 0
        self.fetches = 0

    def receive_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "Future[None]":
        self.fetches += 1
        return self._lanes.receive_each(turn, tensors)

    def send_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "Future[None]":
        return self._lanes.send_each(turn, self._outgoing(tensors))

    def limit(self, pieces: int | None) -> None:
        """Send at most this many chunks of each transfer, until this is changed."""
        with self._changed:
            self._limit = pieces
            self._changed.notify_all()

    def _outgoing(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for number, piece in enumerate(tensors):
            with self._changed:
                self._changed.wait_for(lambda: self._limit is None or number < self._limit, HOLD_S)  # noqa: B023
            sent = piece
            if self.spoil:
                self.spoil -= 1
                sent = piece.clone()
                sent[7] ^= 16
            self.sent_bytes += piece.numel()
            yield sent


class Peer:
    """The commands that the process executes."""

    async def join(self, address: str, name: str, deadline_s: float, sizes: dict[str, int], receives: bool) -> None:
        self.session = await connect(address, name, "rollout" if receives else "trainer", JOIN_S)
        self.wire = Wire(self.session._lanes, name)
        self.session.params._lanes = self.wire  # type: ignore[assignment]
        self.sizes = sizes
        self.used: list[tuple[str, int, str]] = []
        for model in sizes if receives else ():
            self.session.params.applied(model, 0)
        self.tasks = [asyncio.create_task(self._receive(model)) for model in sizes if receives]

    async def publish(self, model: str, version: int) -> None:
        await self.session.params.publish(model, Snapshot.take(version, content(model, version, self.sizes[model])))

    async def state(self) -> dict[str, Any]:
        params = self.session.params
        arrivals = [held.inbound._count for held in params._held.values() if held.inbound is not None]
        return {
            "used": list(self.used),
            "held": sorted(params._held),
            "arrived": max(arrivals, default=0),
            "sent": self.wire.sent_bytes,
            "fetches": self.wire.fetches,
        }

    async def memory(self) -> int:
        """Bytes of all tensors of this process."""
        return tensor_bytes()

    async def limit(self, pieces: int | None) -> None:
        self.wire.limit(pieces)

    async def spoil(self, pieces: int) -> None:
        self.wire.spoil = pieces

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.session.close()

    async def _receive(self, model: str) -> None:
        """Use every version that arrives, and record it."""
        weights = {name: torch.zeros_like(tensor) for name, tensor in content(model, 0, self.sizes[model]).items()}
        while True:
            staged = await self.session.params.wait_staged(model)
            staged.snapshot.restore(weights)
            self.used.append((staged.model, staged.snapshot.version, digest(weights.values())))
            self.session.params.applied(model, staged.snapshot.version)


def run_peer(pipe: Connection) -> None:
    """Execute commands until the parent has ended."""
    die_with_parent()
    torch.set_num_threads(1)
    run_loop(_follow_commands(Peer(), pipe))
    os._exit(0)


async def _follow_commands(peer: Peer, pipe: Connection) -> None:
    while (message := await asyncio.to_thread(pipe.recv)) is not None:
        command, values = message
        pipe.send(await getattr(peer, command)(**values))
