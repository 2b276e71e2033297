"""Admission and limits of connections to the controller.

- Only peers with a known key are admitted (ZeroMQ Authentication Protocol); a connection must send its hello in time.
- The memory that peers can occupy is bounded. ZeroMQ limits the size of each frame and the number of unread messages,
  but not the frames of one message, which it keeps until the last one has arrived. The kernel counts the bytes received
  over a connection (`tcp_info` in Linux's include/uapi/linux/tcp.h), and the filter counts the bytes of its delivered
  messages; if the difference exceeds a limit, the filter closes the connection.
- Connections of stopped processes are closed (`liveness`).

A connection is identified by its descriptor, and, since descriptors are reused, by its address too. Before a descriptor
is taken from a message, `ServerLink` has the filter handle all events of connections that preceded the message.
"""

import asyncio
import ctypes
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from time import monotonic

from flowrt.net.liveness import BATCH, LIBC, RECHECK_MS, TCP_INFO, LivenessMonitor, tcp_info
from flowrt.runtime.addresses import Endpoint, unmapped
from flowrt.runtime.clock import OwnAbsence
from flowrt.runtime.resource_limits import trim_heap

log = logging.getLogger(__name__)
MAX_UNDELIVERED_BYTES = 128 << 20
"""Limit of undelivered bytes of one connection: twice the largest message."""
MESSAGE_OVERHEAD_BYTES = 64
"""Upper bound on what headers and encryption add to a message."""
LARGE_MESSAGE_BYTES = 1 << 20
HELLO_TIMEOUT_S = 15.0
"""A connection without a hello is closed this long after it was accepted."""
MAX_UNJOINED_BYTES = 1 << 20
"""Limit of undelivered bytes of a connection without an accepted hello, and of the size of its messages."""
MAX_ALL_UNJOINED_BYTES = 64 << 20
"""Limit of undelivered bytes of all connections without an accepted hello together."""
UNJOINED_CHECK_S = 0.02
MAX_REPLIES_UNJOINED = 16
"""Most messages of a peer that are answered before it has joined; then its connection is closed."""
MAX_REMEMBERED_PEERS = 4096
BATCH_PAUSE_S = 0.02
LOG_INTERVAL_S = 1.0
MAX_LOG_CHARS = 2000
"""Limit of one log line, parts of which a peer may have chosen."""
_ZAP_VERSION = b"1.0"
_ZAP_ACCEPTED = b"200"
_ZAP_REFUSED = b"400"
_ZAP_REQUEST_FRAMES = 9  # peer, delimiter, version, request id, domain, address, routing id, mechanism, key
_NO_LINGER = struct.pack("ii", 1, 0)
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received, Linux 4.1 and later


class HandshakeFailure(Enum):
    """Why a handshake failed, as text for the controller's log."""

    UNKNOWN_KEY = "its key is not admitted"
    PROTOCOL = "it has no key, or another controller's, or does not speak ZeroMQ"
    CLOSED = "it left during the handshake, or took too long over it"


class RateLimitedLog:
    """Counts warnings and logs at most one per second, so that a faulty peer cannot fill the disk."""

    def __init__(self) -> None:
        self.count = 0
        self._suppressed = 0
        self._next_s = 0.0

    def warn(self, text: str, *values: object) -> None:
        """Count a warning, and log it unless one was logged within the last second."""
        self.count += 1
        now = monotonic()
        if now < self._next_s:
            self._suppressed += 1
            return
        self._next_s = now + LOG_INTERVAL_S
        line = (text % values if values else text)[:MAX_LOG_CHARS]
        log.warning("%s%s", line, f" (and {self._suppressed} more before)" if self._suppressed else "")
        self._suppressed = 0


class ReceiveBacklog:
    """Bytes received over each connection that were not delivered as messages yet."""

    def __init__(self, on_first_message: Callable[[int], None]) -> None:
        """``on_first_message`` is called with the descriptor of a connection at its first message."""
        self._on_first_message = on_first_message
        self._delivered: dict[bytes, int] = {}
        self._peers: dict[int, bytes] = {}
        self._departed: dict[bytes, None] = {}  # peers whose connections have closed; messages may still be unread
        self._descriptors: dict[int, None] = {}
        self._unchecked: Iterator[int] = iter(())

    def add(self, descriptor: int) -> None:
        """Add an accepted connection."""
        self._descriptors[descriptor] = None

    def remove(self, descriptor: int) -> bytes:
        """Remove a closed connection. Returns its peer; empty if it never sent a message."""
        self._descriptors.pop(descriptor, None)
        peer = self._peers.pop(descriptor, b"")
        self._depart(peer)
        return peer

    def peer(self, descriptor: int) -> bytes:
        """The peer of an open connection; empty before its first message."""
        return self._peers.get(descriptor, b"")

    def _depart(self, peer: bytes) -> None:
        """Forget the messages of a peer, whose later ones count for no connection: its descriptor may be reused."""
        self._delivered.pop(peer, None)
        if peer:
            if len(self._departed) >= MAX_REMEMBERED_PEERS:
                del self._departed[next(iter(self._departed))]
            self._departed[peer] = None

    def undelivered(self, descriptor: int) -> int:
        """Number of bytes received over a connection and not delivered."""
        return received_bytes(descriptor) - self._delivered.get(self._peers.get(descriptor, b""), 0)

    def deliver(self, peer: bytes, size: int, descriptor: Callable[[], int]) -> int:
        """Count a message of ``size`` bytes; ``descriptor`` is called at the first message and at large ones.

        Returns the connection's descriptor if a message of more than LARGE_MESSAGE_BYTES leaves more than
        MAX_UNDELIVERED_BYTES undelivered, else -1. Large messages may fill memory before the next `find_excessive`.
        """
        before = self._delivered.get(peer)
        if before is None:
            if peer in self._departed or (first := descriptor()) not in self._descriptors:
                return -1
            if (earlier := self.peer(first)) != peer:
                self._depart(earlier)  # it left before its first message was handled, and the descriptor was reused
            before = 0
            self._peers[first] = peer
            self._on_first_message(first)
        self._delivered[peer] = delivered = before + size + MESSAGE_OVERHEAD_BYTES
        if size > LARGE_MESSAGE_BYTES and received_bytes(at := descriptor()) - delivered > MAX_UNDELIVERED_BYTES:
            return at
        return -1

    def find_excessive(self) -> list[int]:
        """Descriptors with more than MAX_UNDELIVERED_BYTES undelivered; each call checks the next BATCH connections."""
        excessive = []
        for _ in range(BATCH):
            descriptor = next(self._unchecked, None)
            if descriptor is None:
                self._unchecked = iter(list(self._descriptors))
                break
            if descriptor in self._descriptors and self.undelivered(descriptor) > MAX_UNDELIVERED_BYTES:
                excessive.append(descriptor)
        return excessive


class ConnectionFilter:
    """The connections of the controller's socket: who may connect, and which have to be closed."""

    def __init__(self, admitted: Mapping[bytes, str] | None, on_closed: Callable[[], None]) -> None:
        """Make a filter without connections.

        Args:
            admitted: names of admitted workers by their public keys; None: peers without keys are admitted.
            on_closed: called when a connection has closed that had completed its handshake.
        """
        self._admitted = admitted
        self._on_closed = on_closed
        self.refused = RateLimitedLog()
        """Counts connections that were refused or closed by the filter, or closed before their hello."""
        self._addresses: dict[int, str] = {}
        self._unjoined: dict[int, float] = {}  # when each connection without an accepted hello was accepted
        self._joined: dict[bytes, int] = {}  # connection of each peer whose hello was accepted
        self._closing: set[int] = set()  # connections that were shut down here and have not closed yet
        self._disconnected: dict[bytes, None] = {}  # peers whose further messages are ignored
        self._replies: dict[bytes, int] = {}  # number of replies to each peer that has not joined
        self._handshake_failure: HandshakeFailure | None = None
        self._unjoined_timer: asyncio.TimerHandle | None = None
        self._trim_memory = False
        self._absence = OwnAbsence(UNJOINED_CHECK_S)
        self._liveness = LivenessMonitor()
        self.backlog = ReceiveBacklog(self._liveness.add)
        self._liveness_round: Iterator[list[int]] | None = None

    def close(self) -> None:
        """Stop all checks."""
        if self._unjoined_timer is not None:
            self._unjoined_timer.cancel()

    # ---- events of connections

    def authenticate(self, request: list[bytes]) -> list[bytes]:
        """The reply to a request of the ZeroMQ Authentication Protocol (RFC 27): 200 for an admitted key."""
        version, request_id, mechanism, keys = request[2], request[3], request[7], request[8:]
        if self._admitted is None:
            name = ""
            is_admitted = mechanism == b"NULL"
        else:
            has_key = len(request) == _ZAP_REQUEST_FRAMES and mechanism == b"CURVE"
            name = self._admitted.get(keys[0], "") if has_key else ""
            is_admitted = bool(name)
        status = [_ZAP_ACCEPTED, b""] if is_admitted and version == _ZAP_VERSION else [_ZAP_REFUSED, b"unknown key"]
        return [request[0], b"", version, request_id, *status, name.encode(), b""]

    def on_accepted(self, descriptor: int) -> None:
        """A TCP connection was accepted; its handshake follows."""
        self._addresses[descriptor] = _peer_address(descriptor)
        self.backlog.add(descriptor)
        self._unjoined[descriptor] = monotonic()
        if self._unjoined_timer is None:
            self._absence = OwnAbsence(UNJOINED_CHECK_S)
            self._check_unjoined()

    def on_handshake_failed(self, failure: HandshakeFailure) -> None:
        """A handshake has failed; `on_closed` is called next for its connection."""
        self._handshake_failure = failure

    def carries(self, descriptor: int, peer: bytes) -> bool:
        """Whether this connection is open and belongs to this peer."""
        return self.backlog.peer(descriptor) == peer

    def on_joined(self, peer: bytes, descriptor: int) -> None:
        """The hello of this peer, whose connection this is, was accepted."""
        self._unjoined.pop(descriptor, None)
        self._joined[peer] = descriptor

    def on_closed(self, descriptor: int) -> None:
        """A connection has closed."""
        address = self._addresses.pop(descriptor, "an unknown address")
        was_unjoined = self._unjoined.pop(descriptor, None) is not None
        self._closing.discard(descriptor)
        self._liveness.remove(descriptor)
        peer = self.backlog.remove(descriptor)
        if self._joined.get(peer) == descriptor:
            del self._joined[peer]
        if self._trim_memory:
            self._trim_memory = False
            trim_heap()
        if self._handshake_failure is not None:
            self.refused.warn("refused a connection from %s: %s", address, self._handshake_failure.value)
            self._handshake_failure = None
            return
        if was_unjoined:
            self.refused.warn("the connection from %s closed before it sent a hello", address)
        self._on_closed()

    # ---- messages

    def accepts(self, peer: bytes, size: int, descriptor: Callable[[], int]) -> bool:
        """Count a message of a peer, which arrived over the connection that ``descriptor`` returns.

        Returns False if the message has to be ignored: it is too large for a peer without an accepted hello, or
        `disconnect` was called for the peer.
        """
        if (excessive := self.backlog.deliver(peer, size, descriptor)) >= 0:
            self._close_excessive(excessive)
        if size > MAX_UNJOINED_BYTES and peer not in self._joined:
            if self.carries(at := descriptor(), peer):
                self._close(at, f"its first message has {size} bytes, too many for a hello")
            return False
        return peer not in self._disconnected

    def may_reply(self, peer: bytes) -> bool:
        """Count a reply to a peer that has not joined. Returns False from reply MAX_REPLIES_UNJOINED + 1 on.

        Replies that the peer does not read occupy memory of this process.
        """
        if len(self._replies) >= MAX_REMEMBERED_PEERS:
            self._replies.clear()
        self._replies[peer] = count = self._replies.get(peer, 0) + 1
        return count <= MAX_REPLIES_UNJOINED

    def disconnect(self, peer: bytes, descriptor: int) -> None:
        """Close the connection of a peer, and ignore its further messages.

        ZeroMQ has no call for that, so the TCP connection is shut down.
        """
        self._replies.pop(peer, None)
        if len(self._disconnected) >= MAX_REMEMBERED_PEERS:
            del self._disconnected[next(iter(self._disconnected))]
        self._disconnected[peer] = None
        if not self.carries(descriptor, peer) or _peer_address(descriptor) != self.address(descriptor):
            return  # the connection has closed already, and the descriptor may have been reused
        _shut_down(descriptor)

    # ---- state of a connection

    def address(self, descriptor: int) -> str:
        """The address HOST:PORT of a connection's peer; empty if the connection has closed."""
        return self._addresses.get(descriptor, "")

    def is_open(self, descriptor: int, address: str) -> bool:
        """Whether the connection with this descriptor and address is still open."""
        return bool(address) and self.address(descriptor) == address

    def idle_s(self, descriptor: int, address: str) -> float:
        """Seconds since data was received over a connection, including heartbeats of ZeroMQ's I/O threads.

        Infinite if the connection has closed or the kernel does not tell.
        """
        info = tcp_info(descriptor) if self.is_open(descriptor, address) else None
        return float("inf") if info is None else info.received_ms / 1000

    @property
    def has_cut_links(self) -> bool:
        """Whether the link of any connection seems to be cut."""
        return bool(self._liveness.cut)

    def cut_since_s(self, descriptor: int, address: str) -> float | None:
        """Time (`monotonic`) since which the link of a connection seems to be cut; None if it seems intact."""
        return self._liveness.cut.get(descriptor) if self.is_open(descriptor, address) else None

    # ---- periodic checks

    def check(self) -> None:
        """Close connections with too many undelivered bytes, and warn when no further connection could be accepted.

        ZeroMQ has an event for the latter too, but repeats it without limit.
        """
        for descriptor in self.backlog.find_excessive():
            self._close_excessive(descriptor)
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.refused.warn("cannot accept more connections: %s; raise the limit (ulimit -n)", error.strerror)

    def close_stopped(self) -> None:
        """Start to close the connections of stopped processes, in batches, unless such a check is in progress."""
        if self._liveness_round is None:
            self._liveness_round = self._liveness.find_stopped()
            self._check_next_batch()

    def _check_next_batch(self) -> None:
        assert self._liveness_round is not None
        descriptors = next(self._liveness_round, None)
        if descriptors is None:
            self._liveness_round = None
            return
        loop = asyncio.get_running_loop()
        for descriptor in descriptors:
            loop.call_later(RECHECK_MS / 1000, self._close_if_stopped, descriptor)
        loop.call_later(BATCH_PAUSE_S, self._check_next_batch)

    def _close_if_stopped(self, descriptor: int) -> None:
        if self._liveness.is_stopped(descriptor):
            log.warning("the process at %s does not answer although its host does", self._addresses[descriptor])
            _shut_down(descriptor)

    def _check_unjoined(self) -> None:
        """Close connections without a hello: those past the timeout, and the largest if they hold too much together.

        Repeated every UNJOINED_CHECK_S while there are any, since peers may send a gigabyte per second.
        """
        self._unjoined_timer = None
        if not self._unjoined:
            return
        now = monotonic()
        if (absent_s := self._absence.take(now)) > 0.0:  # their hellos may be unread
            self._unjoined = {descriptor: since_s + absent_s for descriptor, since_s in self._unjoined.items()}
        held = {descriptor: self.backlog.undelivered(descriptor) for descriptor in self._unjoined}
        total = sum(held.values())
        for descriptor in sorted(held, key=held.__getitem__, reverse=True):
            if total > MAX_ALL_UNJOINED_BYTES or held[descriptor] > MAX_UNJOINED_BYTES:
                total -= held[descriptor]
                self._close_excessive(descriptor)
            elif now - self._unjoined[descriptor] > HELLO_TIMEOUT_S:
                self._close(descriptor, f"it has not sent a hello within {HELLO_TIMEOUT_S:.0f} s")
        self._unjoined_timer = asyncio.get_running_loop().call_later(UNJOINED_CHECK_S, self._check_unjoined)

    def _close_excessive(self, descriptor: int) -> None:
        # With a reset: a peer whose data was not read would otherwise probe the closed connection for minutes.
        self._close(descriptor, "it sends more than can be read", reset=True)
        self._trim_memory = True

    def _close(self, descriptor: int, reason: str, *, reset: bool = False) -> None:
        if descriptor in self._closing:
            return
        self._closing.add(descriptor)
        self._unjoined.pop(descriptor, None)
        self.refused.warn("closed the connection from %s: %s", self.address(descriptor) or "an unknown address", reason)
        _shut_down(descriptor, reset=reset)


def received_bytes(descriptor: int) -> int:
    """All bytes ever received over a connection; 0 where the kernel does not count them."""
    if LIBC is None:
        return 0
    buffer = ctypes.create_string_buffer(_BYTES_RECEIVED.size)
    size = ctypes.c_uint32(_BYTES_RECEIVED.size)
    failed = LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, TCP_INFO, buffer, ctypes.byref(size))
    return 0 if failed or size.value < _BYTES_RECEIVED.size else int(_BYTES_RECEIVED.unpack_from(buffer)[0])


def _shut_down(descriptor: int, *, reset: bool = False) -> None:
    """Shut a connection down; ZeroMQ then closes it. With ``reset``, data on its way is lost, in both directions."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _peer_address(descriptor: int) -> str:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            host, port = connection.getpeername()[:2]
    except (OSError, ValueError):
        return "an address that has closed already"
    return str(Endpoint(unmapped(host), port))
