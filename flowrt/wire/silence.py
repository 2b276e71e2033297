"""Two kinds of silence: a process that is stopped, and a link that is cut.

ZeroMQ's I/O threads ask every peer every two seconds whether it lives. Where a process is stopped its kernel still
acknowledges the question, and no answer comes; where the link is cut, or the machine is gone, nothing comes at all. A
link may come back, and TCP will have lost nothing; so it is given more time. The kernel knows which it is.
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from time import monotonic

STOPPED_MS = 4200
"""A peer that was asked, that acknowledged this and has said nothing for so long is stopped: noticed in 5 s."""
ASKED_MS = 500
"""The acknowledgement must be that much younger than the last thing that was heard: it is one of a later question."""
AGAIN_MS = 50
"""A verdict is looked at again after this: when a link is mended, the acknowledgement may come before the answer."""
AT_ONCE = 256
"""Connections that are looked at in one go: a millisecond's work, while others may wait to be answered."""
_TCP_INFO = 11
# Eight bytes; then numbers, of which the fifth counts what is not acknowledged, and the tenth to thirteenth are the
# milliseconds since data was sent, an acknowledgement sent, data received, and an acknowledgement received.
_INFO = struct.Struct("=8x16xI16x8xII")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Watch:
    """Looks at connections, each only when it may have been silent for long enough."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}

    def begin(self, descriptor: int) -> None:
        self._due_s[descriptor] = 0.0

    def end(self, descriptor: int) -> None:
        self._due_s.pop(descriptor, None)

    def stopped(self) -> Iterator[list[int]]:
        """The connections whose other end is stopped, as far as one look can tell; each item is of a few of them."""
        descriptors = list(self._due_s)
        for first in range(0, len(descriptors), AT_ONCE):
            found, now_s = [], monotonic()
            for descriptor in descriptors[first : first + AT_ONCE]:
                if self._due_s.get(descriptor, now_s + 1.0) > now_s:
                    continue
                heard_ms, stopped = silence(descriptor)
                self._due_s[descriptor] = now_s + max(STOPPED_MS - heard_ms, 0) / 1000
                if stopped:
                    found.append(descriptor)
            yield found

    def still_stopped(self, descriptor: int) -> bool:
        return descriptor in self._due_s and silence(descriptor)[1]


def silence(descriptor: int) -> tuple[int, bool]:
    """For how many milliseconds nothing was heard, and whether that is because the process there is stopped."""
    if _LIBC is None:
        return 0, False
    buffer = ctypes.create_string_buffer(_INFO.size)
    size = ctypes.c_uint32(_INFO.size)
    failed = _LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, _TCP_INFO, buffer, ctypes.byref(size))
    if failed or size.value < _INFO.size:
        return 0, False
    unacknowledged, heard_ms, acknowledged_ms = _INFO.unpack(buffer.raw)
    asked = unacknowledged == 0 and acknowledged_ms < heard_ms - ASKED_MS
    return heard_ms, asked and heard_ms > STOPPED_MS
