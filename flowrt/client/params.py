"""Both ends of a weight sync: versions that this worker holds for others, and the ones it staged for itself."""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from flowrt.errors import MISTAKES, FlowError, TransferError
from flowrt.transport.deltas import Delta
from flowrt.transport.lane import LaneSet
from flowrt.transport.relay import Arrival, pieces
from flowrt.transport.settling import seen
from flowrt.transport.warm import WarmMemory
from flowrt.transport.weights import RunningChecksum, Snapshot
from flowrt.waiting import CONTROLLER, Guard, pause, until
from flowrt.wire.messages import Applied, Fetch, FetchFailed, Message, Publish, Retire, ServeWeights, Staged
from flowrt.wire.records import NO_BASE, Weights

BESIDE = Guard("the pull beside which it is watched, or the end of the session")
NO_ROOM_S = 1.0
Form = tuple[str, int, int]
"""Model, version, and the base that it is told as changes to (NO_BASE: whole)."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version that is here, whole and verified, not yet in use."""

    model: str
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class _Held:
    """Buckets that can be served; those that are still coming are passed on as they come."""

    weights: Weights
    buckets: list[torch.Tensor]
    arrival: Arrival | None = None

    def outgoing(self) -> Generator[torch.Tensor, None, None]:
        yield from pieces(self.buckets) if self.arrival is None else self.arrival.relay(self.buckets)


class Params:
    """Weights in this worker's host memory, by (model, version)."""

    def __init__(
        self, lanes: LaneSet, send: Callable[[Message], None], spawn: Callable[..., None], deadline_s: float
    ) -> None:
        self._lanes = lanes
        self._send = send
        self._spawn = spawn
        self._deadline_s = deadline_s
        self._held: dict[Form, _Held] = {}
        self._applied: dict[str, int] = {}
        self._published: dict[str, tuple[Snapshot, int]] = {}  # the last one of each model, and its checksum
        self._publishing: asyncio.Future[None] | None = None
        self._staged: dict[str, StagedWeights] = {}
        self._devices: dict[str, torch.device] = {}  # that models are on: what comes next is pinned before its swap
        self._changed = asyncio.Event()
        # Of versions that nobody looks at any more: fresh pages cost more than what is written to them.
        self._memory = WarmMemory()
        # One thread, so that pieces are summed in the order in which they come.
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="checksums")

    async def publish(self, model: str, snapshot: Snapshot, divergence: Mapping[int, float] | None = None) -> None:
        """Offer a snapshot to whoever the controller sends here; training may go on at once.

        ``divergence`` says how far (KL) earlier versions are from this one, for refresh policies that ask.
        """
        forms = await asyncio.to_thread(self._forms, model, snapshot)
        for weights, buckets in forms:
            self._held[model, snapshot.version, weights.base] = _Held(weights, buckets)
        self._send(Publish(tuple(weights for weights, _ in forms), tuple((divergence or {}).items())))

    async def publish_beside(
        self, model: str, snapshot: Snapshot, divergence: Mapping[int, float] | None = None
    ) -> None:
        """As `publish`, but its sum and its changes to the version before are made beside what the caller does next.

        Versions are offered in order: this waits for the one before it. `settled` waits for the last one.
        """
        await self.settled()
        offered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        offered.add_done_callback(seen)
        self._publishing = offered

        async def offer() -> None:
            try:
                await self.publish(model, snapshot, divergence)
            except (*MISTAKES, FlowError) as error:
                offered.set_exception(error)  # whatever it is: somebody waits for this
            else:
                offered.set_result(None)

        self._spawn(offer())

    async def settled(self) -> None:
        """Every version that was to be published has been offered. Raises what kept one from it."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await until(publishing, BESIDE, "a version to be summed up and offered", "this worker")

    def _forms(self, model: str, snapshot: Snapshot) -> list[tuple[Weights, list[torch.Tensor]]]:
        """The version whole and, where that is much smaller, as changes to the one that was published before it."""
        checksum, version, sizes = snapshot.checksum(), snapshot.version, snapshot.bucket_bytes()
        forms = [(Weights(model, version, NO_BASE, tuple(sizes), checksum), snapshot.buckets)]
        before = self._published.get(model)
        if before is not None and before[0].bucket_bytes() == sizes:
            base, base_checksum = before
            delta = Delta.between(
                base, snapshot, width=snapshot.item_bytes, base_checksum=base_checksum, checksum=checksum
            )
            if delta is not None:
                buffers = delta.buffers()
                told = tuple(buffer.numel() for buffer in buffers)
                forms.append((Weights(model, version, base.version, told, checksum), buffers))
        self._published[model] = snapshot, checksum
        return forms

    def staged(self, model: str = "") -> StagedWeights | None:
        """The newest version of a model (none named: of any) that has arrived and is not in use yet."""
        if model:
            return self._staged.get(model)
        return next(iter(self._staged.values()), None)

    async def wait_staged(self, model: str = "") -> StagedWeights:
        """Wait until a version has arrived."""
        while (found := self.staged(model)) is None:
            self._changed.clear()
            await until(self._changed.wait(), BESIDE, "a newer version", CONTROLLER)
        return found

    def applied(self, model: str, version: int) -> None:
        """This worker generates with ``version`` from now on."""
        staged = self._staged.get(model)
        if staged is not None and staged.snapshot.version <= version:
            del self._staged[model]
            if staged.snapshot.device.type != "cpu":
                self._devices[model] = staged.snapshot.device
        self._applied[model] = version
        self._send(Applied(model, version))

    def in_use(self) -> list[Applied]:
        """What this worker generates with."""
        return [Applied(model, version) for model, version in self._applied.items()]

    def whole(self) -> tuple[Weights, ...]:
        """What can be served to others: no more than that has ever been told to the controller."""
        return tuple(held.weights for held in self._held.values() if held.arrival is None)

    # ---- orders of the controller, in the order in which they came

    def serve(self, order: ServeWeights) -> None:
        held = self._held.get((order.model, order.version, order.base))
        outgoing = _gone(order) if held is None else held.outgoing()
        done = self._lanes.send_each(order.turn, outgoing)
        done.add_done_callback(seen)
        # A lane that broke in the middle would keep the whole version in memory for as long as it is not replaced.
        done.add_done_callback(lambda _: _end(outgoing))

    def fetch(self, order: Fetch) -> None:
        one = order.weights
        arrival = Arrival(f"version {one.version} of {one.model}", self._deadline_s)
        try:
            held = _Held(one, self._room(one), arrival)
        except TransferError as error:
            self._lanes.refuse(order.turn, str(error))  # the sender need not wait for its deadline
            self._spawn(self._no_room(order, str(error)))
            return
        self._held[one.model, one.version, one.base] = held
        checksum = RunningChecksum(self._checks)
        incoming = arrival.receive(held.buckets, checksum.add)
        arrived = self._lanes.receive_each(order.turn, incoming)
        arrived.add_done_callback(lambda done: None if done.cancelled() else _end(incoming))
        self._spawn(self._stage(order, held, arrived, checksum))

    def retire(self, order: Retire) -> None:
        for form in [form for form in self._held if form[:2] == (order.model, order.version)]:
            del self._held[form]

    async def _stage(self, order: Fetch, held: _Held, arrived: asyncio.Future[None], checksum: RunningChecksum) -> None:
        one = order.weights
        try:
            await arrived
            if one.base == NO_BASE:
                snapshot = _verified(one, held, await checksum.total())
            else:
                snapshot = await self._changed_by(one, held.buckets)
            if one.model in self._devices:
                snapshot = await asyncio.to_thread(snapshot.within_reach_of, self._devices[one.model])
        except (*MISTAKES, TransferError) as error:
            assert held.arrival is not None
            reason = str(error) if isinstance(error, TransferError) else f"{error!r} at {one.model} {one.version}"
            held.arrival.fail(reason)
            if self._held.get((one.model, one.version, one.base)) is held:
                del self._held[one.model, one.version, one.base]
            self._send(FetchFailed(order.turn, one, reason))
            return
        whole = Weights(one.model, one.version, NO_BASE, tuple(snapshot.bucket_bytes()), one.checksum)
        self._held[one.model, one.version, NO_BASE] = _Held(whole, snapshot.buckets)
        before = self._staged.get(one.model)
        in_use = self._applied.get(one.model, one.version - 1)
        # An older one may have been ordered while a newer one, thought to be lost, was still coming in whole.
        if in_use < one.version and (before is None or before.snapshot.version < one.version):
            self._staged[one.model] = StagedWeights(one.model, snapshot)
            self._changed.set()
        self._send(Staged(one.model, one.version))

    def _room(self, one: Weights, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Memory for a version (of these sizes), which costs no time before it is written to. Raises TransferError."""
        sizes = one.bucket_bytes if sizes is None else sizes
        try:
            return [self._memory.take(size) for size in sizes]
        except (*MISTAKES, OSError) as error:
            raise TransferError(
                f"there is no memory here for the {sum(sizes)} bytes of version {one.version} of {one.model}: {error!r}"
            ) from None

    async def _no_room(self, order: Fetch, reason: str) -> None:
        """Not at once: it is ordered again as soon as that is said, and memory does not come back that fast."""
        await pause(NO_ROOM_S)
        self._send(FetchFailed(order.turn, order.weights, reason))

    async def _changed_by(self, one: Weights, buffers: list[torch.Tensor]) -> Snapshot:
        """The whole version, from its base and the changes. Raises TransferError when either is not the right one."""
        base = self._held.get((one.model, one.base, NO_BASE))
        if base is None:
            raise TransferError(f"version {one.base} of {one.model}, whose changes came, is not held here")
        whole = Snapshot(one.base, base.buckets)
        spare = Snapshot(one.version, self._room(one, whole.bucket_bytes()))
        return await asyncio.to_thread(_applied, one, buffers, whole, spare)


def _applied(one: Weights, buffers: list[torch.Tensor], base: Snapshot, spare: Snapshot) -> Snapshot:
    delta = Delta.from_buffers(buffers)
    if (delta.version, delta.checksum) != (one.version, one.checksum):
        raise TransferError(f"changes to version {delta.version} came in place of those to {one.version}")
    return delta.apply(base, spare)


def _verified(one: Weights, held: _Held, checksum: int) -> Snapshot:
    """The whole version. Raises TransferError when it is not the one that was published."""
    if checksum != one.checksum:
        raise TransferError(f"checksum of version {one.version} is {checksum}, not {one.checksum}")
    return Snapshot(one.version, held.buckets)


def _end(tensors: Generator[torch.Tensor, None, None]) -> None:
    """Let go of what a lane was to move. If its thread is still in there, it is about to fail and lets go by itself."""
    with contextlib.suppress(ValueError):
        tensors.close()


def _gone(order: ServeWeights) -> Generator[torch.Tensor, None, None]:
    """Breaks the lane at once, so that the receiver need not wait for its deadline."""
    what = f"version {order.version} of {order.model}"
    arrival = Arrival(what, 0.0)
    arrival.fail("it is not held here any more")
    return arrival.relay([torch.empty(1, dtype=torch.uint8)])
