"""Weight transfers of a worker: publishing, relaying, and receiving versions for its own use.

- A received version is verified by its checksum and staged; the worker continues with the old one until it calls
  `applied`.
- A version can be sent on while it arrives, chunk by chunk.
- What has arrived of a fetch that fails is kept, until the controller orders the rest or another version.
- Transfers run in the order of the controller's orders, as both ends of a lane must.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from flowrt.errors import PROGRAMMING_ERRORS, FlowError, TransferError
from flowrt.protocol.messages import (
    NO_BASE,
    EvictVersion,
    FetchFailed,
    Message,
    Publish,
    ReceiveWeights,
    SendWeights,
    StopFetch,
    Weights,
    WeightsActivated,
    WeightsArriving,
    WeightsStaged,
)
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, pause, wait_until
from flowrt.transport.buffers import BufferPool
from flowrt.transport.lanes.lane import LaneSet, ignore_exception
from flowrt.transport.weights.delta import Delta
from flowrt.transport.weights.relay import PipelinedReceive, split_buckets
from flowrt.transport.weights.snapshot import CPU, PINNED, RunningChecksum, Snapshot

UNTIL_SESSION_END = BoundedElsewhere("the pull that runs at the same time, or the end of the session")
NO_MEMORY_RETRY_S = 1.0
MIN_CHUNKS = 8
Encoding = tuple[str, int, int]
"""Model, version, and the version that it is a delta to (NO_BASE: the full version)."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version that has arrived and is verified, but not yet in use."""

    model: str
    snapshot: Snapshot
    older: bool = False
    """Whether this version is older than the version in use, and takes its place for an evaluation."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A version that can be sent; a version that is still arriving (``inbound``) is relayed chunk by chunk."""

    weights: Weights
    buckets: list[torch.Tensor]
    inbound: PipelinedReceive | None = None
    checksum: RunningChecksum | None = None  # of the chunks that have arrived

    def outgoing(self, first: int) -> Generator[torch.Tensor, None, None]:
        """The chunks to send, from the chunk ``first`` on."""
        if self.inbound is None:
            yield from split_buckets(self.buckets)[first:]
        else:
            yield from self.inbound.relay(self.buckets, first)


class WeightTransfers:
    """Weights in this worker's host memory, by (model, version)."""

    def __init__(
        self, lanes: LaneSet, send: Callable[[Message], None], spawn: Callable[..., None], deadline_s: float
    ) -> None:
        self._lanes = lanes
        self._send_message = send
        self._spawn = spawn
        self._deadline_s = deadline_s
        self._held: dict[Encoding, _Held] = {}
        self._paused: dict[Encoding, _Held] = {}  # of these, those whose fetch has failed and may go on
        self._applied: dict[str, int] = {}
        self._published: dict[str, tuple[Snapshot, int]] = {}  # latest version of each model, and its checksum
        self._publishing: asyncio.Future[None] | None = None
        self._staged: dict[str, StagedWeights] = {}
        self._devices: dict[str, torch.device] = {}  # of models that this worker uses on a device
        self._changed = asyncio.Event()
        # Reuses the memory of evicted versions: page faults of fresh memory cost more than writing to it.
        self._memory = BufferPool()
        # One thread, so that chunks are added to the checksum in their order.
        self._checksum_thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")

    def set_device(self, model: str, device: torch.device) -> None:
        """Set where this worker uses a model: its versions are pinned for that device before they are swapped in."""
        if device != CPU:
            self._devices[model] = device

    async def publish(self, model: str, snapshot: Snapshot, divergence: Mapping[int, float] | None = None) -> None:
        """Publish a snapshot; training may continue while receivers fetch it.

        Args:
            model: the name of the model.
            snapshot: its weights; must not change any more.
            divergence: KL divergence of earlier versions from this one, by version, for sync policies that use it.
        """
        encodings = await asyncio.to_thread(self._encodings, model, snapshot)
        for weights, buckets in encodings:
            self._held[model, snapshot.version, weights.base] = _Held(weights, buckets)
        self._send_message(Publish(tuple(weights for weights, _ in encodings), tuple((divergence or {}).items())))

    async def publish_in_background(
        self, model: str, snapshot: Snapshot, divergence: Mapping[int, float] | None = None
    ) -> None:
        """As `publish`, but compute checksum and delta in the background.

        Versions are published in order, so this first waits until the previous version is published, and raises its
        error if it could not be. `wait_published` waits for the last version.
        """
        await self.wait_published()
        published: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        published.add_done_callback(ignore_exception)
        self._publishing = published

        async def publish() -> None:
            try:
                await self.publish(model, snapshot, divergence)
            except (*PROGRAMMING_ERRORS, FlowError) as error:
                published.set_exception(error)  # raised by wait_published
            else:
                published.set_result(None)

        self._spawn(publish())

    async def wait_published(self) -> None:
        """Wait until all versions are published. Raises the error of a version that could not be published."""
        publishing = self._publishing
        self._publishing = None
        if publishing is not None:
            await wait_until(publishing, UNTIL_SESSION_END, "a version to be encoded and published", "this worker")

    def _encodings(self, model: str, snapshot: Snapshot) -> list[tuple[Weights, list[torch.Tensor]]]:
        """The full version and, if that is much smaller, its delta to the previously published version."""
        checksum = snapshot.checksum()
        version = snapshot.version
        sizes = snapshot.bucket_bytes()
        encodings = [(_weights(model, version, NO_BASE, sizes, checksum), snapshot.buckets)]
        before = self._published.get(model)
        if before is not None and before[0].bucket_bytes() == sizes:
            base, base_checksum = before
            delta = Delta.between(
                base, snapshot, width=snapshot.item_bytes, base_checksum=base_checksum, checksum=checksum
            )
            if delta is not None:
                buffers = delta.buffers()
                buffer_bytes = [buffer.numel() for buffer in buffers]
                encodings.append((_weights(model, version, base.version, buffer_bytes, checksum), buffers))
        self._published[model] = snapshot, checksum
        return encodings

    def staged(self, model: str = "") -> StagedWeights | None:
        """The staged version of a model (without a name: of any model); None if there is none."""
        if model:
            return self._staged.get(model)
        return next(iter(self._staged.values()), None)

    async def wait_staged(self, model: str = "") -> StagedWeights:
        """Wait until a version of a model (without a name: of any model) is staged, and return it."""
        while (staged := self.staged(model)) is None:
            self._changed.clear()
            await wait_until(self._changed.wait(), UNTIL_SESSION_END, "a newer version", CONTROLLER)
        return staged

    def applied(self, model: str, version: int) -> None:
        """Report that this worker generates with ``version`` of a model from now on, which is no longer staged then."""
        staged = self._staged.get(model)
        staged_version = -1 if staged is None else staged.snapshot.version
        if staged is not None and (staged_version == version or (staged_version < version and not staged.older)):
            del self._staged[model]
        self._applied[model] = version
        self._send_message(WeightsActivated(model, version))

    def in_use(self) -> list[WeightsActivated]:
        """The version of each model that this worker generates with."""
        return [WeightsActivated(model, version) for model, version in self._applied.items()]

    def servable(self) -> tuple[Weights, ...]:
        """The full versions and deltas that this worker holds completely, and the controller may know of."""
        return tuple(held.weights for held in self._held.values() if held.inbound is None)

    # ---- orders of the controller, in the order in which they arrive

    def execute(self, order: SendWeights | ReceiveWeights | StopFetch | EvictVersion) -> None:
        """Execute an order."""
        match order:
            case SendWeights():
                self.send(order)
            case ReceiveWeights():
                self.receive(order)
            case StopFetch(turn):  # what has arrived is kept
                self._lanes.give_up(turn, "it is much slower than others")
            case EvictVersion():
                self.evict(order)

    def send(self, order: SendWeights) -> None:
        """Send a version over a turn of a lane."""
        held = self._held.get((order.model, order.version, order.base))
        outgoing = _fail_lane(order) if held is None else held.outgoing(order.first)
        done = self._lanes.send_each(order.turn, outgoing)
        done.add_done_callback(ignore_exception)
        # The thread of a lane that failed halfway would otherwise keep the version in memory.
        done.add_done_callback(lambda _: _close(outgoing))

    def receive(self, order: ReceiveWeights) -> None:
        """Receive a version over a turn of a lane, and stage it."""
        weights = order.weights
        encoding = weights.model, weights.version, weights.base
        for other in [key for key in self._paused if key[0] == weights.model and (key != encoding or not order.first)]:
            self._give_up(other, f"version {weights.version} is fetched in place of the rest")
        held = self._paused.pop(encoding, None)
        try:
            if held is None:
                held = self._begin(weights, order.first)
        except TransferError as error:
            self._lanes.refuse(order.turn, str(error))  # so that the sender does not wait for its deadline
            self._spawn(self._report_no_memory(order, str(error)))
            return
        assert held.inbound is not None
        assert held.checksum is not None
        self._held[encoding] = held
        incoming = held.inbound.receive(held.buckets, self._counted(order, held))
        arrived = self._lanes.receive_each(order.turn, incoming)
        arrived.add_done_callback(lambda done: None if done.cancelled() else _close(incoming))
        self._spawn(self._stage(order, held, arrived))

    def _begin(self, weights: Weights, first: int) -> _Held:
        """Buffers for a version. Raises TransferError without memory, or if chunks that it has are assumed."""
        if first:
            raise TransferError(f"the first {first} chunks of version {weights.version} are not held here any more")
        inbound = PipelinedReceive(f"version {weights.version} of {weights.model}", self._deadline_s)
        buckets = self._allocate(weights, weights.bucket_bytes)
        return _Held(weights, buckets, inbound, RunningChecksum(self._checksum_thread))

    def _counted(self, order: ReceiveWeights, held: _Held) -> Callable[[torch.Tensor], object]:
        """What is called with each chunk that has arrived: adds it to the checksum, and reports an eighth of all.

        A version of less than `MIN_CHUNKS` arrives too soon for that.
        """
        inbound, checksum = held.inbound, held.checksum
        assert inbound is not None
        assert checksum is not None
        loop = asyncio.get_running_loop()
        chunks = len(split_buckets(held.buckets))
        reported = max(chunks // 8, order.first + 1) if chunks >= MIN_CHUNKS else -1

        def on_chunk(chunk: torch.Tensor) -> None:
            checksum.add(chunk)
            if inbound.count == reported:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._send_message, WeightsArriving(order.turn, order.weights.model))

        return on_chunk

    def _give_up(self, encoding: Encoding, reason: str) -> None:
        """Drop the chunks of a fetch that has failed; relays of it fail."""
        held = self._paused.pop(encoding)
        assert held.inbound is not None
        held.inbound.fail(reason)
        if self._held.get(encoding) is held:
            del self._held[encoding]

    def evict(self, order: EvictVersion) -> None:
        """Drop a version: the full version and its deltas."""
        for encoding in [encoding for encoding in self._held if encoding[:2] == (order.model, order.version)]:
            if encoding in self._paused:
                self._give_up(encoding, "the version is evicted")
            else:
                del self._held[encoding]

    async def _stage(self, order: ReceiveWeights, held: _Held, arrived: asyncio.Future[None]) -> None:
        weights = order.weights
        model, version = weights.model, weights.version
        assert held.inbound is not None
        assert held.checksum is not None
        checksum = held.checksum
        try:
            try:
                await arrived
            except TransferError as error:
                if (count := held.inbound.pause()) and self._held.get((model, version, weights.base)) is held:
                    self._paused[model, version, weights.base] = held
                    self._send_message(FetchFailed(order.turn, weights, str(error), count))
                    return
                raise
            if weights.base == NO_BASE:
                snapshot = _verify(weights, held, await checksum.total())
            else:
                snapshot = await self._apply_delta(weights, held.buckets)
            if model in self._devices:
                snapshot = await asyncio.to_thread(snapshot.pinned_for, self._devices[model])
        except (*PROGRAMMING_ERRORS, TransferError) as error:
            reason = str(error) if isinstance(error, TransferError) else f"{error!r} at {model} {version}"
            held.inbound.fail(reason)
            if self._held.get((model, version, weights.base)) is held:
                del self._held[model, version, weights.base]
            self._send_message(FetchFailed(order.turn, weights, reason))
            return
        full = _weights(model, version, NO_BASE, snapshot.bucket_bytes(), weights.checksum)
        self._held[model, version, NO_BASE] = _Held(full, snapshot.buckets)
        before = self._staged.get(model)
        in_use = self._applied.get(model, version - 1)
        # An older version may arrive after a newer one whose transfer the controller believed to be lost.
        is_newer = in_use < version and (before is None or before.snapshot.version < version)
        if is_newer or (order.older and in_use != version):
            self._staged[model] = StagedWeights(model, snapshot, older=order.older)
            self._changed.set()
        self._send_message(WeightsStaged(model, version))

    def _allocate(self, weights: Weights, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Buffers of these sizes in bytes; pages are faulted in when they are written. Raises TransferError."""
        device = self._devices.get(weights.model, CPU)
        try:
            return [self._take(size, device) for size in sizes]
        except (*PROGRAMMING_ERRORS, OSError) as error:
            raise TransferError(
                f"there is no memory here for the {sum(sizes)} bytes of version {weights.version} of {weights.model}: "
                f"{error!r}"
            ) from None

    def _take(self, size: int, device: torch.device) -> torch.Tensor:
        """A buffer, pinned if it is at once: registering 15 GB with a device takes seconds of the event loop."""
        pinned = PINNED.take_idle(size) if device.type == "cuda" else None
        return self._memory.take(size) if pinned is None else pinned

    async def _report_no_memory(self, order: ReceiveWeights, reason: str) -> None:
        """Report with a delay: the controller orders the transfer again at once, sooner than memory is freed."""
        await pause(NO_MEMORY_RETRY_S)
        self._send_message(FetchFailed(order.turn, order.weights, reason))

    async def _apply_delta(self, weights: Weights, buffers: list[torch.Tensor]) -> Snapshot:
        """The full version from its base and its delta. Raises TransferError when either does not match."""
        base = self._held.get((weights.model, weights.base, NO_BASE))
        if base is None:
            raise TransferError(
                f"version {weights.base} of {weights.model}, the base of the delta that arrived, is not held here"
            )
        old = Snapshot(weights.base, base.buckets)
        new = Snapshot(weights.version, self._allocate(weights, old.bucket_bytes()))
        return await asyncio.to_thread(_decode_delta, weights, buffers, old, new)


def _weights(model: str, version: int, base: int, bucket_bytes: Sequence[int], checksum: int) -> Weights:
    return Weights(model=model, version=version, base=base, bucket_bytes=tuple(bucket_bytes), checksum=checksum)


def _decode_delta(weights: Weights, buffers: list[torch.Tensor], base: Snapshot, out: Snapshot) -> Snapshot:
    delta = Delta.from_buffers(buffers)
    if (delta.version, delta.checksum) != (weights.version, weights.checksum):
        raise TransferError(f"a delta to version {delta.version} came in place of one to {weights.version}")
    return delta.apply(base, out)


def _verify(weights: Weights, held: _Held, checksum: int) -> Snapshot:
    """The full version. Raises TransferError when its checksum is not the published one."""
    if checksum != weights.checksum:
        raise TransferError(f"checksum of version {weights.version} is {checksum}, not {weights.checksum}")
    return Snapshot(weights.version, held.buckets)


def _close(tensors: Generator[torch.Tensor, None, None]) -> None:
    """Release the tensors of a transfer. ValueError: its thread is in the generator, and will release them itself."""
    with contextlib.suppress(ValueError):
        tensors.close()


def _fail_lane(order: SendWeights) -> Generator[torch.Tensor, None, None]:
    """A generator that fails at once, so that the receiver does not wait for its deadline."""
    inbound = PipelinedReceive(f"version {order.version} of {order.model}", 0.0)
    inbound.fail("it is no longer held here")
    return inbound.relay([torch.empty(1, dtype=torch.uint8)])
