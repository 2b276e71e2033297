"""The two ends of the network: messages in and out of sockets, invalid messages, closed connections."""

from collections.abc import Callable
from time import monotonic

from flowrt.errors import ConfigError, FlowError, RemoteProtocolError
from flowrt.net.connection_guard import ConnectionGuard
from flowrt.net.curve_keys import ADMITTED, KEYS_VARIABLE, PUBLIC, ControllerKeys, WorkerKeys
from flowrt.net.zmq_socket import HandshakeFailure, Monitor, client_socket, server_socket, spin_wait, zap_socket
from flowrt.protocol.codec import decode, encode
from flowrt.protocol.messages import Message
from flowrt.runtime.host import check_address

CLOSED_HANDSHAKES_S = 5.0
"""Handshakes that are closed for longer than this do not succeed any more."""


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
            on_closed: called when a connection has closed. `send` finds out whose; its last messages may be unread
                until `drain`.
            keys: CURVE keys of the controller and of admitted workers.
        """
        self._on_message = on_message
        self._on_invalid = on_invalid
        self._keyed = keys is not None
        self._on_unreachable: Callable[[bytes], None] | None = None
        self.latest = b""
        """The latest message as it was received."""
        self._socket = server_socket(keys)
        self.drain = self._socket.drain
        self.flush = self._socket.flush
        self.source = self._socket.source
        self.guard = ConnectionGuard(None if keys is None else keys.admitted, on_closed)
        self._zap_socket = zap_socket(self._socket)
        self._zap_socket.start(self._authenticate)
        self._monitor = Monitor(
            self._socket,
            on_closed=self.guard.on_closed,
            on_handshake_failed=self.guard.on_handshake_failed,
            on_accepted=self.guard.on_accepted,
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
        """Send; False when that peer's connection is gone."""
        return self._socket.try_send([peer, encode(message)])

    def post(self, peer: bytes, message: Message) -> None:
        """Send in a batch: when the messages that wait have been received, or at `flush`."""
        self._socket.post([peer, encode(message)])

    def post_encoded(self, peer: bytes, message: bytes) -> None:
        """As `post`, a message that is encoded already."""
        self._socket.post([peer, message])

    def close(self) -> None:
        self._monitor.close()
        self.guard.close()
        self._zap_socket.close()
        self._socket.close()

    def disconnect(self, peer: bytes) -> None:
        """Close the connection of the peer that sent the latest message."""
        self.guard.disconnect(peer, self.source())

    def _authenticate(self, request: list[bytes]) -> None:
        self._zap_socket.send(self.guard.authenticate(request))

    def _on_peer_unreachable(self, peer: bytes) -> None:
        if self._on_unreachable is not None:
            self._on_unreachable(peer)

    def _on_frames(self, frames: list[bytes]) -> None:
        peer = frames[0]
        if not self.guard.accepts(peer, len(frames[1]), self.source):
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
        self._socket.send([encode(message)])

    def spin_wait(self, for_s: float) -> bool:
        """Poll for messages without sleeping, for at most ``for_s`` seconds; returns whether some have come."""
        return spin_wait(self._socket.is_readable, self._socket.drain, for_s)

    def close(self, linger_ms: int | None = None) -> None:
        """Close the link; unsent messages have ``linger_ms`` to leave (None: the socket's default)."""
        self._monitor.close()
        self._socket.close(linger_ms)

    def _on_disconnected(self, _: int) -> None:
        self._socket.drain()  # messages that arrived before
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
    """A worker's failed handshakes. ZeroMQ repeats them; an error that repetition does not mend is reported."""

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
            # A controller that cannot read our keys closes the connection without an error, but so does one that is
            # just ending. One that requires keys may do so too, before we have read that it does.
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
