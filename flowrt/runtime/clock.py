"""Clocks: the real one, and one that a test or a simulation advances."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time in seconds since an arbitrary zero; never decreases."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock (shared by all processes of one host on Linux)."""

    now = staticmethod(time.monotonic)


class SteadyClock:
    """A clock that never goes back: a step back of the underlying clock counts as no time."""

    def __init__(self, clock: Clock) -> None:
        self._read = clock.now
        self._last_s = clock.now()
        self._lost_s = 0.0

    def now(self) -> float:
        now = self._read()
        if now < self._last_s:
            self._lost_s += self._last_s - now
        self._last_s = now
        return now + self._lost_s


MIN_ABSENCE_S = 1.0
"""A shorter absence is not noticed: a busy machine may delay a process for that long."""


class OwnAbsence:
    """Measures the time in which this process did not run: it was stopped, its machine was paused, or its event loop
    was blocked.

    A deadline for another process must not contain that time: messages of the other one may wait to be read, and it may
    have been stopped as well.
    """

    def __init__(self, interval_s: float) -> None:
        """``interval_s``: `take` is called at least this often."""
        self._interval_s = interval_s
        self._last_s: float | None = None

    def take(self, now: float) -> float:
        """The absence since the last call in seconds; 0 if it was called in time. ``now``: any clock, in seconds."""
        last_s, self._last_s = self._last_s, now
        if last_s is None or now - last_s <= self._interval_s + MIN_ABSENCE_S:
            return 0.0
        return now - last_s - self._interval_s


class DrivenClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock. Raises ValueError if ``seconds`` is negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s; pass a value >= 0")
        self._now_s += seconds
