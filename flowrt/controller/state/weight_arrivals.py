"""How fast the fetches of a model advance: which are much slower than the others.

Each receiver reports when an eighth of a version has arrived. Once a quarter of the fetches have that, one that takes
half as long again as the median, and a second more, is late: its link or its sender is slow, and another source may not
be. No rate has to be known for that, and where all are slow none is late.
"""

from bisect import insort
from collections.abc import Callable

from flowrt.ids import WorkerId

LATE_FACTOR, LATE_S = 1.5, 1.0
MAX_TIMES = 10_000
"""Times of a version that are kept."""


class Arrivals:
    """The fetches under way without an eighth of their version, and how long that took the others."""

    def __init__(self) -> None:
        self.waiting: dict[WorkerId, tuple[float, int]] = {}  # since when, and bytes; the longest first
        self._times_s: list[float] = []  # for each byte, of the newest version, ascending
        self._stopped: dict[WorkerId, None] = {}  # receivers that were late, each once for a version

    def begin_version(self) -> None:
        """Forget the times of the last version."""
        self._times_s.clear()
        self._stopped.clear()

    def begin(self, worker: WorkerId, size: int, now: float) -> None:
        """Note that a receiver was ordered to fetch ``size`` bytes."""
        self.waiting.pop(worker, None)
        self.waiting[worker] = now, max(size, 1)

    def arriving(self, worker: WorkerId, now: float) -> None:
        """Note that an eighth has arrived."""
        waiting = self.waiting.pop(worker, None)
        if waiting is not None and len(self._times_s) < MAX_TIMES:
            since_s, size = waiting
            insort(self._times_s, (now - since_s) / size)

    def end(self, worker: WorkerId) -> None:
        """Note that the fetch has ended."""
        self.waiting.pop(worker, None)

    @property
    def late_s(self) -> float:
        """From when on the fetch that has waited longest is late; infinite if it is not known how long others take."""
        if not self.waiting or 3 * len(self._times_s) < len(self.waiting):
            return float("inf")
        since_s, size = next(iter(self.waiting.values()))
        return since_s + LATE_FACTOR * size * self._times_s[len(self._times_s) // 2] + LATE_S

    def take_late(self, now: float, holder_of: Callable[[WorkerId], WorkerId | None]) -> list[WorkerId]:
        """The receivers that are late while their holders are not; none is returned twice for a version.

        ``holder_of``: the worker from which a receiver fetches.
        """
        late: list[WorkerId] = []
        while self.late_s <= now:
            worker, (_, size) = next(iter(self.waiting.items()))
            late.append(worker)
            self.begin(worker, size, now)
        stopped = []
        for worker in late:
            holder = holder_of(worker)
            if holder is not None and worker not in self._stopped and holder not in self.waiting:
                self._stopped[worker] = None
                stopped.append(worker)
        return stopped
