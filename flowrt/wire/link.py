"""ZeroMQ under asyncio: the only file that imports zmq.

Raw ROUTER and DEALER sockets on ``loop.add_reader``: about half the cost of zmq.asyncio. The descriptor of a ZeroMQ
socket is edge-triggered, so a wake-up must drain it until it would block, and a send must look whether it made
the socket readable without a new edge. No send blocks: queues are unbounded on the controller's side (what it
queues is bounded by what workers asked for) and a full queue of a worker is an error with a name.
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.backend import Socket as BareSocket
from zmq.backend import zmq_poll

from flowrt.errors import ConfigError, FlowError, RemoteProtocolError
from flowrt.wire.codec import MAX_MESSAGE_BYTES, decode, encode
from flowrt.wire.messages import Message

_DRAIN_AT_MOST = 256
_LINGER_MS = 500
_BACKLOG = 4096  # connections that may wait to be accepted: a whole cluster connects at once
_ALIVE_EVERY_MS = 1000
_ALIVE_WITHIN_MS = 5000
_ADDRESS = re.compile(r"tcp://[^/\s]+:(\d{1,5})")
_LARGEST_PORT = 65535

# As plain numbers: operations on pyzmq's enumerations cost more than the calls that they are passed to.
_NOBLOCK, _SNDMORE, _POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)


class _Socket:
    """What both ends share: a socket that calls back for every multipart message."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self._descriptor = int(self.socket.getsockopt(zmq.FD))
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        # The calls below pyzmq's Python layer, which checks and converts on every call what is fixed here.
        self._send_frame = partial(BareSocket.send, self.socket)
        self._receive_frame = partial(BareSocket.recv, self.socket, _NOBLOCK)
        # A frame that is not copied yet knows whether more follows; pyzmq's types do not know the frame.
        whole: Callable[[], Any] = partial(BareSocket.recv, self.socket, _NOBLOCK, copy=False)
        self._receive_whole: Callable[[], zmq.Frame] = whole
        self._look = partial(zmq_poll, [(self.socket, _POLLIN)], 0)
        self._names_sender = kind == zmq.ROUTER
        self._loop = asyncio.get_running_loop()
        self._receive: Callable[[list[bytes]], None] | None = None
        self._draining = False
        self._closed = False

    def start(self, receive: Callable[[list[bytes]], None]) -> None:
        self._receive = receive
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, frames: list[bytes]) -> None:
        for frame in frames[:-1]:
            self._send_frame(frame, _SNDMORE | _NOBLOCK)
        self._send_frame(frames[-1], _NOBLOCK)
        # A look costs a system call; a drain that is under way will look anyway.
        if not self._draining and self._look():
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._receive is None or self._closed:
            return
        self._draining = True
        emptied = False
        try:
            emptied = self._receive_waiting(self._receive)
        finally:
            self._draining = False
            if not emptied and not self._closed:
                # More is waiting, but others on this loop want a turn too.
                self._loop.call_soon(self._drain)

    def _receive_waiting(self, receive: Callable[[list[bytes]], None]) -> bool:
        """Take what is waiting, up to a limit; returns whether that was all."""
        receive_frame, receive_whole, names_sender = self._receive_frame, self._receive_whole, self._names_sender
        for taken in range(_DRAIN_AT_MOST):
            # Most often one message is all there is, and to look costs less than an exception; in a crowd, more.
            if taken == 1 and not self._look():
                return True
            try:
                frames = [receive_frame()] if names_sender else []
                frame = receive_whole()
            except zmq.Again:
                return True
            frames.append(frame.bytes)
            while frame.more:
                frame = receive_whole()
                frames.append(frame.bytes)
            receive(frames)
            if self._closed:
                return True
        return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self.socket.close()
        self._context.term()


class _Disconnections:
    """Calls back when a connection of a socket has closed; ZeroMQ does not say whose."""

    def __init__(self, socket: zmq.Socket[bytes], closed: Callable[[], None]) -> None:
        self._watched = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._descriptor = int(self._events.getsockopt(zmq.FD))
        self._report = closed
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        seen = False
        while not self._events.closed and int(self._events.getsockopt(zmq.EVENTS)) & _POLLIN:
            self._events.recv_multipart(zmq.NOBLOCK)
            seen = True
        if seen:
            self._report()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._watched.disable_monitor()
        self._events.close(linger=0)


def check_free(address: str) -> None:
    """Bind and let go. Raises ConfigError when the address is malformed or taken."""
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as socket:
            _bind(socket, address)
    finally:
        context.term()


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[1]) > _LARGEST_PORT:
        # ZeroMQ takes 70000 for 4464.
        raise ConfigError(
            f"controller address {address!r} is malformed; write tcp://HOST:PORT, port 0 for any free one"
        )
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        reason = "is in use" if error.errno == zmq.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise ConfigError(f"controller address {address} {reason}; choose another port, or 0 for any") from error


class ServerLink:
    """The controller's end.

    ``receive(peer, message)`` is called for each message, ``garbled`` for bad bytes, and ``closed`` when the connection
    of some peer has closed: a `send` to it says whose it was.
    """

    def __init__(
        self,
        receive: Callable[[bytes, Message], None],
        garbled: Callable[[bytes, str], None],
        closed: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._garbled = garbled
        self._raw = _Socket(zmq.ROUTER)
        self._raw.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer whose machine is gone closes nothing: the I/O threads ask each other, however busy the processes are.
        self._raw.socket.setsockopt(zmq.HEARTBEAT_IVL, _ALIVE_EVERY_MS)
        self._raw.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ALIVE_WITHIN_MS)
        self._disconnections = _Disconnections(self._raw.socket, closed)

    def bind(self, address: str) -> str:
        """Listen on ``tcp://HOST:PORT`` (port 0: any free one); returns the address with its real port.

        Raises ConfigError when the address is malformed or taken.
        """
        _bind(self._raw.socket, address)
        self._raw.start(self._on_frames)
        return str(self._raw.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, peer: bytes, message: Message) -> bool:
        """Send; False when that peer's connection is gone."""
        try:
            self._raw.send([peer, encode(message)])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        self._disconnections.close()
        self._raw.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._garbled(frames[0], f"a message of {len(frames)} frames, expected 2")
            return
        try:
            message = decode(frames[1])
        except RemoteProtocolError as error:
            self._garbled(frames[0], str(error))
            return
        self._receive(frames[0], message)


class ClientLink:
    """A worker's end: one DEALER socket to the controller."""

    def __init__(self, receive: Callable[[Message], None], failed: Callable[[FlowError], None]) -> None:
        self._receive = receive
        self._failed = failed
        self._raw = _Socket(zmq.DEALER)

    def connect(self, address: str) -> None:
        """Begin connecting (ZeroMQ keeps trying). Raises ConfigError on a malformed address."""
        try:
            self._raw.socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"controller address {address!r} cannot be used ({error.strerror}); write tcp://HOST:PORT"
            ) from error
        self._raw.start(self._on_frames)

    def send(self, message: Message) -> None:
        self._raw.send([encode(message)])

    def close(self) -> None:
        self._raw.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"the controller sent {len(frames)} frames, expected 1")
            self._receive(decode(frames[0]))
        except FlowError as error:
            self._failed(error)
