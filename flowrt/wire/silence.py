"""Two kinds of silence: a process that is stopped, and a link that is cut.

The I/O threads of a worker say something every two seconds, however busy it is; of one that does not our kernel asks
whether it is there. Where a process is stopped its kernel still acknowledges the question, and no word comes; where the
link is cut, or the machine is gone, nothing comes at all. A link may come back, and TCP will have lost nothing; so it
is given more time. The kernel knows which it is (`tcp_info` in Linux's include/uapi/linux/tcp.h).
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

STOPPED_MS = 4200
"""A peer that was asked, that acknowledged this and has said nothing for so long is stopped: noticed in 5 s."""
ASKED_MS = 500
"""The acknowledgement must be that much younger than the last thing that was heard: it is one of a later question."""
AGAIN_MS = 50
"""A verdict is looked at again after this: when a link is mended, the acknowledgement may come before the answer."""
AT_ONCE = 256
"""Connections that are looked at in one go: a millisecond's work, while others may wait to be answered."""
TCP_INFO = 11
# Eight bytes; then numbers, of which the fifth counts what is not acknowledged, the tenth to thirteenth are the
# milliseconds since data was sent, an acknowledgement sent, data received, and an acknowledgement received, and the
# twenty-fourth counts all that was sent more than once.
_INFO = struct.Struct("=8x16xI16x8xII40xI")
# How much of that came twice, as the other end said (Linux 4.19 and later): it was late, not lost. A kernel whose
# process is stopped takes its time with acknowledgements, and what is in flight is then sent again as a precaution.
_TWICE = struct.Struct("=216xI")
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(slots=True)  # not frozen: one is made for every look, and that takes three times as long
class Look:
    """What the kernel knows of a connection: milliseconds of silence and of no acknowledgement; how much is not
    acknowledged, and how much was sent again because it was lost.
    """

    heard_ms: int
    acknowledged_ms: int
    unacknowledged: int
    repeated: int

    @property
    def asked(self) -> bool:
        """Whether a question got there after the last thing that was heard from there."""
        return self.acknowledged_ms < self.heard_ms - ASKED_MS

    @property
    def stopped(self) -> bool:
        return self.heard_ms > STOPPED_MS and self.asked and self.unacknowledged == 0


@dataclass(slots=True)
class Watched:
    """What earlier looks at a connection have shown."""

    due_s: float = 0.0
    repeated: int = 0
    doubted_until_s: float = 0.0

    def judge(self, look: Look, now_s: float) -> bool:
        """Whether the process there is stopped, as far as this look can tell.

        Where the link was cut, the other end repeats what it could not send at intervals that double: after a link is
        mended it may stay silent for as long again as it was cut, though its kernel acknowledges everything.
        """
        cut = look.heard_ms > STOPPED_MS and not look.asked
        if cut or look.repeated > self.repeated:
            self.doubted_until_s = now_s + max(look.heard_ms, STOPPED_MS) / 1000
        self.repeated = look.repeated
        self.due_s = now_s + max(STOPPED_MS - look.heard_ms, 0) / 1000
        return look.stopped and now_s >= self.doubted_until_s


class Watch:
    """Looks at connections, each only when it may have been silent for long enough."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}

    def begin(self, descriptor: int) -> None:
        """It has spoken: before that it is in its handshake, of which ZeroMQ knows the end."""
        self._watched[descriptor] = Watched()

    def end(self, descriptor: int) -> None:
        self._watched.pop(descriptor, None)

    def stopped(self) -> Iterator[list[int]]:
        """The connections whose other end is stopped, as far as one look can tell; each item is of a few of them."""
        descriptors = list(self._watched)
        for first in range(0, len(descriptors), AT_ONCE):
            now_s = monotonic()
            yield [one for one in descriptors[first : first + AT_ONCE] if self._is_stopped(one, now_s)]

    def still_stopped(self, descriptor: int) -> bool:
        return self._is_stopped(descriptor, monotonic())

    def _is_stopped(self, descriptor: int, now_s: float) -> bool:
        watched = self._watched.get(descriptor)
        if watched is None or watched.due_s > now_s:
            return False
        look = look_at(descriptor)
        return look is not None and watched.judge(look, now_s)


def look_at(descriptor: int) -> Look | None:
    """What the kernel knows of a connection; None where it does not say."""
    if LIBC is None:
        return None
    buffer = ctypes.create_string_buffer(_TWICE.size)
    size = ctypes.c_uint32(_TWICE.size)
    failed = LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, TCP_INFO, buffer, ctypes.byref(size))
    if failed or size.value < _INFO.size:
        return None
    unacknowledged, heard_ms, acknowledged_ms, repeated = _INFO.unpack_from(buffer)
    twice = _TWICE.unpack_from(buffer)[0] if size.value >= _TWICE.size else 0
    return Look(heard_ms, acknowledged_ms, unacknowledged, max(repeated - twice, 0))
