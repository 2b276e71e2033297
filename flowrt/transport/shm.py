"""Lanes through shared memory, for workers on one host: one copy in, views out.

The sender copies rows from where they lie straight into a segment; the receiver's tensors are views of that very
memory, which it may keep and change. A segment is used again only when the receiver has let go of all of them: it says
so whenever it is ready for the next message. So segments stay warm, and a slow reader costs memory, never a wait.

The two ends talk over a Unix socket without a name in the file system: small packets, and the descriptors of segments
that are new. A packet is a kind and some numbers.
"""

import os
import secrets
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from flowrt.errors import TransferError
from flowrt.transport.pace import Pace
from flowrt.transport.pieces import PIECE_BYTES, Run, cut
from flowrt.transport.rendezvous import SignalStore
from flowrt.transport.segments import Segment, as_tensor, make_segment, map_segment
from flowrt.transport.warm import KEEP_BYTES, ROOMY, capacity
from flowrt.waiting import blocking

READY, RELEASE = 1, 2  # receiver: numbers of the segments that nobody looks at any more
SEGMENT, FORGET, MOVED, DONE = 3, 4, 5, 6  # sender: (number, size), numbers, none, numbers of the message's segments
MOST_NUMBERS = 4096
_SECRET_BYTES = 16
_KEY = "shm"


class ShmTransport:
    """Channels between processes that share a kernel and its abstract sockets."""

    def open(self, store: SignalStore, sending: bool, pace: Pace) -> "ShmSender | ShmReceiver":
        if sending:
            return ShmSender(Talk(store, _call(store, pace.deadline_s)), pace)
        return ShmReceiver(Talk(store, _await_call(store, pace.deadline_s)), pace)


def _await_call(store: SignalStore, deadline_s: float) -> socket.socket:
    """Listen where only the other end knows, until it comes."""
    end_s = time.monotonic() + deadline_s
    name, secret = b"flowrt-" + secrets.token_hex(8).encode(), secrets.token_bytes(_SECRET_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name)
        listener.listen()
        store.set(_KEY, secret + name)
        while True:
            left_s = max(end_s - time.monotonic(), 0.001)
            listener.settimeout(left_s)
            try:
                caller, _ = blocking(listener.accept, left_s, f"the sender of lane {store.lane}", store.peer)
                caller.settimeout(deadline_s)
                hear = partial(caller.recv, _SECRET_BYTES)
                told = blocking(hear, deadline_s, f"the greeting of lane {store.lane}", store.peer)
                if secrets.compare_digest(told, secret):
                    return caller
            except TimeoutError:
                raise TransferError(f"lane {store.lane}: the sender did not come within {deadline_s:.0f} s") from None
            caller.close()  # somebody else on this host


def _call(store: SignalStore, deadline_s: float) -> socket.socket:
    told = store.get(_KEY)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(deadline_s)
    try:
        connect = partial(caller.connect, b"\0" + told[_SECRET_BYTES:])
        blocking(connect, deadline_s, f"the receiver of lane {store.lane}", store.peer)
        caller.send(told[:_SECRET_BYTES])
    except OSError as error:
        caller.close()
        raise TransferError(f"lane {store.lane}: cannot reach the receiver on this host: {error}") from error
    return caller


class Talk:
    """Packets over the socket of one channel."""

    def __init__(self, store: SignalStore, connection: socket.socket) -> None:
        self._lane, self._peer = store.lane, store.peer
        self._socket = connection
        self._deadline_s = connection.gettimeout() or 0.0

    def say(self, kind: int, numbers: Sequence[int] = (), fds: Sequence[int] = ()) -> None:
        packet = struct.pack(f"<{1 + len(numbers)}q", kind, *numbers)
        try:
            self._socket.settimeout(self._deadline_s)
            say = partial(socket.send_fds, self._socket, [packet], fds)
            blocking(say, self._deadline_s, f"room in the socket of lane {self._lane}", self._peer)
        except OSError as error:
            raise TransferError(f"lane {self._lane}: the other end has gone ({error})") from error

    def hear(self, wait: bool = True) -> tuple[int, tuple[int, ...], list[int]] | None:
        """The next packet; None when there is none now and ``wait`` is False."""
        try:
            # A flag would not do: a socket with a timeout waits for it before it looks at any flag.
            within_s = self._deadline_s if wait else 0.0
            self._socket.settimeout(within_s)
            hear = partial(socket.recv_fds, self._socket, 8 * (1 + MOST_NUMBERS), 1)
            packet, fds, _, _ = blocking(hear, within_s, f"a word over lane {self._lane}", self._peer)
        except TimeoutError:
            reason = f"lane {self._lane}: nothing moved for {self._deadline_s:.0f} s"
            raise TransferError(reason) from None
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransferError(f"lane {self._lane}: {error}") from error
        if not packet:
            raise TransferError(f"lane {self._lane}: the other end has gone")
        if len(packet) % 8:
            raise TransferError(f"lane {self._lane}: a packet of {len(packet)} bytes is none of ours")
        kind, *numbers = struct.unpack(f"<{len(packet) // 8}q", packet)
        return kind, tuple(numbers), fds

    def interrupt(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more

    def close(self) -> None:
        self._socket.close()


class ShmSender:
    """The end that owns the segments."""

    def __init__(self, talk: Talk, pace: Pace) -> None:
        self._talk = talk
        self._pace = pace
        self._made = 0
        self._ready = False
        self._idle: dict[int, Segment] = {}
        self._lent: dict[int, Segment] = {}

    def send(self, runs: Sequence[Run]) -> None:
        while not self._ready:
            self._hear()
            self._pace.moved(0)
        self._ready = False
        numbers = []
        for run in runs:
            size = sum(run.sizes)
            segment = self._segment(size) if size else None
            numbers.append(0 if segment is None else segment.number)
            if segment is None:
                continue
            target = as_tensor(segment.view(size))
            for piece in cut(run.sizes, PIECE_BYTES):
                if piece.start:
                    self._talk.say(MOVED)
                run.copy(piece, target[piece.start : piece.start + piece.size])
                self._pace.moved(piece.size)
        self._talk.say(DONE, numbers)
        self._shrink(KEEP_BYTES)

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:  # noqa: ARG002
        raise TransferError("this end of the lane only sends")

    def rest(self) -> None:
        while self._hear(wait=False):
            pass
        self._shrink(0)

    def interrupt(self) -> None:
        self._talk.interrupt()

    def close(self) -> None:
        self._talk.close()
        self._idle.clear()
        self._lent.clear()

    def _hear(self, wait: bool = True) -> bool:
        """Take back what the receiver let go of, note whether it is ready for a message; False when it said nothing."""
        heard = self._talk.hear(wait)
        if heard is None:
            return False
        kind, numbers, _ = heard
        for number in numbers:
            segment = self._lent.pop(number, None)
            if segment is not None:
                self._idle[number] = segment
        # It may be ready long before there is something to send, and while this end rests.
        self._ready = self._ready or kind == READY
        return True

    def _segment(self, size: int) -> Segment:
        fitting = [one for one in self._idle.values() if size <= one.size <= ROOMY * capacity(size)]
        if fitting:
            segment = min(fitting, key=lambda one: one.size)
            del self._idle[segment.number]
        else:
            self._made += 1
            segment, fd = make_segment(self._made, capacity(size))
            try:
                self._talk.say(SEGMENT, (segment.number, segment.size), [fd])
            finally:
                os.close(fd)
        self._lent[segment.number] = segment
        return segment

    def _shrink(self, keep_bytes: int) -> None:
        """Forget the segments that have been idle longest."""
        kept = sum(segment.size for segment in self._idle.values())
        while kept > keep_bytes:
            number = next(iter(self._idle))
            kept -= self._idle.pop(number).size
            self._talk.say(FORGET, (number,))


class ShmReceiver:
    """The end that looks at them."""

    def __init__(self, talk: Talk, pace: Pace) -> None:
        self._talk = talk
        self._pace = pace
        self._segments: dict[int, Segment] = {}
        # Filled by whichever thread drops the last tensor that looks at a segment.
        self._released: deque[int] = deque()

    def send(self, runs: Sequence[Run]) -> None:  # noqa: ARG002
        raise TransferError("this end of the lane only receives")

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._say_released(READY)
        left = sum(map(sum, sizes))
        while (numbers := self._hear()) is None:
            # How much it was is not said: no more than a piece, and no more than there is.
            self._pace.moved(min(left, PIECE_BYTES))
            left -= min(left, PIECE_BYTES)
        if len(numbers) != len(sizes):
            raise TransferError(f"received a message of {len(numbers)} runs in place of {len(sizes)}")
        return [self._look(number, sum(rows)) for number, rows in zip(numbers, sizes, strict=True)]

    def rest(self) -> None:
        if self._released:
            self._say_released(RELEASE)
        while (heard := self._talk.hear(wait=False)) is not None:
            self._take(*heard)

    def interrupt(self) -> None:
        self._talk.interrupt()

    def close(self) -> None:
        self._talk.close()
        self._segments.clear()

    def _say_released(self, kind: int) -> None:
        numbers = [self._released.popleft() for _ in range(min(len(self._released), MOST_NUMBERS))]
        self._talk.say(kind, numbers)

    def _hear(self) -> tuple[int, ...] | None:
        heard = self._talk.hear()
        return None if heard is None else self._take(*heard)

    def _take(self, kind: int, numbers: tuple[int, ...], fds: list[int]) -> tuple[int, ...] | None:
        """One packet of the sender; the numbers of the message's segments when it is complete."""
        try:
            if kind == SEGMENT and len(fds) == 1:
                self._segments[numbers[0]] = map_segment(numbers[0], fds[0], numbers[1])
            elif kind == FORGET:
                self._segments.pop(numbers[0], None)
        finally:
            for fd in fds:
                os.close(fd)
        return numbers if kind == DONE else None

    def _look(self, number: int, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        segment = self._segments.get(number)
        if segment is None or segment.size < size:
            raise TransferError(f"received a message in segment {number}, which is not one of at least {size} bytes")
        view = segment.view(size)
        weakref.finalize(view, self._released.append, number).atexit = False
        return as_tensor(view)
