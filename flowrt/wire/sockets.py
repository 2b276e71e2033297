"""ZeroMQ sockets under asyncio: the only file that imports zmq.

Raw ROUTER and DEALER sockets on ``loop.add_reader``: about half the cost of zmq.asyncio. The descriptor of a ZeroMQ
socket is edge-triggered, so a wake-up must drain it until it would block, and a send must look whether it made
the socket readable without a new edge. No send blocks: a full queue is an error with a name.
"""

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from random import randint
from time import monotonic
from typing import Any

import zmq
from zmq.backend import Socket as BareSocket
from zmq.backend import zmq_poll

from flowrt.errors import ConfigError
from flowrt.wire.addresses import check_address
from flowrt.wire.codec import MAX_MESSAGE_BYTES
from flowrt.wire.gate import Failure
from flowrt.wire.keys import ControllerKeys, Pair, WorkerKeys
from flowrt.wire.silence import SPOKEN_MS

_DRAIN_AT_MOST = 256
# To wake ZeroMQ's thread costs as much as to answer: it is woken for so many at once, and none waits much longer.
_TOGETHER, _TOGETHER_S = 16, 0.0003
_BACKLOG = 4096  # connections that may wait to be accepted: a whole cluster connects at once
_OPTIONS = {zmq.LINGER: 500, zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.BACKLOG: _BACKLOG}
# Of one peer: messages that wait to be read (it sends no faster); answers that it does not read (it counts as gone).
_WAITING = {zmq.RCVHWM: 1000, zmq.SNDHWM: 100_000}
# A worker whose machine is gone closes nothing: the kernel asks who is silent, and gives up after 16 s; a link that was
# cut for 5 s speaks after up to 7 s. Of stopped processes, and that a link is cut, `silence` knows within 5 s.
_ASKING = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 1, zmq.TCP_KEEPALIVE_INTVL: 1, zmq.TCP_KEEPALIVE_CNT: 15}
_SERVER_OPTIONS = {zmq.ROUTER_MANDATORY: 1, zmq.HANDSHAKE_IVL: 5000, zmq.TCP_MAXRT: 15000, **_WAITING, **_ASKING}
_ASK_KEYS = "inproc://zeromq.zap.01"
_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Failure.UNKNOWN_KEY,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Failure.OTHER_WAYS,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Failure.SILENT,
}
_EVENT = struct.Struct("=HI")

# As plain numbers: operations on pyzmq's enumerations cost more than the calls that they are passed to.
_NOBLOCK, _MORE, _POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.POLLIN)


class Socket:
    """What both ends share: a socket that calls back for every multipart message."""

    def __init__(
        self, kind: int, beside: "Socket | None" = None, options: dict[zmq.SocketOption, int] | None = None
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context() if beside is None else beside._context
        self._shared = beside is not None
        self.socket = self._context.socket(kind)
        self._descriptor = int(self.socket.getsockopt(zmq.FD))
        for option, value in (_OPTIONS | (options or {})).items():
            self.socket.setsockopt(option, value)
        # The calls below pyzmq's Python layer, which checks and converts on every call what is fixed here.
        self._send_frame = partial(BareSocket.send, self.socket)
        self._receive_frame = partial(BareSocket.recv, self.socket, _NOBLOCK)
        # A frame that is not copied yet knows whether more follows; pyzmq's types do not know the frame.
        self._receive_whole: Callable[[], Any] = partial(BareSocket.recv, self.socket, _NOBLOCK, copy=False)
        self.look = partial(zmq_poll, [(self.socket, _POLLIN)], 0)
        self.latest: zmq.Frame | None = None
        self._names_sender = kind == zmq.ROUTER
        self._loop = asyncio.get_running_loop()
        self._receive: Callable[[list[bytes]], None] | None = None
        self._posted: list[list[bytes]] = []
        self._posted_until_s = 0.0
        self._unsent: Callable[[bytes], None] = lambda peer: None  # noqa: ARG005
        self._draining = self._closed = False

    def start(
        self,
        receive: Callable[[list[bytes]], None],
        unsent: Callable[[bytes], None] = lambda peer: None,  # noqa: ARG005
    ) -> None:
        """``unsent`` hears of each peer to whom something was posted and who is gone."""
        self._receive, self._unsent = receive, unsent
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)

    def post(self, frames: list[bytes]) -> None:
        """Send with what else is posted until the messages that wait are received, or until `flush`."""
        if not self._posted:
            self._posted_until_s = monotonic() + _TOGETHER_S
        self._posted.append(frames)
        if len(self._posted) >= _TOGETHER or monotonic() > self._posted_until_s:
            self._send_posted()

    def flush(self) -> None:
        """Send what was posted; while messages are received, that is done when they are."""
        if not self._draining:
            self._send_posted()
            if self.look():
                self._loop.call_soon(self.drain)

    def _send_posted(self) -> None:
        posted, self._posted = self._posted, []
        for frames in posted:
            try:
                self._send_frame(frames[0], _MORE)
                self._send_frame(frames[1], _NOBLOCK)
            except zmq.ZMQError as error:
                if not _is_gone(error):
                    raise
                self._unsent(frames[0])

    def send(self, frames: list[bytes]) -> None:
        if self._posted:
            self._send_posted()
        for frame in frames[:-1]:
            self._send_frame(frame, _MORE)
        self._send_frame(frames[-1], _NOBLOCK)
        # A look costs a system call; a drain that is under way will look anyway.
        if not self._draining and self.look():
            self._loop.call_soon(self.drain)

    def drain(self) -> bool:
        if self._receive is None or self._closed or self._draining:
            return not self._draining
        self._draining, emptied = True, False
        try:
            emptied = self._receive_waiting(self._receive)
        finally:
            self._send_posted()
            self._draining = False
            if not emptied and not self._closed:
                # More is waiting, but others on this loop want a turn too.
                self._loop.call_soon(self.drain)
        return emptied

    def _receive_waiting(self, receive: Callable[[list[bytes]], None]) -> bool:
        """Take what is waiting, up to a limit; returns whether that was all."""
        receive_frame, receive_whole, names_sender = self._receive_frame, self._receive_whole, self._names_sender
        for taken in range(_DRAIN_AT_MOST):
            # Most often one message is all there is, and to look costs less than an exception; in a crowd, more. What
            # is sent may make the socket readable: the last look comes after it.
            if taken == 1:
                self._send_posted()
                if not self.look():
                    return True
            try:
                frames = [receive_frame()] if names_sender else []
                frame = receive_whole()
            except zmq.Again:
                if not self._posted:
                    return True
                self._send_posted()
                continue
            frames.append(frame.bytes)
            while frame.more:
                frame = receive_whole()
                frames[9:] = [frame.bytes]  # ZeroMQ asks for a key in nine, peers say two: more are too many
            self.latest = frame
            if self._posted and monotonic() > self._posted_until_s:
                self._send_posted()
            receive(frames)
            if self._closed:
                return True
        return False

    def try_send(self, frames: list[bytes]) -> bool:
        """Send; False when the peer named by the first frame is gone."""
        try:
            self.send(frames)
        except zmq.ZMQError as error:
            if _is_gone(error):
                return False
            raise
        return True

    def source(self) -> int:
        """The descriptor of the connection over which the latest message came."""
        return -1 if self.latest is None else int(self.latest.get(zmq.SRCFD))

    def bind(self, address: str) -> str:
        """Listen; returns the address with its real port. Raises ConfigError when it is taken."""
        _bind(self.socket, address)
        return str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, address: str) -> None:
        """Connect, again and again. Raises ConfigError on a malformed address."""
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"controller address {address!r} cannot be used ({error.strerror}); write tcp://HOST:PORT"
            ) from error

    def close(self, linger_ms: int | None = None) -> None:
        if not self._closed:
            self._send_posted()
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger_ms)
            if not self._shared:
                self._context.term()


class Monitor:
    """Calls back for events of a socket's connections; ZeroMQ says the descriptor at best, never the peer."""

    def __init__(
        self,
        watched: Socket,
        closed: Callable[[int], object],
        failed: Callable[[Failure], None],
        accepted: Callable[[int], object] | None = None,
    ) -> None:
        """``closed`` and ``accepted`` are told the descriptor, ``failed`` why a handshake came to nothing."""
        socket, on_event = watched.socket, {int(zmq.EVENT_DISCONNECTED): closed}
        if accepted is not None:
            on_event[int(zmq.EVENT_ACCEPTED)] = accepted
        self._watched, self._on_event, self._failed = socket, on_event, failed
        self._events = socket.get_monitor_socket(sum(on_event) + sum(_FAILURES))
        self._descriptor, self._loop = int(self._events.getsockopt(zmq.FD)), asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._events.closed and int(self._events.getsockopt(zmq.EVENTS)) & _POLLIN:
            event, value = _EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])
            if event in _FAILURES:
                self._failed(_FAILURES[event])
            else:
                self._on_event[event](value)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._watched.disable_monitor()
        self._events.close(linger=0)


def _is_gone(error: zmq.ZMQError) -> bool:
    """Whether a message was not sent because its peer has left, or reads nothing."""
    return error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN)


def new_pair() -> Pair:
    """A fresh CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return Pair(public.decode(), secret.decode())


def check_free(address: str, keyed: bool) -> None:
    """Bind and let go. Raises ConfigError when the address is malformed, taken, or open to others without keys."""
    check_address(address, keyed)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        _bind(socket, address)


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        reason = "is in use" if error.errno == zmq.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise ConfigError(f"controller address {address} {reason}; choose another port, or 0 for any") from error


def server_socket(keys: ControllerKeys | None = None) -> Socket:
    """The controller's socket, not yet bound."""
    raw = Socket(zmq.ROUTER, options=_SERVER_OPTIONS)
    if keys is not None:
        raw.socket.setsockopt(zmq.CURVE_SERVER, 1)
        raw.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
        raw.socket.setsockopt_string(zmq.ZAP_DOMAIN, "flowrt")
    return raw


def asking_socket(beside: Socket) -> Socket:
    """Where ZeroMQ asks whether a key is known. Before anybody can connect: if nobody answers, every key gets in."""
    raw = Socket(zmq.ROUTER, beside)
    raw.socket.bind(_ASK_KEYS)
    return raw


def client_options() -> dict[zmq.SocketOption, int]:
    """A worker's I/O thread says something every second, however busy the worker is, and each at times of its own:
    thousands join at the same moment.

    Whether a controller that is silent may come back, `Contact` knows: ZeroMQ never gives it up.
    """
    return {zmq.HEARTBEAT_IVL: randint(SPOKEN_MS * 2 // 3, SPOKEN_MS), zmq.HEARTBEAT_TIMEOUT: 3_600_000}


def client_socket(keys: WorkerKeys | None = None) -> Socket:
    """A worker's socket, not yet connected."""
    raw = Socket(zmq.DEALER, options=client_options())
    if keys is not None:
        raw.socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.controller)
        raw.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.own.public)
        raw.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
    return raw
