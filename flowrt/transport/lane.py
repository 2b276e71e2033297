"""Lanes: ordered streams of tensors between two workers, each with a thread of its own.

Transports block, and some cannot be woken. So every lane has its own thread and its own channel; a peer that hangs
stops one lane, and its deadline turns that into an error with a name. A lane that failed stays failed and closes its
channel, which frees the other end: the controller opens a new incarnation.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowrt.errors import MISTAKES, FlowError, TransferError, WaitExpired
from flowrt.transport.channel import Channel, Transport
from flowrt.transport.pace import LEAST_BYTES_PER_S, Pace
from flowrt.transport.pieces import Run
from flowrt.transport.rendezvous import SignalStore
from flowrt.transport.settling import seen, settle
from flowrt.transport.warm import give_back_heap
from flowrt.waiting import CONTROLLER, joined, taken
from flowrt.wire.records import GONE, LaneTurn

FAILURES = (*MISTAKES, OSError, FlowError)
CLOSE_S = 0.5
REST_S = 10.0
"""A lane that moved nothing for so long gives back the memory that it keeps warm."""


@dataclass(frozen=True, slots=True)
class _Turn:
    act: Callable[[Channel], Any]
    done: asyncio.Future[Any]


def lane_name(turn: LaneTurn) -> str:
    """The name of a lane's incarnation, equal at both ends."""
    return f"{turn.sender}>{turn.receiver}/{turn.kind}/{turn.incarnation}"


class Lane:
    """One direction between this worker and a peer."""

    def __init__(
        self, name: str, incarnation: int, rest_s: float, pace: Pace, open_channel: Callable[[], Channel]
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self._rest_s = rest_s
        self._pace = pace
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._loop = asyncio.get_running_loop()
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._broken: str | None = None
        self._next_sequence = 0
        # A daemon: a thread inside gloo cannot be woken, and must not keep a finished worker alive.
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Its thread still runs."""
        return self._thread.is_alive()

    def take(self, sequence: int, act: Callable[[Channel], Any]) -> asyncio.Future[Any]:
        """Do this with the channel after all earlier turns; the future brings what it returns, or TransferError."""
        done: asyncio.Future[Any] = self._loop.create_future()
        if self._broken is None and sequence != self._next_sequence:
            self._broken = f"turn {sequence} came where {self._next_sequence} was due"
        if self._broken is not None:
            done.set_exception(self._error())
            self._turns.put(None)
            return done
        self._next_sequence += 1
        self._waiting.add(done)
        done.add_done_callback(self._after)
        self._turns.put(_Turn(act, done))
        return done

    def _after(self, done: asyncio.Future[Any]) -> None:
        self._waiting.discard(done)
        if not done.cancelled() and done.exception() is not None:
            # Nothing is queued after this: the thread of a broken lane ends, whatever the controller does next.
            self._turns.put(None)

    def fail(self, reason: str) -> None:
        """The other end is gone or this incarnation is void: whoever waits is freed now, the thread when it can be."""
        if self._broken is None:
            self._broken = reason
        for done in list(self._waiting):
            settle(done, None, self._error())
        self._turns.put(None)
        if self._channel is not None:
            self._channel.interrupt()

    def close(self) -> None:
        """No further transfer; the thread ends after those that are queued."""
        self._turns.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread: a group that is still open when the interpreter exits aborts the process."""
        joined(self._thread, deadline_s)

    def _run(self) -> None:
        try:
            while (turn := self._next()) is not None:
                result = self._do(turn)
                self._report(turn.done, result)
                # What was moved belongs to whoever asked; a thread that waits must not hold on to it.
                del turn, result
        finally:
            # However it ended: nobody waits for a thread that is not there.
            self._broken = self._broken or "it is closed"
            self._tell(self.fail, self._broken)
            self._let_go()

    def _next(self) -> _Turn | None:
        for rests in itertools.count():
            try:
                # Both ends rest at about the same time: what one says then the other hears soon, not a rest later.
                rest_s = self._rest_s / (10 if rests % 3 else 1)
                return taken(self._turns, rest_s, f"the next turn of lane {self.name}", CONTROLLER)
            except WaitExpired:
                if self._channel is None:
                    continue
                try:
                    self._channel.rest()
                    if not rests:
                        give_back_heap()
                except FAILURES as error:
                    self._break(error)
                    return None
        return None

    def _do(self, turn: _Turn) -> Any:
        if self._broken is None:
            try:
                self._channel = self._channel or self._open_channel()
                self._pace.begin()
                return turn.act(self._channel)
            except FAILURES as error:
                self._break(error)
        return None

    def _break(self, error: BaseException) -> None:
        words = str(error).splitlines() if isinstance(error, RuntimeError | OSError | FlowError) else []
        self._broken = self._broken or (words[0] if words else repr(error))
        # At once, not when the lane is dropped: the other end may be waiting for this one.
        self._let_go()

    def _let_go(self) -> None:
        with contextlib.suppress(*FAILURES):  # of a lane that has ended nothing more is wanted
            if self._channel is not None:
                self._channel.close()

    def _error(self) -> TransferError:
        return TransferError(f"lane {self.name} failed: {self._broken}")

    def _report(self, done: asyncio.Future[Any], result: Any) -> None:
        self._tell(settle, done, result, None if self._broken is None else self._error())

    def _tell(self, act: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(act, *arguments)


class LaneSet:
    """All lanes of this worker, made as their first turn comes."""

    def __init__(
        self,
        worker: str,
        transports: Mapping[str, Transport],
        deadline_s: float,
        signal: Callable[[str, str, str, bytes], None],
        rest_s: float = REST_S,
        least_bytes_per_s: float = LEAST_BYTES_PER_S,
    ) -> None:
        self._worker = worker
        self._transports = transports
        self._deadline_s = deadline_s
        self._signal = signal
        self._rest_s = rest_s
        self._least_bytes_per_s = least_bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        self._stores: dict[str, SignalStore] = {}
        self._retired: list[Lane] = []

    def send(self, turn: LaneTurn, runs: Sequence[Run]) -> asyncio.Future[None]:
        """Send one message. Its rows must not change before that is done; they are not copied until it moves."""
        return self._take(turn, lambda channel: channel.send(runs))

    def receive(self, turn: LaneTurn, sizes: Sequence[Sequence[int]]) -> asyncio.Future[list[torch.Tensor]]:
        """Receive one message: for each run the sizes in bytes of its rows. Brings the bytes of each run."""
        return self._take(turn, lambda channel: channel.receive(sizes))

    def send_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> asyncio.Future[None]:
        """Send tensors one by one. They are asked for on the lane's thread, the next when the one before has moved."""

        def send(channel: Channel) -> None:
            for tensor in tensors:
                channel.send([Run.of(tensor)])

        return self._take(turn, send)

    def receive_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> asyncio.Future[None]:
        """The other end of `send_each`: fill these byte tensors, one by one."""

        def receive(channel: Channel) -> None:
            for tensor in tensors:
                (received,) = channel.receive([(tensor.nbytes,)])
                tensor.copy_(received)

        return self._take(turn, receive)

    def refuse(self, turn: LaneTurn, reason: str) -> None:
        """This turn cannot be taken here: its lane fails at both ends."""

        def refuse(channel: Channel) -> None:  # noqa: ARG001
            raise TransferError(reason)

        self._take(turn, refuse).add_done_callback(seen)

    def deliver(self, peer: str, lane: str, key: str, value: bytes) -> None:
        """A rendezvous key from the other end, possibly before our first turn; or word that the peer is gone."""
        if key != GONE:
            self._store(peer, lane).deliver(key, value)
            return
        for ends in [ends for ends in self._lanes if peer in ends[:2]]:
            gone = self._lanes.pop(ends)
            self._drop(gone, f"{peer} has left the run")

    def drop_all(self, reason: str) -> None:
        """Every lane is void, also those that are still being made: whoever waits for one is freed now."""
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            self._drop(lane, reason)
        stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.close(reason)

    async def close(self) -> None:
        """Close every lane; those that are stuck with their peer are left to their deadline."""
        lanes = [*self._lanes.values(), *self._retired]
        for lane in lanes:
            lane.close()
        end_s = self._loop.time() + CLOSE_S
        for lane in lanes:
            await asyncio.to_thread(lane.join, max(end_s - self._loop.time(), 0.0))

    def _take(self, turn: LaneTurn, act: Callable[[Channel], Any]) -> asyncio.Future[Any]:
        key = (turn.sender, turn.receiver, turn.kind)
        lane = self._lanes.get(key)
        if lane is not None and turn.incarnation < lane.incarnation:
            stale: asyncio.Future[Any] = self._loop.create_future()
            stale.set_exception(TransferError(f"lane {lane_name(turn)} is stale: {lane.name} has taken its place"))
            return stale
        if lane is None or turn.incarnation > lane.incarnation:
            if lane is not None:
                self._drop(lane, "it was made anew")
            lane = self._lanes[key] = self._open(turn)
        return lane.take(turn.sequence, act)

    def _drop(self, lane: Lane, reason: str) -> None:
        store = self._stores.pop(lane.name, None)
        if store is not None:
            store.close(reason)
        lane.fail(reason)
        self._retired = [*(one for one in self._retired if one.alive), lane]

    def _open(self, turn: LaneTurn) -> Lane:
        name = lane_name(turn)
        sending = turn.sender == self._worker
        peer = turn.receiver if sending else turn.sender
        store, transport = self._store(peer, name), self._transports.get(turn.transport)
        pace = Pace(name, self._deadline_s, self._least_bytes_per_s)

        def open_channel() -> Channel:
            if transport is None:
                raise TransferError(f"this worker has no transport {turn.transport!r}")
            return transport.open(store, sending, pace)

        return Lane(name, turn.incarnation, self._rest_s, pace, open_channel)

    def _store(self, peer: str, lane: str) -> SignalStore:
        if lane not in self._stores:

            def post(key: str, value: bytes) -> None:
                self._loop.call_soon_threadsafe(self._signal, peer, lane, key, value)

            self._stores[lane] = SignalStore(lane, post, self._deadline_s, peer)
        return self._stores[lane]
