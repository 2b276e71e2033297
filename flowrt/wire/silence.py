"""Two kinds of silence: a process that is stopped, and a link that is cut.

The I/O threads of a worker say something every second, however busy it is; of one that does not our kernel asks, as
often, whether it is there. Where a process is stopped its kernel still acknowledges the question, and no word comes;
where the link is cut, or the machine is gone, nothing comes at all. A link may come back, and TCP will have lost
nothing; so it is given more time. The kernel knows which it is (`tcp_info` in Linux's include/uapi/linux/tcp.h).
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

SPOKEN_MS = 1000
"""Whoever is there has said something by then."""
STOPPED_MS = 4400
"""Whose kernel acknowledged, and who has said nothing for so long, is stopped: noticed in 5 s.

Until then somebody may be silent of whom we know no better: what he said was lost while the link was cut for less than
GAP_MS, and TCP repeats after 0.2, 0.4, 0.8, 1.7 and 3.4 s.
"""
GAP_MS = 2000
"""Without a sign for so long: the link was cut. Our kernel asks every second, and we look twice."""
CUT_MS = 3500
"""Without a sign for so long, it is said that the link is cut: noticed in 5 s, too."""
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
    """What the kernel knows of a connection: milliseconds since a word, and since any sign of life; how much is not
    acknowledged, and how much was sent again because it was lost.
    """

    heard_ms: int
    acknowledged_ms: int
    unacknowledged: int
    repeated: int

    @property
    def stopped(self) -> bool:
        """Whether a question got there when a word was due, and none has come."""
        due_ms = self.heard_ms - SPOKEN_MS
        return self.heard_ms > STOPPED_MS and self.acknowledged_ms < due_ms and self.unacknowledged == 0


@dataclass(slots=True)
class Watched:
    """What earlier looks at a connection have shown."""

    due_s: float = 0.0
    cut: bool = False  # nothing comes any more, not even from the kernel there
    sign_ms: float = 0.0  # when something came last
    repeated: int = 0
    doubted_until_s: float = 0.0

    def judge(self, look: Look, now_s: float) -> bool:
        """Whether the process there is stopped, as far as this look can tell.

        Where the link was cut, the other end repeats what it could not send at intervals that double: after a link is
        mended it may stay silent for as long again as it was cut, though its kernel acknowledges everything.
        """
        now_ms = 1000 * now_s
        before_ms, self.sign_ms = max(self.sign_ms, now_ms - look.heard_ms), now_ms - look.acknowledged_ms
        self.cut = look.acknowledged_ms > CUT_MS
        gap_ms = max(self.sign_ms - before_ms, look.acknowledged_ms)
        if gap_ms > GAP_MS or look.repeated > self.repeated:
            self.doubted_until_s = now_s + max(look.heard_ms, STOPPED_MS) / 1000
        self.repeated = look.repeated
        self.due_s = now_s + max(SPOKEN_MS - look.heard_ms, 0) / 1000
        return look.stopped and now_s >= self.doubted_until_s


class Watch:
    """Looks at connections, each only when it may have been silent for long enough."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        self.cut: dict[int, float] = {}
        """Connections over which nothing comes any more, and since when (`monotonic`)."""

    def begin(self, descriptor: int) -> None:
        """It has spoken: before that it is in its handshake, of which ZeroMQ knows the end."""
        self._watched[descriptor] = Watched()

    def end(self, descriptor: int) -> None:
        self._watched.pop(descriptor, None)
        self.cut.pop(descriptor, None)

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
        if (look := look_at(descriptor)) is None:
            return False
        stopped = watched.judge(look, now_s)
        if watched.cut:
            self.cut.setdefault(descriptor, now_s - look.acknowledged_ms / 1000)
        else:
            self.cut.pop(descriptor, None)
        return stopped


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
    return Look(heard_ms, min(heard_ms, acknowledged_ms), unacknowledged, max(repeated - twice, 0))
