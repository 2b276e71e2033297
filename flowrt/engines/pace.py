"""Simulated time: so many real seconds a simulated one, or a clock that jumps to wherever somebody waits for."""

import threading
from typing import Protocol

from flowrt.clock import Clock, DrivenClock, MonotonicClock
from flowrt.engines.protocols import Interrupt

NEVER = threading.Event()
"""An interrupt that nobody sets."""


class Pace(Protocol):
    """How simulated seconds pass."""

    def now(self) -> float:
        """Simulated seconds; the zero is arbitrary."""
        ...

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        """Return when the simulated time has come, or the interrupt is set."""
        ...


class RealPace:
    """One simulated second takes ``real_s`` real ones; processes of one host that agree on it share their time."""

    def __init__(self, real_s: float, clock: Clock | None = None) -> None:
        self._real_s = real_s
        self._clock = clock or MonotonicClock()

    def now(self) -> float:
        return self._clock.now() / self._real_s

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        while (left_s := at_s - self.now()) > 0:
            if interrupt.wait(left_s * self._real_s):
                return


class DrivenPace:
    """Whoever waits moves the clock: hours pass at once, in the same order every time."""

    def __init__(self, clock: DrivenClock | None = None) -> None:
        self.clock = clock or DrivenClock()

    def now(self) -> float:
        return self.clock.now()

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        if not interrupt.is_set():
            self.clock.advance(max(0.0, at_s - self.now()))


class Device:
    """Something that does one piece of work after the other.

    A wait ends a little late, and whoever waits once for each micro-batch would collect that: the next piece of work is
    taken to begin when the last wait should have ended, not when it did. Time that the caller took in between counts.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._late_s = 0.0
        self.worked_s = 0.0
        """Simulated seconds of all work so far."""

    def work(self, seconds: float) -> None:
        """Be busy for so many simulated seconds."""
        end_s = self._pace.now() - self._late_s + seconds
        self._pace.wait_until(end_s)
        self.worked_s += seconds
        self._late_s = max(0.0, self._pace.now() - end_s)
