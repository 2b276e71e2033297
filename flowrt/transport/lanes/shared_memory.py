"""Lanes through shared memory, for workers on one host: one copy by the sender, views for the receiver.

- The sender copies rows into a segment. The receiver's tensors are views of it, which it may keep and change.
- A segment is reused when the receiver has no views of it any more, which the receiver reports with each READY and
  RELEASE. So pages are rarely faulted in, and a receiver that keeps views costs memory but never makes the sender wait.
- A segment is a memfd, sealed against truncation. Its descriptor is closed when both ends have mapped it: a crash
  leaves nothing behind, and segments do not count as open files.
- The ends exchange small packets, a kind and some numbers, over an abstract Unix socket.
"""

import contextlib
import ctypes
import fcntl
import mmap
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
from flowrt.runtime.waits import blocking
from flowrt.transport.buffers import MAX_IDLE_BYTES, MAX_OVERSIZE_FACTOR, capacity
from flowrt.transport.lanes.channel import MAX_CHUNK_BYTES, ColumnRun, SignalStore, TransferRateLimit, split_run

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """A mapping of a segment in this process, unmapped when nothing refers to it any more."""

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.number = number
        self.size = size
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise TransferError(f"cannot map {size} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
        self._memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(self._memory, _libc.munmap, address, size).atexit = False

    def view(self, size: int) -> memoryview:
        """The first ``size`` bytes. The mapping is kept as long as this view or a tensor made of it."""
        return memoryview(self._memory).cast("B")[:size]


def make_segment(number: int, size: int) -> tuple[Segment, int]:
    """A new segment and its descriptor, which the caller must close."""
    with contextlib.ExitStack() as on_error:
        fd = os.memfd_create("flowrt-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        on_error.callback(os.close, fd)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        segment = Segment(number, fd, size)
        on_error.pop_all()
    return segment, fd


def map_segment(number: int, fd: int, size: int) -> Segment:
    """Map a segment of the other end.

    Raises TransferError unless it has this size and is sealed: access to a truncated mapping would kill the process.
    """
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    actual = os.fstat(fd).st_size
    if actual != size or seals & fcntl.F_SEAL_SHRINK == 0:
        raise TransferError(f"the other end sent a segment of {actual} bytes in place of {size}, or an unsealed one")
    return Segment(number, fd, size)


def as_tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


READY, RELEASE = 1, 2  # from the receiver: numbers of segments without views
SEGMENT, UNMAP, MOVED, DONE = 3, 4, 5, 6  # from the sender: (number, size); numbers; none; segments of the message
MAX_NUMBERS = 4096
_SECRET_BYTES = 16
_KEY = "shm"


class ShmTransport:
    """Opens channels between processes of one network namespace, which share abstract sockets."""

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> "ShmSender | ShmReceiver":
        if sending:
            return ShmSender(ControlSocket(store, _connect(store, rate_limit.deadline_s)), rate_limit)
        return ShmReceiver(ControlSocket(store, _accept(store, rate_limit.deadline_s)), rate_limit)


def _accept(store: SignalStore, deadline_s: float) -> socket.socket:
    """Listen on a random address, sent with a secret to the other end only, until it connects."""
    end_s = time.monotonic() + deadline_s
    name = b"flowrt-" + secrets.token_hex(8).encode()
    secret = secrets.token_bytes(_SECRET_BYTES)
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
                receive = partial(caller.recv, _SECRET_BYTES)
                received = blocking(receive, deadline_s, f"the secret of lane {store.lane}", store.peer)
                if secrets.compare_digest(received, secret):
                    return caller
            except TimeoutError:
                raise TransferError(
                    f"lane {store.lane}: the sender did not connect within {deadline_s:.0f} s"
                ) from None
            caller.close()  # the caller was another process on this host


def _connect(store: SignalStore, deadline_s: float) -> socket.socket:
    secret_and_name = store.get(_KEY)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(deadline_s)
    try:
        connect = partial(caller.connect, b"\0" + secret_and_name[_SECRET_BYTES:])
        blocking(connect, deadline_s, f"the receiver of lane {store.lane}", store.peer)
        caller.send(secret_and_name[:_SECRET_BYTES])
    except OSError as error:
        caller.close()
        raise TransferError(f"lane {store.lane}: cannot reach the receiver on this host: {error}") from error
    return caller


class ControlSocket:
    """Sends and receives the packets of one channel."""

    def __init__(self, store: SignalStore, connection: socket.socket) -> None:
        self._lane = store.lane
        self._peer = store.peer
        self._socket = connection
        self._deadline_s = connection.gettimeout() or 0.0

    def send(self, kind: int, numbers: Sequence[int] = (), fds: Sequence[int] = ()) -> None:
        packet = struct.pack(f"<{1 + len(numbers)}q", kind, *numbers)
        try:
            self._socket.settimeout(self._deadline_s)
            send = partial(socket.send_fds, self._socket, [packet], fds)
            blocking(send, self._deadline_s, f"room in the socket of lane {self._lane}", self._peer)
        except OSError as error:
            raise TransferError(f"lane {self._lane}: the other end has closed the connection ({error})") from error

    def receive(self, wait: bool = True) -> tuple[int, tuple[int, ...], list[int]] | None:
        """The kind, numbers and descriptors of the next packet. Without ``wait``: None if there is no packet.

        Raises TransferError at the deadline, and if the other end has closed the connection.
        """
        try:
            # MSG_DONTWAIT has no effect on a Python socket with a timeout.
            timeout_s = self._deadline_s if wait else 0.0
            self._socket.settimeout(timeout_s)
            receive = partial(socket.recv_fds, self._socket, 8 * (1 + MAX_NUMBERS), 1)
            packet, fds, _, _ = blocking(receive, timeout_s, f"a packet of lane {self._lane}", self._peer)
        except TimeoutError:
            reason = f"lane {self._lane}: nothing moved for {self._deadline_s:.0f} s"
            raise TransferError(reason) from None
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransferError(f"lane {self._lane}: {error}") from error
        if not packet:
            raise TransferError(f"lane {self._lane}: the other end has closed the connection")
        if len(packet) % 8:
            raise TransferError(f"lane {self._lane}: received a malformed packet of {len(packet)} bytes")
        kind, *numbers = struct.unpack(f"<{len(packet) // 8}q", packet)
        return kind, tuple(numbers), fds

    def interrupt(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected

    def close(self) -> None:
        self._socket.close()


class ShmSender:
    """The sending end, which owns the segments."""

    def __init__(self, control: ControlSocket, rate_limit: TransferRateLimit) -> None:
        self._control = control
        self._rate_limit = rate_limit
        self._segment_count = 0
        self._ready = False
        self._idle: dict[int, Segment] = {}
        self._lent: dict[int, Segment] = {}

    def send(self, runs: Sequence[ColumnRun]) -> None:
        while not self._ready:
            self._receive_packet()
            self._rate_limit.moved(0)
        self._ready = False
        numbers = []
        for run in runs:
            size = sum(run.sizes)
            segment = self._segment(size) if size else None
            numbers.append(0 if segment is None else segment.number)
            if segment is None:
                continue
            target = as_tensor(segment.view(size))
            for chunk in split_run(run.sizes, MAX_CHUNK_BYTES):
                if chunk.start:
                    self._control.send(MOVED)
                run.copy(chunk, target[chunk.start : chunk.start + chunk.size])
                self._rate_limit.moved(chunk.size)
        self._control.send(DONE, numbers)
        self._shrink(MAX_IDLE_BYTES)

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:  # noqa: ARG002
        raise TransferError("this end of the lane only sends")

    def on_idle(self) -> None:
        while self._receive_packet(wait=False):
            pass
        self._shrink(0)

    def interrupt(self) -> None:
        self._control.interrupt()

    def close(self) -> None:
        self._control.close()
        self._idle.clear()
        self._lent.clear()

    def _receive_packet(self, wait: bool = True) -> bool:
        """Handle one packet of the receiver. Without ``wait``: returns False if there is no packet."""
        packet = self._control.receive(wait)
        if packet is None:
            return False
        kind, numbers, _ = packet
        for number in numbers:
            segment = self._lent.pop(number, None)
            if segment is not None:
                self._idle[number] = segment
        # The receiver may be ready long before there is a message to send, also while this end is idle.
        self._ready = self._ready or kind == READY
        return True

    def _segment(self, size: int) -> Segment:
        fitting = [
            segment for segment in self._idle.values() if size <= segment.size <= MAX_OVERSIZE_FACTOR * capacity(size)
        ]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.size)
            del self._idle[segment.number]
        else:
            self._segment_count += 1
            segment, fd = make_segment(self._segment_count, capacity(size))
            try:
                self._control.send(SEGMENT, (segment.number, segment.size), [fd])
            finally:
                os.close(fd)
        self._lent[segment.number] = segment
        return segment

    def _shrink(self, keep_bytes: int) -> None:
        """Unmap the segments that have been idle longest, until ``keep_bytes`` are left."""
        kept = sum(segment.size for segment in self._idle.values())
        while kept > keep_bytes:
            number = next(iter(self._idle))
            kept -= self._idle.pop(number).size
            self._control.send(UNMAP, (number,))


class ShmReceiver:
    """The receiving end, which maps the sender's segments."""

    def __init__(self, control: ControlSocket, rate_limit: TransferRateLimit) -> None:
        self._control = control
        self._rate_limit = rate_limit
        self._segments: dict[int, Segment] = {}
        # Filled by the thread that drops the last view of a segment.
        self._released: deque[int] = deque()

    def send(self, runs: Sequence[ColumnRun]) -> None:  # noqa: ARG002
        raise TransferError("this end of the lane only receives")

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._send_released(READY)
        left = sum(map(sum, sizes))
        while (numbers := self._receive_packet()) is None:
            # MOVED does not have a number of bytes: at most a chunk, and at most the rest of the message.
            self._rate_limit.moved(min(left, MAX_CHUNK_BYTES))
            left -= min(left, MAX_CHUNK_BYTES)
        if len(numbers) != len(sizes):
            raise TransferError(f"received a message of {len(numbers)} runs in place of {len(sizes)}")
        return [self._view(number, sum(rows)) for number, rows in zip(numbers, sizes, strict=True)]

    def on_idle(self) -> None:
        if self._released:
            self._send_released(RELEASE)
        while (packet := self._control.receive(wait=False)) is not None:
            self._handle(*packet)

    def interrupt(self) -> None:
        self._control.interrupt()

    def close(self) -> None:
        self._control.close()
        self._segments.clear()

    def _send_released(self, kind: int) -> None:
        numbers = [self._released.popleft() for _ in range(min(len(self._released), MAX_NUMBERS))]
        self._control.send(kind, numbers)

    def _receive_packet(self) -> tuple[int, ...] | None:
        packet = self._control.receive()
        return None if packet is None else self._handle(*packet)

    def _handle(self, kind: int, numbers: tuple[int, ...], fds: list[int]) -> tuple[int, ...] | None:
        """Handle one packet of the sender. Returns the segments of the message when it is complete, else None."""
        try:
            if kind == SEGMENT and len(fds) == 1:
                self._segments[numbers[0]] = map_segment(numbers[0], fds[0], numbers[1])
            elif kind == UNMAP:
                self._segments.pop(numbers[0], None)
        finally:
            for fd in fds:
                os.close(fd)
        return numbers if kind == DONE else None

    def _view(self, number: int, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        segment = self._segments.get(number)
        if segment is None or segment.size < size:
            raise TransferError(f"received a message in segment {number}, which is not one of at least {size} bytes")
        view = segment.view(size)
        weakref.finalize(view, self._released.append, number).atexit = False
        return as_tensor(view)
