"""Lanes: ordered streams of tensors between two workers, each with its own thread.

Transports block, and some cannot be interrupted, so every lane has its own thread and channel: a peer that hangs stops
one lane only, which fails at its deadline. A failed lane stays failed and closes its channel, which fails the other end
too; the controller then opens a new incarnation. Where a worker has nearly as many lanes as it may have open, those
that have been idle for longest are retired in agreement with the controller (`flowrt.transport.lanes.open_lanes`).
"""

import asyncio
import contextlib
import heapq
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowrt.errors import PROGRAMMING_ERRORS, FlowError, TransferError, WaitExpired, first_line
from flowrt.protocol.messages import GONE, LaneTurn
from flowrt.runtime.host import local_address, network_namespace
from flowrt.runtime.resource_limits import trim_heap
from flowrt.runtime.waits import CONTROLLER, join_thread, queue_get
from flowrt.transport.devices import cuda_is_here, has_cuda, has_npu, npu_is_here
from flowrt.transport.lanes.channel import (
    MIN_BYTES_PER_S,
    Channel,
    ColumnRun,
    SignalStore,
    TransferRateLimit,
    Transport,
)
from flowrt.transport.lanes.device import HcclTransport, NcclTransport
from flowrt.transport.lanes.gloo import GlooTransport
from flowrt.transport.lanes.open_lanes import MAX_OPEN_LANES, OpenLanes
from flowrt.transport.lanes.shared_memory import ShmTransport

FAILURES = (*PROGRAMMING_ERRORS, OSError, FlowError)
CLOSE_S = 0.5
IDLE_S = 10.0
"""A lane that has moved nothing for this long frees the buffers it keeps for reuse."""


def complete(done: asyncio.Future[Any], result: Any, error: TransferError | None) -> None:
    """Set the result or the error of a future, unless it is done."""
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def ignore_exception(done: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved: the failure is reported elsewhere, and asyncio need not log it."""
    if not done.cancelled():
        done.exception()


@dataclass(frozen=True, slots=True)
class _Turn:
    act: Callable[[Channel], Any]
    done: asyncio.Future[Any]


def lane_name(turn: LaneTurn) -> str:
    """The name of a lane's incarnation, the same at both ends."""
    return f"{turn.sender}>{turn.receiver}/{turn.kind}/{turn.incarnation}"


class Lane:
    """One direction between this worker and a peer."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        idle_s: float,
        rate_limit: TransferRateLimit,
        open_channel: Callable[[], Channel],
        on_closed: Callable[[], None],
    ) -> None:
        """``on_closed`` is called on the lane's thread when the channel that ``open_channel`` returned is closed."""
        self.name = name
        self.last_turn: LaneTurn | None = None
        self.is_retiring = False
        """Whether the controller was asked to retire this lane."""
        self.used_s = 0.0
        """When the last turn was enqueued or done, on the clock of the event loop."""
        self._on_closed = on_closed
        self.incarnation = incarnation
        self._idle_s = idle_s
        self._rate_limit = rate_limit
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._loop = asyncio.get_running_loop()
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._broken: str | None = None
        self._next_sequence = 0
        # A daemon thread: a call of gloo cannot be interrupted, and must not keep a finished worker alive.
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the lane's thread still runs."""
        return self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether all turns are done, and the lane has not failed."""
        return self._broken is None and not self._waiting

    def enqueue(self, turn: LaneTurn, act: Callable[[Channel], Any]) -> asyncio.Future[Any]:
        """Call ``act`` with the channel after all earlier turns; the future has its result, or raises TransferError."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self.last_turn, self.is_retiring, self.used_s = turn, False, self._loop.time()
        if self._broken is None and turn.sequence != self._next_sequence:
            self._broken = f"received turn {turn.sequence} in place of turn {self._next_sequence}"
        if self._broken is not None:
            done.set_exception(self._error())
            self._turns.put(None)
            return done
        self._next_sequence += 1
        self._waiting.add(done)
        done.add_done_callback(self._on_turn_done)
        self._turns.put(_Turn(act, done))
        return done

    def _on_turn_done(self, done: asyncio.Future[Any]) -> None:
        self._waiting.discard(done)
        self.used_s = self._loop.time()
        if not done.cancelled() and done.exception() is not None:
            # Ends the thread of a broken lane, whatever the controller does next.
            self._turns.put(None)

    def fail(self, reason: str) -> None:
        """Fail all turns immediately; the thread ends when its present call of the channel returns.

        For a lane whose peer has left, or whose incarnation is stale.
        """
        if self._broken is None:
            self._broken = reason
        for done in list(self._waiting):
            complete(done, None, self._error())
        self._turns.put(None)
        channel = self._channel
        if channel is not None:
            channel.interrupt()

    def close(self) -> None:
        """End the thread after the turns that are queued; later turns fail."""
        self._turns.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait until the thread ends, for at most ``deadline_s`` seconds.

        A process group that is open when the interpreter exits aborts the process.
        """
        join_thread(self._thread, deadline_s)

    def _run(self) -> None:
        try:
            while (turn := self._next()) is not None:
                result = self._execute(turn)
                self._report(turn.done, result)
                # A waiting thread must not keep the tensors of the last turn alive.
                del turn, result
        finally:
            # No turn may wait for a thread that has ended.
            self._broken = self._broken or "it is closed"
            self._call_on_loop(self.fail, self._broken)
            self._close_channel()

    def _next(self) -> _Turn | None:
        for idle_polls in itertools.count():
            try:
                # Both ends become idle at about the same time; the short waits receive what the other end then sends.
                idle_s = self._idle_s / (10 if idle_polls % 3 else 1)
                return queue_get(self._turns, idle_s, f"the next turn of lane {self.name}", CONTROLLER)
            except WaitExpired:
                if self._channel is None:
                    continue
                try:
                    self._channel.on_idle()
                    if not idle_polls:
                        trim_heap()
                except FAILURES as error:
                    self._break(error)
                    return None
        return None

    def _execute(self, turn: _Turn) -> Any:
        if self._broken is None:
            try:
                self._channel = self._channel or self._open_channel()
                self._rate_limit.begin()
                return turn.act(self._channel)
            except FAILURES as error:
                self._break(error)
        return None

    def _break(self, error: BaseException) -> None:
        is_described = isinstance(error, RuntimeError | OSError | FlowError)
        self._broken = self._broken or (first_line(error) if is_described else repr(error))
        # Immediately, not when the lane is dropped: the other end may be waiting for this one.
        self._close_channel()

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(*FAILURES):  # the lane has ended already
                channel.close()
            del channel
            self._on_closed()

    def _error(self) -> TransferError:
        return TransferError(f"lane {self.name} failed: {self._broken}")

    def _report(self, done: asyncio.Future[Any], result: Any) -> None:
        self._call_on_loop(complete, done, result, None if self._broken is None else self._error())

    def _call_on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)


class LaneSet:
    """All lanes of a worker; a lane is opened by its first turn."""

    def __init__(
        self,
        worker: str,
        transports: Mapping[str, Transport],
        deadline_s: float,
        signal: Callable[[str, str, str, bytes], None],
        idle_s: float = IDLE_S,
        min_bytes_per_s: float = MIN_BYTES_PER_S,
        most_open: int = MAX_OPEN_LANES,
        ask_to_retire: Callable[[LaneTurn], None] | None = None,
    ) -> None:
        """Make an empty set.

        Args:
            worker: this worker's name.
            transports: the available transports by name.
            deadline_s: a turn fails when it has moved nothing for this many seconds.
            signal: sends (peer, lane, key, value) of a rendezvous to a peer, through the controller.
            idle_s: see IDLE_S.
            min_bytes_per_s: a turn that is slower than this beyond ``deadline_s`` fails.
            most_open: number of lanes that may be open at a time.
            ask_to_retire: asks the controller to retire the lane of this turn, its last one; None: lanes stay open.
        """
        self._open_lanes = OpenLanes(most_open)
        self._ask_to_retire = ask_to_retire
        self._worker = worker
        self._transports = transports
        self._deadline_s = deadline_s
        self._signal = signal
        self._idle_s = idle_s
        self._min_bytes_per_s = min_bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        self._stores: dict[str, SignalStore] = {}
        self._retired: list[Lane] = []

    def send(self, turn: LaneTurn, runs: Sequence[ColumnRun]) -> asyncio.Future[None]:
        """Send one message of column runs. Their rows must not change before the future is done."""
        return self._enqueue(turn, lambda channel: channel.send(runs))

    def receive(self, turn: LaneTurn, sizes: Sequence[Sequence[int]]) -> asyncio.Future[list[torch.Tensor]]:
        """Receive one message. ``sizes``: of each run, the bytes of its rows. The result is the bytes of each run."""
        return self._enqueue(turn, lambda channel: channel.receive(sizes))

    def send_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> asyncio.Future[None]:
        """Send tensors one by one. The iterator runs on the lane's thread; it is advanced after each tensor is sent."""

        def send(channel: Channel) -> None:
            for tensor in tensors:
                channel.send([ColumnRun.of(tensor)])

        return self._enqueue(turn, send)

    def receive_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> asyncio.Future[None]:
        """Receive from `send_each`: fill these uint8 tensors, one by one. The iterator runs on the lane's thread."""

        def receive(channel: Channel) -> None:
            for tensor in tensors:
                (received,) = channel.receive([(tensor.nbytes,)])
                tensor.copy_(received)

        return self._enqueue(turn, receive)

    def refuse(self, turn: LaneTurn, reason: str) -> None:
        """Fail the lane of this turn, at both ends."""

        def refuse(channel: Channel) -> None:  # noqa: ARG001
            raise TransferError(reason)

        self._enqueue(turn, refuse).add_done_callback(ignore_exception)

    def give_up(self, turn: LaneTurn, reason: str) -> None:
        """Fail the lane of this turn, at this end; ignored if it is not the lane's current incarnation."""
        key = (turn.sender, turn.receiver, turn.kind)
        lane = self._lanes.get(key)
        if lane is not None and lane.incarnation == turn.incarnation:
            self._drop(self._lanes.pop(key), reason)

    def deliver(self, peer: str, lane: str, key: str, value: bytes) -> None:
        """Accept a rendezvous key from a peer, possibly before the lane's first turn. GONE: the peer has left."""
        if key != GONE:
            self._store(peer, lane).deliver(key, value)
            return
        for ends in [ends for ends in self._lanes if peer in ends[:2]]:
            self._drop(self._lanes.pop(ends), f"{peer} has left the run")

    def retire(self, turn: LaneTurn) -> None:
        """Close the lane of this turn, its last one, after the turns that are queued."""
        key = (turn.sender, turn.receiver, turn.kind)
        lane = self._lanes.get(key)
        if lane is not None and lane.incarnation == turn.incarnation:
            del self._lanes[key]
            self._stores.pop(lane.name, None)
            lane.close()
            self._retired = [*(retired for retired in self._retired if retired.alive), lane]

    def drop_all(self, reason: str) -> None:
        """Fail every lane immediately, including those that are being opened."""
        lanes = list(self._lanes.values())
        self._lanes = {}
        for lane in lanes:
            self._drop(lane, reason)
        stores = list(self._stores.values())
        self._stores = {}
        for store in stores:
            store.close(reason)

    async def close(self) -> None:
        """Close every lane, in at most CLOSE_S. A lane that waits for its peer ends later, at its own deadline."""
        lanes = [*self._lanes.values(), *self._retired]
        for lane in lanes:
            lane.close()
        end_s = self._loop.time() + CLOSE_S
        for lane in lanes:
            await asyncio.to_thread(lane.join, max(end_s - self._loop.time(), 0.0))

    def _enqueue(self, turn: LaneTurn, act: Callable[[Channel], Any]) -> asyncio.Future[Any]:
        key = (turn.sender, turn.receiver, turn.kind)
        lane = self._lanes.get(key)
        if lane is not None and turn.incarnation < lane.incarnation:
            stale: asyncio.Future[Any] = self._loop.create_future()
            stale.set_exception(TransferError(f"lane {lane_name(turn)} is stale: {lane.name} has replaced it"))
            return stale
        if lane is None or turn.incarnation > lane.incarnation:
            if lane is not None:
                self._drop(lane, "a newer incarnation was opened")
            lane = self._lanes[key] = self._open(turn)
            self._make_room()
        done = lane.enqueue(turn, act)
        done.add_done_callback(self._on_turn_done)
        return done

    def _on_turn_done(self, _: asyncio.Future[Any]) -> None:
        if self._open_lanes.waiting:
            self._make_room()

    def _make_room(self) -> None:
        """Ask the controller to retire the lanes that have been idle for longest if nearly all that may be are open."""
        excess = max(len(self._lanes) - self._open_lanes.most * 3 // 4, self._open_lanes.waiting)
        if self._ask_to_retire is None or excess <= 0:
            return
        excess = max(excess - sum(lane.is_retiring for lane in self._lanes.values()), 0)
        idle = [lane for lane in self._lanes.values() if lane.is_idle and not lane.is_retiring and lane.last_turn]
        for lane in heapq.nsmallest(excess, idle, key=lambda lane: lane.used_s):
            assert lane.last_turn is not None
            lane.is_retiring = True
            self._ask_to_retire(lane.last_turn)

    def _drop(self, lane: Lane, reason: str) -> None:
        store = self._stores.pop(lane.name, None)
        if store is not None:
            store.close(reason)
        lane.fail(reason)
        self._retired = [*(retired for retired in self._retired if retired.alive), lane]

    def _open(self, turn: LaneTurn) -> Lane:
        name = lane_name(turn)
        sending = turn.sender == self._worker
        peer = turn.receiver if sending else turn.sender
        store = self._store(peer, name)
        transport = self._transports.get(turn.transport)
        rate_limit = TransferRateLimit(name, self._deadline_s, self._min_bytes_per_s)

        def open_channel() -> Channel:
            if transport is None:
                raise TransferError(f"this worker has no transport {turn.transport!r}")
            self._open_lanes.take(name, self._deadline_s)
            channel: Channel | None = None
            try:
                channel = transport.open(store, sending, rate_limit)
            finally:
                if channel is None:
                    self._open_lanes.give_back()
            return channel

        return Lane(
            name=name,
            incarnation=turn.incarnation,
            idle_s=self._idle_s,
            rate_limit=rate_limit,
            open_channel=open_channel,
            on_closed=self._open_lanes.give_back,
        )

    def _store(self, peer: str, lane: str) -> SignalStore:
        if lane not in self._stores:

            def post(key: str, value: bytes) -> None:
                self._loop.call_soon_threadsafe(self._signal, peer, lane, key, value)

            self._stores[lane] = SignalStore(lane, post, self._deadline_s, peer)
        return self._stores[lane]


def available_transports() -> tuple[str, ...]:
    """Names of the transports that this worker supports, best first.

    Shared memory is ``shm:SCOPE``: it works between workers of one `network_namespace`. Transports of devices that this
    process does not use (yet: engines start after the handshake) come after gloo. They are used only if the run
    requires them, so that a lane alone does not create a context on a device.
    """
    transports = []
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        transports.append(f"shm:{network_namespace()}")
    if has_cuda():
        transports.append("nccl")
    if has_npu():
        transports.append("hccl")
    idle = []
    if not has_cuda() and cuda_is_here() and torch.distributed.is_nccl_available():
        idle.append("nccl")
    if not has_npu() and npu_is_here():
        idle.append("hccl")
    return (*transports, "gloo", *idle)


def make_transports(controller: str) -> Mapping[str, Transport]:
    """All transports by name, for a worker of the controller at ``tcp://HOST:PORT``.

    Raises ConfigError if this host has no route to the controller.
    """
    return {
        "shm": ShmTransport(),
        "gloo": GlooTransport(local_address(controller)),
        "nccl": NcclTransport(),
        "hccl": HcclTransport(),
    }
