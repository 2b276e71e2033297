"""Continuous batching as events: which simulated sequences run together, when each of them ends. No waiting here."""

import heapq
from typing import NamedTuple

from flowrt.engines.costs import DecodeCost


class Finish(NamedTuple):
    """A sequence that has all its tokens, and the simulated time at which it got the last one."""

    key: int
    at_s: float


class SimulatedDecoder:
    """Sequences that run together all advance by one token in tau(rows) seconds; when one ends, the rest go faster.

    Between two events the number of sequences is constant, so time passes from event to event, never step by step.
    """

    def __init__(self, cost: DecodeCost, now_s: float = 0.0) -> None:
        self._cost = cost
        self._now_s = now_s
        self._stalled_until_s = now_s
        self._progress = 0.0  # tokens of a sequence that had run since the beginning
        self._marks: list[tuple[float, int]] = []  # the progress at which each running sequence ends, and its key
        self._begun_at: dict[int, float] = {}
        self.row_s = 0.0
        """Seconds of all sequences together that have run or stood in a row."""

    @property
    def running(self) -> int:
        return len(self._marks)

    def add(self, key: int, length: int) -> None:
        """Begin a sequence of so many tokens now (after `advance` to now)."""
        self._begun_at[key] = self._progress
        heapq.heappush(self._marks, (self._progress + length, key))

    def stall(self, seconds: float) -> None:
        """Nothing is decoded for so long from now: a prefill, or weights being loaded."""
        self._stalled_until_s = max(self._stalled_until_s, self._now_s) + seconds

    def next_finish(self) -> float:
        """When the next sequence ends if nothing else happens before; infinity when none runs."""
        if not self._marks:
            return float("inf")
        left = self._marks[0][0] - self._progress
        return max(self._now_s, self._stalled_until_s) + left * self._cost.step_s(self.running)

    def advance(self, now_s: float) -> list[Finish]:
        """Let time pass until ``now_s``; what has ended by then, in order."""
        finished = []
        while (at_s := self.next_finish()) <= now_s:
            mark = self._marks[0][0]
            self._pass(at_s)
            self._progress = mark  # exactly, whatever was rounded on the way
            while self._marks and self._marks[0][0] <= mark:
                key = heapq.heappop(self._marks)[1]
                del self._begun_at[key]
                finished.append(Finish(key, at_s))
        self._pass(now_s)
        return finished

    def tokens_of(self, key: int) -> int:
        """How many tokens a running sequence has."""
        return int(self._progress - self._begun_at[key])

    def _pass(self, until_s: float) -> None:
        if until_s <= self._now_s:
            return
        decoding_s = until_s - min(max(self._now_s, self._stalled_until_s), until_s)
        if self._marks:
            self._progress += decoding_s / self._cost.step_s(self.running)
        self.row_s += self.running * (until_s - self._now_s)
        self._now_s = until_s
