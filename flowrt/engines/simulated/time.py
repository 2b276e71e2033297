"""Simulated time: scaled real time, or a manual clock that every wait advances."""

import threading
from typing import Protocol

from flowrt.engines.base import Interrupt
from flowrt.runtime.clock import Clock, DrivenClock, MonotonicClock

NEVER = threading.Event()
"""An interrupt that is never set."""


class SimClock(Protocol):
    """A clock of simulated seconds."""

    def now(self) -> float:
        """The simulated time in seconds, from an arbitrary zero."""
        ...

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        """Wait until the simulated time ``at_s``, or until the interrupt is set."""
        ...


class RealTimeSimClock:
    """A simulated second takes ``real_s`` real seconds; processes of a host with the same ``real_s`` share one time."""

    def __init__(self, real_s: float, clock: Clock | None = None) -> None:
        self._real_s = real_s
        self._clock = clock or MonotonicClock()

    def now(self) -> float:
        return self._clock.now() / self._real_s

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        while (left_s := at_s - self.now()) > 0:
            if interrupt.wait(left_s * self._real_s):
                return


class ManualSimClock:
    """A clock that each wait advances to the end of the wait, without real time: reproducible."""

    def __init__(self, clock: DrivenClock | None = None) -> None:
        self.clock = clock or DrivenClock()

    def now(self) -> float:
        return self.clock.now()

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        if not interrupt.is_set():
            self.clock.advance(max(0.0, at_s - self.now()))


class SimDevice:
    """A device that does one piece of work after another.

    A wait in real time ends a little late. So that this delay does not accumulate, the next piece of work is shortened
    by it. Time that the caller spends between two pieces of work is not deducted.
    """

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._late_s = 0.0
        self.worked_s = 0.0
        """Simulated seconds of all work so far."""

    def work(self, seconds: float) -> None:
        """Work for this number of simulated seconds; returns at the end."""
        end_s = self._clock.now() - self._late_s + seconds
        self._clock.wait_until(end_s)
        self.worked_s += seconds
        self._late_s = max(0.0, self._clock.now() - end_s)
