"""Continuous batching as a sequence of events: when each of the sequences that run together ends."""

import heapq
from typing import NamedTuple

from flowrt.engines.simulated.costs import GenerationCost


class Finish(NamedTuple):
    """A complete sequence, and the simulated time of its last token."""

    key: int
    at_s: float


class SimulatedDecoder:
    """Sequences that all advance by one token in ``cost.step_s(running)`` seconds.

    The number of sequences is constant between two events, so time advances from event to event, not step by step.
    """

    def __init__(self, cost: GenerationCost, now_s: float = 0.0) -> None:
        self._cost = cost
        self._now_s = now_s
        self._stalled_until_s = now_s
        self._progress = 0.0  # tokens of a sequence that has run from the start
        self._ends: list[tuple[float, int]] = []  # heap: the progress at which a running sequence ends, and its key
        self._started_at: dict[int, float] = {}
        self.row_s = 0.0
        """Total simulated seconds that sequences have occupied a row."""

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._ends)

    def add(self, key: int, length: int) -> None:
        """Start a sequence of ``length`` tokens at the current time, to which `advance` was called."""
        self._started_at[key] = self._progress
        heapq.heappush(self._ends, (self._progress + length, key))

    def stall(self, seconds: float) -> None:
        """Pause decoding from now on, for a prefill or to load weights."""
        self._stalled_until_s = max(self._stalled_until_s, self._now_s) + seconds

    def next_finish(self) -> float:
        """The time at which the next sequence ends; infinity if none runs."""
        if not self._ends:
            return float("inf")
        left = self._ends[0][0] - self._progress
        return max(self._now_s, self._stalled_until_s) + left * self._cost.step_s(self.running)

    def advance(self, now_s: float) -> list[Finish]:
        """Advance the time to ``now_s``. Returns the sequences that end until then, in order."""
        finished = []
        while (at_s := self.next_finish()) <= now_s:
            end = self._ends[0][0]
            self._advance_to(at_s)
            self._progress = end  # exactly, without rounding errors
            while self._ends and self._ends[0][0] <= end:
                key = heapq.heappop(self._ends)[1]
                del self._started_at[key]
                finished.append(Finish(key, at_s))
        self._advance_to(now_s)
        return finished

    def tokens_of(self, key: int) -> int:
        """Number of tokens that a running sequence has."""
        return int(self._progress - self._started_at[key])

    def _advance_to(self, until_s: float) -> None:
        if until_s <= self._now_s:
            return
        decoding_s = until_s - min(max(self._now_s, self._stalled_until_s), until_s)
        if self._ends:
            self._progress += decoding_s / self._cost.step_s(self.running)
        self.row_s += self.running * (until_s - self._now_s)
        self._now_s = until_s
