"""Both ends of a weight sync: versions that this worker holds for others, and the one it staged for itself."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flowrt.errors import TransferError
from flowrt.transport.lane import LaneSet, seen
from flowrt.transport.pieces import Run
from flowrt.transport.weights import Snapshot
from flowrt.wire.messages import Applied, Fetch, FetchFailed, Message, Publish, Retire, ServeWeights, Staged


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version that is here, whole and verified, not yet in use."""

    model: str
    snapshot: Snapshot


class Params:
    """Weights in this worker's host memory, by (model, version)."""

    def __init__(self, lanes: LaneSet, send: Callable[[Message], None], spawn: Callable[..., None]) -> None:
        self._lanes = lanes
        self._send = send
        self._spawn = spawn
        self._held: dict[tuple[str, int], Snapshot] = {}
        self._staged: StagedWeights | None = None
        self._changed = asyncio.Event()

    async def publish(self, model: str, snapshot: Snapshot) -> None:
        """Offer a snapshot to whoever the controller sends here; training may go on at once."""
        checksum = await asyncio.to_thread(snapshot.checksum)
        self._held[model, snapshot.version] = snapshot
        self._send(Publish(model, snapshot.version, tuple(snapshot.bucket_bytes()), checksum))

    def staged(self) -> StagedWeights | None:
        """The newest version that has arrived and is not in use yet, if any."""
        return self._staged

    async def wait_staged(self) -> StagedWeights:
        """Wait until a version has arrived."""
        while self._staged is None:
            self._changed.clear()
            await self._changed.wait()
        return self._staged

    def applied(self, model: str, version: int) -> None:
        """This worker generates with ``version`` from now on."""
        if self._staged is not None and self._staged.snapshot.version <= version:
            self._staged = None
        self._send(Applied(model, version))

    # ---- orders of the controller, in the order in which they came

    def serve(self, order: ServeWeights) -> None:
        snapshot = self._held.get((order.model, order.version))
        if snapshot is None:
            # Retired in the meantime cannot be: the controller ordered both. Sending nothing lets the lane time out.
            return
        self._lanes.send(order.turn, [Run.of(bucket) for bucket in snapshot.buckets]).add_done_callback(seen)

    def fetch(self, order: Fetch) -> None:
        arrival = self._lanes.receive(order.turn, [(size,) for size in order.bucket_bytes])
        self._spawn(self._stage(order, arrival))

    def retire(self, order: Retire) -> None:
        self._held.pop((order.model, order.version), None)

    async def _stage(self, order: Fetch, arrival: asyncio.Future[list[torch.Tensor]]) -> None:
        try:
            snapshot = Snapshot(order.version, await arrival)
            found = await asyncio.to_thread(snapshot.checksum)
            if found != order.checksum:
                raise TransferError(f"checksum of version {order.version} is {found}, not {order.checksum}")
        except TransferError as error:
            self._send(FetchFailed(order.turn, order.model, order.version, str(error)))
            return
        self._held[order.model, order.version] = snapshot
        if self._staged is None or self._staged.snapshot.version < order.version:
            self._staged = StagedWeights(order.model, snapshot)
            self._changed.set()
        self._send(Staged(order.model, order.version))
