"""What has come over a connection and has not been delivered: the parts of a message without end, or what waits.

ZeroMQ limits the size of each frame and the number of messages that wait to be read, but not the frames of one message,
which it keeps until the last one is there. The kernel counts what has come over a connection (`tcp_info` in Linux's
include/uapi/linux/tcp.h), we count what was delivered; where the difference is too large, somebody fills our memory.
"""

import ctypes
import socket
import struct
from collections.abc import Callable, Iterator

from flowrt.wire.silence import LIBC, TCP_INFO

MOST_BYTES = 128 << 20
"""Twice the largest message there may be."""
OVERHEAD_BYTES = 64
"""Of a message on the wire at most: headers, and what encryption adds."""
LARGE_BYTES = 1 << 20
AT_ONCE = 256
"""Connections that are looked at in one go: a millisecond or two."""
_RECEIVED = struct.Struct("=128xQ")  # Linux 4.1 and later


class Arrears:
    """Counts by connection, known by its descriptor, and by the peer that speaks over it."""

    def __init__(self, spoke: Callable[[int], None]) -> None:
        """``spoke`` is told of a connection when its first message is here."""
        self._spoke = spoke
        self._delivered: dict[bytes, int] = {}
        self._peers: dict[int, bytes] = {}
        self._descriptors: dict[int, None] = {}
        self._round: Iterator[int] = iter(())

    def begin(self, descriptor: int) -> None:
        """A connection was accepted."""
        self._descriptors[descriptor] = None

    def end(self, descriptor: int) -> None:
        """It has closed."""
        self._descriptors.pop(descriptor, None)
        self._delivered.pop(self._peers.pop(descriptor, b""), None)

    def deliver(self, peer: bytes, size: int, descriptor: Callable[[], int]) -> int:
        """A message of so many bytes is here; ``descriptor`` is asked at the first one, and at large ones.

        Returns the descriptor when too much is behind this one, else -1: who sends large ones fills memory in no time.
        """
        before = self._delivered.get(peer)
        if before is None:
            before, first = 0, descriptor()
            self._peers[first] = peer
            self._spoke(first)
        self._delivered[peer] = delivered = before + size + OVERHEAD_BYTES
        if size > LARGE_BYTES and received_bytes(at := descriptor()) - delivered > MOST_BYTES:
            return at
        return -1

    def excessive(self) -> list[int]:
        """Descriptors over which too much has come that is not delivered; each call looks at the next few."""
        found = []
        for _ in range(AT_ONCE):
            descriptor = next(self._round, None)
            if descriptor is None:
                self._round = iter(list(self._descriptors))
                break
            delivered = self._delivered.get(self._peers.get(descriptor, b""), 0)
            if descriptor in self._descriptors and received_bytes(descriptor) - delivered > MOST_BYTES:
                found.append(descriptor)
        return found


def received_bytes(descriptor: int) -> int:
    """All that has ever come over a connection; 0 where the kernel does not say."""
    if LIBC is None:
        return 0
    buffer = ctypes.create_string_buffer(_RECEIVED.size)
    size = ctypes.c_uint32(_RECEIVED.size)
    failed = LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, TCP_INFO, buffer, ctypes.byref(size))
    return 0 if failed or size.value < _RECEIVED.size else int(_RECEIVED.unpack_from(buffer)[0])
