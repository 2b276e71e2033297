"""Detection of silent peers: a stopped process, or a cut link.

- The I/O threads of a worker send something every second, however busy the worker is. To a silent peer, our kernel
  sends TCP keepalive probes at the same interval.
- If the process is stopped, its kernel acknowledges the probes but no data arrives. If the link is cut or the machine
  has failed, neither arrives. A cut link may recover without loss (TCP retransmits), so it is given more time.
- The counters of our kernel distinguish the two cases (`tcp_info` in Linux's include/uapi/linux/tcp.h).
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

HEARTBEAT_MS = 1000
"""A worker's I/O threads send something at least this often."""
STOPPED_MS = 4400
"""A process is stopped if its kernel acknowledges and no data has arrived for this time: detected within 5 s.

An earlier verdict could be wrong: data may have been lost while the link was cut for less than GAP_MS, and TCP
retransmits after 0.2, 0.4, 0.8, 1.7 and 3.4 s.
"""
GAP_MS = 2000
"""Without any packet for this time the link was cut: our kernel probes every second, and two probes failed."""
CUT_MS = 3500
"""Without any packet for this time the link is reported as cut: also detected within 5 s."""
RECHECK_MS = 50
"""A verdict is checked again after this: when a link recovers, an acknowledgement may arrive before the data."""
BATCH = 256
"""Connections that are checked without a pause, which takes about a millisecond."""
TCP_INFO = 11
# The fields of struct tcp_info that are used: tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv (ms), and
# tcpi_total_retrans.
_INFO = struct.Struct("=8x16xI16x8xII40xI")
# tcpi_dsack_dups (Linux 4.19 and later): segments that were received twice, which were late and not lost. The kernel of
# a stopped process delays acknowledgements, and data in flight is then retransmitted as a precaution.
_DUPLICATES = struct.Struct("=216xI")
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(slots=True)  # not frozen: construction of a frozen one takes three times as long
class TcpInfo:
    """The kernel's counters of one connection."""

    received_ms: int  # since data was received
    active_ms: int  # since data or an acknowledgement was received
    unacknowledged: int  # segments sent and not acknowledged
    lost: int  # segments retransmitted because they were lost, in total

    @property
    def stopped(self) -> bool:
        """Whether the peer's kernel has acknowledged a probe after data was due, and no data has arrived."""
        overdue_ms = self.received_ms - HEARTBEAT_MS
        return self.received_ms > STOPPED_MS and self.active_ms < overdue_ms and self.unacknowledged == 0


@dataclass(slots=True)
class WatchedConnection:
    """Results of the earlier checks of a connection."""

    next_check_s: float = 0.0
    cut: bool = False  # no packets at all at the latest check
    last_active_ms: float = 0.0  # when the last packet was received, on the monotonic clock
    lost: int = 0
    grace_until_s: float = 0.0  # before that time the process does not count as stopped

    def update(self, info: TcpInfo, now_s: float) -> bool:
        """Take the result of a check; returns whether the peer's process seems to be stopped.

        After a gap there is a grace period: the peer retransmits at doubling intervals, so after a link has recovered
        it may stay silent for as long again as the link was cut, although its kernel acknowledges everything.
        """
        now_ms = 1000 * now_s
        before_ms = max(self.last_active_ms, now_ms - info.received_ms)
        self.last_active_ms = now_ms - info.active_ms
        self.cut = info.active_ms > CUT_MS
        gap_ms = max(self.last_active_ms - before_ms, info.active_ms)
        if gap_ms > GAP_MS or info.lost > self.lost:
            self.grace_until_s = now_s + max(info.received_ms, STOPPED_MS) / 1000
        self.lost = info.lost
        self.next_check_s = now_s + max(HEARTBEAT_MS - info.received_ms, 0) / 1000
        return info.stopped and now_s >= self.grace_until_s


class LivenessMonitor:
    """Checks connections by their descriptors, each only once it may have been silent for long enough."""

    def __init__(self) -> None:
        self._watched: dict[int, WatchedConnection] = {}
        self.cut: dict[int, float] = {}
        """Descriptors of the connections whose link seems to be cut, and since when (`monotonic`)."""

    def add(self, descriptor: int) -> None:
        """Watch a connection from its first message on; before that ZeroMQ limits the time of the handshake."""
        self._watched[descriptor] = WatchedConnection()

    def remove(self, descriptor: int) -> None:
        """Forget a closed connection."""
        self._watched.pop(descriptor, None)
        self.cut.pop(descriptor, None)

    def find_stopped(self) -> Iterator[list[int]]:
        """Check all connections; yields, for each batch, the descriptors whose process seems to be stopped."""
        descriptors = list(self._watched)
        for first in range(0, len(descriptors), BATCH):
            now_s = monotonic()
            yield [
                descriptor for descriptor in descriptors[first : first + BATCH] if self._is_stopped(descriptor, now_s)
            ]

    def is_stopped(self, descriptor: int) -> bool:
        """Check one connection; returns whether its process seems to be stopped."""
        return self._is_stopped(descriptor, monotonic())

    def _is_stopped(self, descriptor: int, now_s: float) -> bool:
        watched = self._watched.get(descriptor)
        if watched is None or watched.next_check_s > now_s:
            return False
        info = tcp_info(descriptor)
        if info is None:
            return False
        stopped = watched.update(info, now_s)
        if watched.cut:
            self.cut.setdefault(descriptor, now_s - info.active_ms / 1000)
        else:
            self.cut.pop(descriptor, None)
        return stopped


def tcp_info(descriptor: int) -> TcpInfo | None:
    """The kernel's counters of a connection; None if the kernel does not provide them."""
    if LIBC is None:
        return None
    buffer = ctypes.create_string_buffer(_DUPLICATES.size)
    size = ctypes.c_uint32(_DUPLICATES.size)
    failed = LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, TCP_INFO, buffer, ctypes.byref(size))
    if failed or size.value < _INFO.size:
        return None
    unacknowledged, received_ms, acknowledged_ms, retransmitted = _INFO.unpack_from(buffer)
    duplicates = _DUPLICATES.unpack_from(buffer)[0] if size.value >= _DUPLICATES.size else 0
    return TcpInfo(received_ms, min(received_ms, acknowledged_ms), unacknowledged, max(retransmitted - duplicates, 0))
