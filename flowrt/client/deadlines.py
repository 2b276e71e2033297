"""Deadlines by number, with one timer for all: nearly everything that has one is over long before it."""

import asyncio
import contextlib
from collections.abc import Callable

GRAIN_S = 0.001
"""Of the loop's clock: a timer may ring so much before its time."""


class Deadlines:
    """``due`` is called with each number whose time has come; that deadline is gone then."""

    def __init__(self, due: Callable[[int], None]) -> None:
        self._due = due
        self._loop = asyncio.get_running_loop()
        self._at_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")  # when it rings; it may find nothing due, and is set again

    def add(self, number: int, seconds: float) -> None:
        """From now on, so many seconds."""
        self._at_s[number] = at_s = self._loop.time() + seconds
        if at_s < self._timer_s:
            self._ring(at_s)

    def drop(self, number: int) -> None:
        """It is over; nothing happens if there is none of this number."""
        self._at_s.pop(number, None)

    def close(self) -> None:
        """Nothing will be due any more."""
        self._at_s.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = self._loop.call_at(at_s, self._look), at_s

    def _look(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        now = self._loop.time()
        due = [number for number, at_s in self._at_s.items() if at_s <= now + GRAIN_S]
        for number in due:
            del self._at_s[number]
        if self._at_s:
            self._ring(min(self._at_s.values()))
        with contextlib.ExitStack() as each:  # what fails with one must not keep another waiting
            for number in reversed(due):
                each.callback(self._due, number)
