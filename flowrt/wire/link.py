"""The two ends of the wire: whole messages in and out, what is wrong with one, and who has gone."""

from collections.abc import Callable
from functools import partial

from flowrt.errors import FlowError, RemoteProtocolError
from flowrt.wire.addresses import check_address
from flowrt.wire.awake import watch
from flowrt.wire.codec import decode, encode
from flowrt.wire.gate import Doorstep, Gate
from flowrt.wire.keys import ControllerKeys, WorkerKeys
from flowrt.wire.messages import Message
from flowrt.wire.sockets import Monitor, asking_socket, client_socket, server_socket


class ServerLink:
    """The controller's end: ``receive(peer, message)`` for each message, ``garbled(peer, why)`` for bad bytes.

    ``closed`` is called when a connection has closed: a `send` says whose. What it has said before is read by `drain`.
    ``unsent``, which may be set, is called with each peer to whom something was posted and who is gone.
    """

    def __init__(
        self,
        receive: Callable[[bytes, Message], None],
        garbled: Callable[[bytes, str], None],
        closed: Callable[[], None],
        keys: ControllerKeys | None = None,
    ) -> None:
        self._receive, self._garbled, self._keyed = receive, garbled, keys is not None
        self.unsent: Callable[[bytes], None] = lambda peer: None  # noqa: ARG005
        self._raw = server_socket(keys)
        self.drain, self.flush = self._raw.drain, self._raw.flush
        self.gate = Gate({} if keys is None else keys.admitted, closed)
        self._asked = None if keys is None else asking_socket(self._raw)
        if (asked := self._asked) is not None:
            asked.start(lambda frames: asked.send(self.gate.answer(frames)))
        self.source = self._raw.source
        self._monitor = Monitor(self._raw, self.gate.left, self.gate.failed, self.gate.knocked)

    def bind(self, address: str) -> str:
        """Listen on ``tcp://HOST:PORT`` (port 0: any free one); returns the address with its real port.

        Raises ConfigError when the address is malformed, taken, or not loopback without keys.
        """
        check_address(address, self._keyed)
        bound = self._raw.bind(address)
        self._raw.start(self._on_frames, lambda peer: self.unsent(peer))
        return bound

    def send(self, peer: bytes, message: Message) -> bool:
        """Send; False when that peer's connection is gone."""
        return self._raw.try_send([peer, encode(message)])

    def post(self, peer: bytes, message: Message) -> None:
        """Send, together with what else is posted before the messages that wait are received, or before a `flush`."""
        self._raw.post([peer, encode(message)])

    def close(self) -> None:
        self._monitor.close()
        for one in filter(None, (self._asked, self._raw)):
            one.close()

    def hang_up(self, peer: bytes) -> None:
        """End the connection of the peer that sent the latest message."""
        self.gate.shun(peer, self.source())

    def _on_frames(self, frames: list[bytes]) -> None:
        if not self.gate.lets_in(peer := frames[0], len(frames[1]), self.source):
            return
        if len(frames) != 2:
            self._garbled(peer, f"a message of {len(frames)} frames or more, expected 2")
            return
        try:
            message = decode(frames[1])
        except RemoteProtocolError as error:
            self._garbled(peer, str(error))
            return
        self._receive(peer, message)


class ClientLink:
    """A worker's end: one DEALER socket. ``receive`` is called for each message; it may be changed."""

    def __init__(
        self, receive: Callable[[Message], None], failed: Callable[[FlowError], None], keys: WorkerKeys | None = None
    ) -> None:
        self.receive, self._failed, self._raw = receive, failed, client_socket(keys)
        self.watch = partial(watch, self._raw.look, self._raw.drain)
        self._doorstep = Doorstep(keys, failed)
        self._monitor = Monitor(self._raw, self._closed, self._doorstep.failed)

    def connect(self, address: str, cut: Callable[[], None] = lambda: None) -> None:
        """Connect, again and again; ``cut`` hears of each that closes. Raises ConfigError on a malformed address."""
        self._cut = cut
        self._doorstep.address = address
        self._raw.connect(address)
        self._raw.start(self._on_frames)

    def send(self, message: Message) -> None:
        self._raw.send([encode(message)])

    def close(self, linger_ms: int | None = None) -> None:
        self._monitor.close()
        self._raw.close(linger_ms)

    def _closed(self, _: int) -> None:
        self._raw.drain()  # its last words come first
        self._cut()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"the controller sent {len(frames)} frames, expected 1")
            self.receive(decode(frames[0]))
        except FlowError as error:
            self._failed(error)
