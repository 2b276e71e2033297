"""Offset between a worker's clock and the controller's, and detection of stops of the worker's process.

- Processes of one host share the monotonic clock (Linux), so the offset is 0 if both name the same clock.
- Otherwise the offset is estimated from heartbeats, which are answered with the controller's time: of the last `WINDOW`
  exchanges, the one with the least round trip counts, with the middle of its round trip as the time of the answer, as
  in NTP (RFC 5905, section 8). The error is at most half of that round trip plus the drift of the clocks since then.
- A host that was suspended, or a virtual machine that was moved, has another offset afterwards.
"""

import contextlib
import threading
import time
from collections import deque
from typing import NamedTuple

from flowrt.ids import STOPPED
from flowrt.runtime.timeline import Span
from flowrt.runtime.waits import every

WINDOW = 16
"""Number of exchanges of which the one with the least round trip is chosen."""
MAX_JUMP_S = 0.1
"""Change of the offset that is more than drift: one of the hosts has been suspended."""
POLL_S = 0.2
MIN_STOP_S = 1.0
MAX_STOPS = 10_000
MAX_STOPPED_CPU = 0.5
"""A late process that used more processor seconds per second than this was busy, not stopped."""


class Exchange(NamedTuple):
    """One heartbeat and its answer."""

    round_trip_s: float
    offset_s: float
    """The controller's time minus the worker's."""


class ControllerClock:
    """Converts the times of this process to the controller's clock."""

    def __init__(self, is_shared: bool) -> None:
        """``is_shared``: the controller reads the same clock."""
        self._is_shared = is_shared
        self._exchanges: deque[Exchange] = deque(maxlen=WINDOW)

    @property
    def offset_s(self) -> float | None:
        """The controller's time minus that of this process, in seconds; None while it is unknown."""
        if self._is_shared:
            return 0.0
        return min(self._exchanges).offset_s if self._exchanges else None

    @property
    def error_s(self) -> float:
        """Bound on the error of the offset in seconds, without drift; infinite while the offset is unknown."""
        if self._is_shared:
            return 0.0
        return min(self._exchanges).round_trip_s / 2 if self._exchanges else float("inf")

    def add(self, sent_s: float, answered_s: float, received_s: float) -> float:
        """Take an answered heartbeat.

        Args:
            sent_s: when it was sent, on the clock of this process.
            answered_s: when it was answered, on the controller's clock.
            received_s: when the answer arrived, on the clock of this process.

        Returns:
            Seconds by which the offset has grown since the earlier exchanges (negative: shrunk); 0 if drift and
            round trips explain the change.
        """
        if self._is_shared or received_s < sent_s:
            return 0.0
        new = Exchange(received_s - sent_s, answered_s - (sent_s + received_s) / 2)
        jump_s = 0.0
        if self._exchanges:
            change_s = new.offset_s - min(self._exchanges).offset_s
            if abs(change_s) > MAX_JUMP_S + new.round_trip_s / 2 + self.error_s:
                jump_s = change_s
                self._exchanges.clear()
        self._exchanges.append(new)
        return jump_s

    def reset(self, is_shared: bool) -> None:
        """Forget all exchanges: the worker has another controller, which may read another clock."""
        self._is_shared = is_shared
        self._exchanges.clear()


class StopWatcher:
    """A thread that detects when this process did not run because it was stopped or its machine was paused.

    A process that computes without letting this thread run is recognised by the processor time that it used.
    """

    def __init__(self) -> None:
        self._stops: list[Span] = []
        self._last_s, self._last_cpu_s = time.monotonic(), time.process_time()
        self._lock = threading.Lock()
        self._thread = contextlib.ExitStack()

    def start(self) -> None:
        """Start the thread."""
        self._last_s, self._last_cpu_s = time.monotonic(), time.process_time()
        self._thread.enter_context(every(self._check, POLL_S, "flowrt stops"))

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def take(self) -> list[Span]:
        """The stops since the last call, on the clock of this process; also one that the thread has not seen yet."""
        self._check()
        with self._lock:
            stops, self._stops = self._stops, []
        return stops

    def note(self, last_s: float, now: float, cpu_s: float) -> None:
        """Add a stop if the time between two runs of the thread was long, and the process used little processor time.

        Args:
            last_s: time of the first run (`monotonic`).
            now: time of the second run.
            cpu_s: processor seconds of the process in between.
        """
        if now - last_s > MIN_STOP_S and cpu_s < MAX_STOPPED_CPU * (now - last_s) and len(self._stops) < MAX_STOPS:
            self._stops.append(Span(STOPPED, last_s, now))

    def _check(self) -> None:
        with self._lock:
            now, cpu_s = time.monotonic(), time.process_time()
            self.note(self._last_s, now, cpu_s - self._last_cpu_s)
            self._last_s, self._last_cpu_s = now, cpu_s
