"""The two ends of the network: messages in and out of ZeroMQ sockets, invalid messages, closed connections.

- Plain ROUTER and DEALER sockets with ``loop.add_reader`` take about half the time of zmq.asyncio.
- The descriptor of a ZeroMQ socket is edge-triggered: a wake-up must read until the socket would block, and after a
  send it must be checked, because the send may have made it readable without a new edge.
- No send blocks: a full queue raises.
"""

import asyncio
import errno
import struct
from collections.abc import Callable
from functools import partial
from os import sched_yield
from random import randint
from time import monotonic
from typing import Any

import zmq
from zmq.backend import Socket as BareSocket
from zmq.backend import zmq_poll

from flowrt.errors import ConfigError, FlowError, RemoteProtocolError
from flowrt.net.connection_filter import ConnectionFilter, HandshakeFailure
from flowrt.net.curve_keys import ADMITTED, KEYS_VARIABLE, PUBLIC, ControllerKeys, WorkerKeys
from flowrt.net.liveness import HEARTBEAT_MS
from flowrt.protocol.codec import MAX_MESSAGE_BYTES, decode, encode, encode_checked
from flowrt.protocol.messages import Message
from flowrt.runtime.addresses import needs_ipv6, parse_address
from flowrt.runtime.host import check_address

# ---- sockets


def spin_wait(is_readable: Callable[[], object], receive: Callable[[], object], for_s: float) -> bool:
    """Poll for at most ``for_s`` seconds, yielding the processor between polls; True if something was received.

    A request and its answer wake six threads in sequence, and waking a thread on a sleeping core may take longer than
    the thread's work: polling keeps the core awake and halves the round-trip time.
    """
    until_s = monotonic() + for_s
    while not is_readable():
        if monotonic() >= until_s:
            return False
        sched_yield()
    receive()
    return True


_MAX_DRAINED = 256
"""Messages read in one callback; then other callbacks of the loop run."""
# Waking ZeroMQ's I/O thread takes as long as making an answer, so answers are sent in batches.
_BATCH = 16
_BATCH_S = 0.0003
_BACKLOG = 4096  # connections that may wait to be accepted: a whole cluster connects at once
_OPTIONS = {zmq.LINGER: 500, zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.BACKLOG: _BACKLOG}
# Limits per peer: unread messages from it (beyond, it cannot send more), and messages to it that it has not read
# (beyond, it counts as gone).
_QUEUES = {zmq.RCVHWM: 1000, zmq.SNDHWM: 100_000}
# A machine that has failed does not close its connections: our kernel probes silent connections and closes them after
# 16 s. A link that was cut for 5 s may stay silent for up to 7 s. `liveness` detects stopped processes and cut links
# within 5 s.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 1, zmq.TCP_KEEPALIVE_INTVL: 1, zmq.TCP_KEEPALIVE_CNT: 15}
_SERVER_OPTIONS = {zmq.ROUTER_MANDATORY: 1, zmq.HANDSHAKE_IVL: 5000, zmq.TCP_MAXRT: 15000, **_QUEUES, **_KEEPALIVE}
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: HandshakeFailure.UNKNOWN_KEY,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HandshakeFailure.PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HandshakeFailure.CLOSED,
}
_EVENT = struct.Struct("=HI")

# Plain integers: operations on pyzmq's enumerations cost more than the calls that they are passed to.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)


class Socket:
    """A ZeroMQ socket with a callback for each multipart message."""

    def __init__(
        self, kind: int, share_context: "Socket | None" = None, options: dict[zmq.SocketOption, int] | None = None
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context() if share_context is None else share_context._context
        self._owns_context = share_context is None
        self.socket = self._context.socket(kind)
        self._descriptor = int(self.socket.getsockopt(zmq.FD))
        for option, value in (_OPTIONS | (options or {})).items():
            self.socket.setsockopt(option, value)
        # The methods of pyzmq's backend: its Python layer checks and converts arguments at every call.
        self._send_frame = partial(BareSocket.send, self.socket)
        self._receive_frame = partial(BareSocket.recv, self.socket, _NOBLOCK)
        # Returns a Frame without a copy. pyzmq's type annotations lack its attribute ``more``.
        self._receive_uncopied: Callable[[], Any] = partial(BareSocket.recv, self.socket, _NOBLOCK, copy=False)
        self.is_readable = partial(zmq_poll, [(self.socket, _POLLIN)], 0)
        self.latest: zmq.Frame | None = None
        self._is_router = kind == zmq.ROUTER
        self._loop = asyncio.get_running_loop()
        self._on_frames: Callable[[list[bytes]], None] | None = None
        self._on_unreachable: Callable[[bytes], None] | None = None
        self._posted: list[list[bytes]] = []
        self._posted_until_s = 0.0
        self._draining = False
        self._closed = False

    def start(
        self,
        on_frames: Callable[[list[bytes]], None],
        on_unreachable: Callable[[bytes], None] | None = None,
    ) -> None:
        """Receive from now on; ``on_unreachable`` is called with each peer that a posted message did not reach."""
        self._on_frames = on_frames
        self._on_unreachable = on_unreachable
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)

    def post(self, frames: list[bytes]) -> None:
        """Queue the two frames (peer, message) for the next batch.

        A batch is sent when the waiting messages have been received, at `flush` or `send`, or when it is full or old.
        """
        if not self._posted:
            self._posted_until_s = monotonic() + _BATCH_S
        self._posted.append(frames)
        if len(self._posted) >= _BATCH or monotonic() > self._posted_until_s:
            self._send_posted()

    def flush(self) -> None:
        """Send the posted messages. While messages are being received, `drain` sends them instead."""
        if not self._draining:
            self._send_posted()
            if self.is_readable():
                self._loop.call_soon(self.drain)

    def _send_posted(self) -> None:
        posted = self._posted
        self._posted = []
        for frames in posted:
            try:
                self._send_frame(frames[0], _MORE)
                self._send_frame(frames[1], _NOBLOCK)
            except zmq.ZMQError as error:
                if not _is_gone(error):
                    raise
                if self._on_unreachable is not None:
                    self._on_unreachable(frames[0])

    def send(self, frames: list[bytes]) -> None:
        """Send a multipart message at once. Raises ZMQError when it cannot be queued."""
        if self._posted:
            self._send_posted()
        for frame in frames[:-1]:
            self._send_frame(frame, _MORE)
        self._send_frame(frames[-1], _NOBLOCK)
        # The check is a system call; a drain in progress makes it anyway.
        if not self._draining and self.is_readable():
            self._loop.call_soon(self.drain)

    def drain(self) -> bool:
        """Receive waiting messages, at most _MAX_DRAINED; returns whether no more are waiting."""
        if self._on_frames is None or self._closed or self._draining:
            return not self._draining
        self._draining = True
        emptied = False
        try:
            emptied = self._receive_waiting(self._on_frames)
        finally:
            self._send_posted()
            self._draining = False
            if not emptied and not self._closed:
                # More is waiting; other callbacks of the loop come first.
                self._loop.call_soon(self.drain)
        return emptied

    def _receive_waiting(self, on_frames: Callable[[list[bytes]], None]) -> bool:
        """As `drain`, with the callback ``on_frames``."""
        receive_frame = self._receive_frame
        receive_uncopied = self._receive_uncopied
        is_router = self._is_router
        for received in range(_MAX_DRAINED):
            # Usually one message waits, and a poll after it costs less than the exception of an empty socket. A poll
            # after each of many messages would cost more. Sending may make the socket readable, so the poll follows it.
            if received == 1:
                self._send_posted()
                if not self.is_readable():
                    return True
            try:
                frames = [receive_frame()] if is_router else []
                frame = receive_uncopied()
            except zmq.Again:
                if not self._posted:
                    return True
                self._send_posted()
                continue
            frames.append(frame.bytes)
            while frame.more:
                frame = receive_uncopied()
                # Only the last of further frames is kept: authentication has nine, messages have two.
                frames[9:] = [frame.bytes]
            self.latest = frame
            if self._posted and monotonic() > self._posted_until_s:
                self._send_posted()
            on_frames(frames)
            if self._closed:
                return True
        return False

    def try_send(self, frames: list[bytes]) -> bool:
        """Send as `send` does. Returns False if the peer that the first frame names is gone, or does not read."""
        try:
            self.send(frames)
        except zmq.ZMQError as error:
            if _is_gone(error):
                return False
            raise
        return True

    def source(self) -> int:
        """Descriptor of the connection over which the latest message was received; -1 before the first message."""
        return -1 if self.latest is None else int(self.latest.get(zmq.SRCFD))

    def bind(self, address: str) -> str:
        """Listen; returns the address with its real port. Raises ConfigError if the address cannot be bound."""
        _bind(self.socket, address)
        return str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, address: str) -> None:
        """Connect; ZeroMQ reconnects whenever the connection closes. Raises ConfigError on a malformed address."""
        try:
            self.socket.setsockopt(zmq.IPV6, needs_ipv6(parse_address(address).host))
            self.socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"controller address {address!r} cannot be used ({error.strerror}); write tcp://HOST:PORT"
            ) from error

    def close(self, linger_ms: int | None = None) -> None:
        """Close the socket; unsent messages are sent for up to ``linger_ms`` milliseconds (None: the default, 500)."""
        if not self._closed:
            self._send_posted()
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger_ms)
            if self._owns_context:
                self._context.term()


class Monitor:
    """Callbacks for events of a socket's connections. ZeroMQ reports their descriptors, but not their peers."""

    def __init__(
        self,
        watched: Socket,
        on_closed: Callable[[int], object],
        on_handshake_failed: Callable[[HandshakeFailure], None],
        on_accepted: Callable[[int], object] | None = None,
    ) -> None:
        """``on_closed`` and ``on_accepted`` are called with the descriptor of the connection."""
        self._watched = watched.socket
        self._on_event = {int(zmq.EVENT_DISCONNECTED): on_closed}
        if on_accepted is not None:
            self._on_event[int(zmq.EVENT_ACCEPTED)] = on_accepted
        self._on_handshake_failed = on_handshake_failed
        self._events = self._watched.get_monitor_socket(sum(self._on_event) + sum(_FAILURES))
        self._descriptor = int(self._events.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Make the calls for all events so far."""
        while not self._events.closed and int(self._events.getsockopt(zmq.EVENTS)) & _POLLIN:
            event, value = _EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])
            if event in _FAILURES:
                self._on_handshake_failed(_FAILURES[event])
            else:
                self._on_event[event](value)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._watched.disable_monitor()
        self._events.close(linger=0)


def _is_gone(error: zmq.ZMQError) -> bool:
    """Whether a message was not sent because its peer is gone, or does not read."""
    return error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN)


def check_free(address: str, keyed: bool) -> None:
    """Raises ConfigError if ``address`` is malformed, cannot be bound, or is not loopback and there are no keys."""
    check_address(address, keyed)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        _bind(socket, address)


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.IPV6, needs_ipv6(parse_address(address).host))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EADDRINUSE, errno.EACCES):
            reason = "is in use" if error.errno == zmq.EADDRINUSE else "needs more rights"
            raise ConfigError(f"controller address {address} {reason}; choose another port, or 0 for any") from error
        raise ConfigError(
            f"controller address {address} cannot be bound ({zmq.strerror(error.errno or 0)}): its host is no "
            "address of this host; name one, with the interface if it is valid on one link only ([fe80::1%eth0]), or *"
        ) from error


def server_socket(keys: ControllerKeys | None = None) -> Socket:
    """The controller's socket, not yet bound."""
    server = Socket(zmq.ROUTER, options=_SERVER_OPTIONS)
    # With a domain, ZeroMQ sends an authentication request for every connection, and refuses protocol versions without
    # authentication (ZMTP 1.0 and 2.0), for whose messages it does not report the connection.
    server.socket.setsockopt_string(zmq.ZAP_DOMAIN, "flowrt")
    if keys is not None:
        server.socket.setsockopt(zmq.CURVE_SERVER, 1)
        server.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
    return server


def zap_socket(server: Socket) -> Socket:
    """The socket of ZeroMQ's authentication requests; must exist before `bind`, else every key is admitted."""
    requests = Socket(zmq.ROUTER, share_context=server)
    requests.socket.bind(_ZAP_ADDRESS)
    return requests


def client_options() -> dict[zmq.SocketOption, int]:
    """Heartbeats of a worker's I/O thread, at a random interval: thousands of workers may join at the same moment.

    ZeroMQ's own timeout is an hour: `client.connection` decides when a silent controller counts as gone.
    """
    return {zmq.HEARTBEAT_IVL: randint(HEARTBEAT_MS * 2 // 3, HEARTBEAT_MS), zmq.HEARTBEAT_TIMEOUT: 3_600_000}


def client_socket(keys: WorkerKeys | None = None) -> Socket:
    """A worker's socket, not yet connected."""
    client = Socket(zmq.DEALER, options=client_options())
    if keys is not None:
        client.socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.controller)
        client.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.own.public)
        client.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
    return client


# ---- the two ends

CLOSED_HANDSHAKES_S = 5.0
"""After the controller has closed handshakes for this long, an error is reported."""


class ServerLink:
    """The controller's end: one ROUTER socket."""

    def __init__(
        self,
        on_message: Callable[[bytes, Message], None],
        on_invalid: Callable[[bytes, str], None],
        on_closed: Callable[[], None],
        keys: ControllerKeys | None = None,
    ) -> None:
        """Make a link that is not bound yet.

        Args:
            on_message: called with the peer and each message.
            on_invalid: called with the peer and the reason for each message that cannot be decoded.
            on_closed: called when a connection has closed. ZeroMQ does not tell whose; `send` returns False for that
                peer. The peer's last messages may be unread until `drain`.
            keys: CURVE keys of the controller and of admitted workers.
        """
        self._on_message = on_message
        self._on_invalid = on_invalid
        self._keyed = keys is not None
        self._on_unreachable: Callable[[bytes], None] | None = None
        self.latest = b""
        """The bytes of the latest message."""
        self._socket = server_socket(keys)
        self.drain = self._socket.drain
        self.flush = self._socket.flush
        self.source = self._socket.source
        self.filter = ConnectionFilter(None if keys is None else keys.admitted, on_closed)
        self._zap_socket = zap_socket(self._socket)
        self._zap_socket.start(self._authenticate)
        self._monitor = Monitor(
            self._socket,
            on_closed=self.filter.on_closed,
            on_handshake_failed=self.filter.on_handshake_failed,
            on_accepted=self.filter.on_accepted,
        )

    def bind(self, address: str) -> str:
        """Listen on ``tcp://HOST:PORT`` (port 0: any free one); returns the address with its real port.

        Raises ConfigError when the address is malformed, in use, or not loopback without keys.
        """
        check_address(address, self._keyed)
        bound = self._socket.bind(address)
        self._socket.start(self._on_frames, self._on_peer_unreachable)
        return bound

    def on_unreachable(self, callback: Callable[[bytes], None]) -> None:
        """Call ``callback`` with each peer that a posted message did not reach."""
        self._on_unreachable = callback

    def send(self, peer: bytes, message: Message) -> bool:
        """Send a message. Returns False if the connection of ``peer`` is gone, or ``peer`` does not read."""
        return self._socket.try_send([peer, encode(message)])

    def post(self, peer: bytes, message: Message) -> None:
        """Send a message in a batch, see `Socket.post`."""
        self._socket.post([peer, encode(message)])

    def post_encoded(self, peer: bytes, message: bytes) -> None:
        """As `post`, for a message that is encoded already."""
        self._socket.post([peer, message])

    def close(self) -> None:
        self._monitor.close()
        self.filter.close()
        self._zap_socket.close()
        self._socket.close()

    def disconnect(self, peer: bytes) -> None:
        """Close the connection of the peer that sent the latest message."""
        self.filter.disconnect(peer, self._known_source())

    def _authenticate(self, request: list[bytes]) -> None:
        self._zap_socket.send(self.filter.authenticate(request))

    def _known_source(self) -> int:
        """As `source`, once the filter knows of the connection.

        The events of connections and their messages come over two sockets, whose callbacks run in any order. ZeroMQ's
        I/O thread reports that a connection was accepted before it reads from it, and that it closed before the
        descriptor can be reused.
        """
        self._monitor.drain()
        return self.source()

    def _on_peer_unreachable(self, peer: bytes) -> None:
        if self._on_unreachable is not None:
            self._on_unreachable(peer)

    def _on_frames(self, frames: list[bytes]) -> None:
        peer = frames[0]
        if not self.filter.accepts(peer, len(frames[1]), self._known_source):
            return
        if len(frames) != 2:
            self._on_invalid(peer, f"a message of {len(frames)} frames or more, expected 2")
            return
        try:
            message = decode(frames[1])
        except RemoteProtocolError as error:
            self._on_invalid(peer, str(error))
            return
        self.latest = frames[1]
        self._on_message(peer, message)


class ClientLink:
    """A worker's end: one DEALER socket. ZeroMQ connects it again whenever its connection closes."""

    def __init__(
        self,
        on_message: Callable[[Message], None],
        on_error: Callable[[FlowError], None],
        keys: WorkerKeys | None = None,
    ) -> None:
        """Make a link that is not connected yet.

        Args:
            on_message: called with each message.
            on_error: called with the error of a message that cannot be decoded, and of a handshake that cannot succeed.
            keys: CURVE keys of the worker.
        """
        self._on_message = on_message
        self._on_error = on_error
        self._on_closed: Callable[[], None] | None = None
        self._socket = client_socket(keys)
        self._handshakes = HandshakeMonitor(keys, on_error)
        self._monitor = Monitor(
            self._socket, on_closed=self._on_disconnected, on_handshake_failed=self._handshakes.on_failure
        )

    def connect(self, address: str, on_closed: Callable[[], None] | None = None) -> None:
        """Connect; ``on_closed`` is called whenever the connection closes. Raises ConfigError for a bad address."""
        self._on_closed = on_closed
        self._handshakes.address = address
        self._socket.connect(address)
        self._socket.start(self._on_frames)

    def send(self, message: Message) -> None:
        """Send a message; dropped after a failed handshake, which ``on_error`` is told.

        Raises LocalProtocolError if it cannot be encoded.
        """
        self._socket.try_send([encode_checked(message)])

    def spin_wait(self, for_s: float) -> bool:
        """Poll for messages without sleeping, for at most ``for_s`` seconds; returns whether one was received."""
        return spin_wait(self._socket.is_readable, self._socket.drain, for_s)

    def close(self, linger_ms: int | None = None) -> None:
        """Close the link; unsent messages are sent for up to ``linger_ms`` milliseconds (None: the default, 500)."""
        self._monitor.close()
        self._socket.close(linger_ms)

    def _on_disconnected(self, _: int) -> None:
        self._socket.drain()  # first the messages that arrived before the connection closed
        if self._on_closed is not None:
            self._on_closed()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"the controller sent {len(frames)} frames, expected 1")
            self._on_message(decode(frames[0]))
        except FlowError as error:
            self._on_error(error)


class HandshakeMonitor:
    """Reports failed handshakes of a worker that will fail again: ZeroMQ repeats handshakes by itself."""

    def __init__(self, keys: WorkerKeys | None, on_error: Callable[[FlowError], None]) -> None:
        self.address = ""
        self._keys = keys
        self._on_error = on_error
        self._closed_since_s: float | None = None

    def on_failure(self, failure: HandshakeFailure) -> None:
        """A handshake has failed."""
        where = f"controller {self.address}"
        required = f"requires keys; give the worker its directory with --keys DIR or {KEYS_VARIABLE}"
        if failure is HandshakeFailure.CLOSED:
            # A controller that cannot read this worker's keys closes the connection without an error, and so does a
            # controller that is shutting down. A controller that requires keys may close it before this worker has
            # read the requirement.
            now = monotonic()
            self._closed_since_s = self._closed_since_s or now
            if now - self._closed_since_s <= CLOSED_HANDSHAKES_S:
                return
            if self._keys is None:
                reason = f"closes the connection during the handshake; perhaps it {required}"
            else:
                public = self._keys.path.with_name(PUBLIC)
                reason = f"closes the connection during the handshake: is {public} the key of this controller?"
        elif self._keys is None:
            reason = required
        elif failure is HandshakeFailure.UNKNOWN_KEY:
            reason = f"does not know the key {self._keys.path}; add its public key to {ADMITTED}"
        else:
            reason = "runs without keys, or is not a controller; start it with keys, or omit --keys"
        self._on_error(ConfigError(f"{where} {reason}"))
