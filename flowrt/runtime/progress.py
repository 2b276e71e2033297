"""Progress of a worker: what extends its leases, and the time limits of the run, while its work goes on.

Durations of correct work follow the response length, the model and the machine, so no fixed limit fits them. A worker
therefore reports with each heartbeat whether its work has advanced, and only work that does not advance is given up.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from time import monotonic


class Progress:
    """Whether the work of one worker advances. Safe to call from any thread.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._advances = 0
        self._taken = 0
        self._advanced_s = clock()
        self._numbers = itertools.count()
        self._until_s: dict[int, float] = {}

    def advance(self) -> None:
        """Note that the work has advanced: a decoded token, a pass, a scored sample."""
        self._advances += 1
        self._advanced_s = self._clock()

    @contextlib.contextmanager
    def expected(self, limit_s: float) -> Iterator[None]:
        """Count the block as progress while it runs, for at most ``limit_s`` seconds, and its end too.

        For work that cannot report in between: a call of a library, or one with a deadline of its own.
        """
        number = next(self._numbers)
        self._until_s[number] = self._clock() + limit_s
        try:
            yield
        finally:
            del self._until_s[number]
        self.advance()

    def take(self) -> bool:
        """Whether the work has advanced since the last call."""
        advances, self._taken = self._advances != self._taken, self._advances
        return advances or self._is_expected

    @property
    def idle_s(self) -> float:
        """Seconds for which the work has not advanced; 0 while progress is expected."""
        return 0.0 if self._is_expected else self._clock() - self._advanced_s

    @property
    def _is_expected(self) -> bool:
        now = self._clock()
        return any(now < until_s for until_s in list(self._until_s.values()))
