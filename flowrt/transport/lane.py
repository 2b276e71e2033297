"""Lanes: ordered streams of tensors between two workers, each with a thread of its own.

gloo's waits block a thread and cannot be cancelled, and a send is a rendezvous: it does not complete before the
other end receives. So every lane has its own thread and its own two-rank group; a peer that hangs stops one lane, and
its deadline turns that into an error with a name. A lane that failed stays failed: the controller opens a new
incarnation.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from flowrt.errors import TransferError
from flowrt.transport.backends import RECEIVER_RANK, SENDER_RANK, GlooBackend, SignalStore
from flowrt.wire.records import LaneTurn

CLOSE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Transfer:
    tensors: Iterable[torch.Tensor]
    done: asyncio.Future[None]


def lane_name(turn: LaneTurn) -> str:
    """The name of a lane's incarnation, equal at both ends."""
    return f"{turn.sender}>{turn.receiver}/{turn.kind}/{turn.incarnation}"


class Lane:
    """One direction between this worker and a peer."""

    def __init__(self, name: str, rank: int, make_group: Callable[[], ProcessGroup]) -> None:
        self.name = name
        self._rank = rank
        self._make_group = make_group
        self._loop = asyncio.get_running_loop()
        self._transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._broken: str | None = None
        self._next_sequence = 0
        # A daemon: a thread inside gloo cannot be woken, and must not keep a finished worker alive.
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._thread.start()

    def transfer(self, sequence: int, tensors: Iterable[torch.Tensor]) -> asyncio.Future[None]:
        """Send (or fill, at the receiving end) these contiguous tensors after all earlier turns.

        They are taken one by one, on the lane's thread: the next is asked for when the one before has moved.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        if self._broken is None and sequence != self._next_sequence:
            self._broken = f"turn {sequence} came where {self._next_sequence} was due"
        if self._broken is not None:
            done.set_exception(TransferError(f"lane {self.name} is broken: {self._broken}"))
            return done
        self._next_sequence += 1
        self._transfers.put(_Transfer(tensors, done))
        return done

    def close(self) -> None:
        """No further transfer; the thread ends after those that are queued."""
        self._transfers.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread: a group that is still open when the interpreter exits aborts the process."""
        self._thread.join(deadline_s)

    def _run(self) -> None:
        group: ProcessGroup | None = None
        while (transfer := self._transfers.get()) is not None:
            if self._broken is None:
                try:
                    group = group or self._make_group()
                    self._move(group, transfer.tensors)
                except (RuntimeError, TransferError) as error:
                    self._broken = str(error).splitlines()[0]
                    group = None  # its connection closes, and the other end learns of it at once
            self._report(transfer.done)
            del transfer  # else its tensors stay in memory until there is another

    def _move(self, group: ProcessGroup, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._rank == SENDER_RANK:
                group.send([tensor], RECEIVER_RANK, 0).wait()
            else:
                group.recv([tensor], SENDER_RANK, 0).wait()

    def _report(self, done: asyncio.Future[None]) -> None:
        error = None if self._broken is None else TransferError(f"lane {self.name} failed: {self._broken}")
        try:
            self._loop.call_soon_threadsafe(_settle, done, error)
        except RuntimeError:
            return  # the loop is closed: nobody is left to tell


def _settle(done: asyncio.Future[None], error: TransferError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class LaneSet:
    """All lanes of this worker, made as their first turn comes."""

    def __init__(
        self, worker: str, backend: GlooBackend, deadline_s: float, signal: Callable[[str, str, str, bytes], None]
    ) -> None:
        self._worker = worker
        self._backend = backend
        self._deadline_s = deadline_s
        self._signal = signal
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        self._stores: dict[str, SignalStore] = {}

    def transfer(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> asyncio.Future[None]:
        """Take this turn: send the tensors if this worker is the sender, else receive into them."""
        key = (turn.sender, turn.receiver, turn.kind)
        lane = self._lanes.get(key)
        if lane is None or lane.name != lane_name(turn):
            if lane is not None:
                lane.close()
                self._stores.pop(lane.name, None)
            lane = self._lanes[key] = self._open(turn)
        return lane.transfer(turn.sequence, tensors)

    def deliver(self, peer: str, lane: str, key: str, value: bytes) -> None:
        """A rendezvous key from the other end, possibly before our first turn."""
        self._store(peer, lane).deliver(key, value)

    async def close(self) -> None:
        """Close every lane; one that is stuck with its peer is left to its deadline."""
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.join, CLOSE_S)

    def _open(self, turn: LaneTurn) -> Lane:
        name = lane_name(turn)
        sending = turn.sender == self._worker
        rank, peer = (SENDER_RANK, turn.receiver) if sending else (RECEIVER_RANK, turn.sender)
        store = self._store(peer, name)
        return Lane(name, rank, lambda: self._backend.make_group(store, rank, self._deadline_s))

    def _store(self, peer: str, lane: str) -> SignalStore:
        if lane not in self._stores:

            def post(key: str, value: bytes) -> None:
                self._loop.call_soon_threadsafe(self._signal, peer, lane, key, value)

            self._stores[lane] = SignalStore(lane, post, self._deadline_s)
        return self._stores[lane]


def seen(done: asyncio.Future[None]) -> None:
    """For transfers whose other end reports a failure: asyncio need not complain that nobody looked at this one."""
    if not done.cancelled():
        done.exception()
