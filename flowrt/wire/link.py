"""ZeroMQ under asyncio: the only file that imports zmq.

Raw ROUTER and DEALER sockets on ``loop.add_reader``: about half the cost of zmq.asyncio. The descriptor of a ZeroMQ
socket is edge-triggered, so a wake-up must drain it until it would block, and a send must look whether it made
the socket readable without a new edge. No send blocks: queues are unbounded on the controller's side (what it
queues is bounded by what workers asked for) and a full queue of a worker is an error with a name.
"""

import asyncio
import re
from collections.abc import Callable

import zmq

from flowrt.errors import ConfigError, FlowError, RemoteProtocolError
from flowrt.wire.codec import MAX_MESSAGE_BYTES, decode, encode
from flowrt.wire.messages import Message

_DRAIN_AT_MOST = 256
_LINGER_MS = 500
_ADDRESS = re.compile(r"tcp://[^/\s]+:(\d{1,5})")
_LARGEST_PORT = 65535


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
        self._loop = asyncio.get_running_loop()
        self._receive: Callable[[list[bytes]], None] | None = None
        self._closed = False

    def start(self, receive: Callable[[list[bytes]], None]) -> None:
        self._receive = receive
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames, zmq.NOBLOCK)
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._receive is None:
            return
        for _ in range(_DRAIN_AT_MOST):
            if self._closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)
        # More is waiting, but others on this loop want a turn too.
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self.socket.close()
        self._context.term()


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
    """The controller's end. ``receive(peer, message)`` is called for each message, ``garbled`` for bad bytes."""

    def __init__(self, receive: Callable[[bytes, Message], None], garbled: Callable[[bytes, str], None]) -> None:
        self._receive = receive
        self._garbled = garbled
        self._raw = _Socket(zmq.ROUTER)
        self._raw.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

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
