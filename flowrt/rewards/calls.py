"""Calls of reward functions that wait for a child process, and their outcomes."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrt.rewards.call_forms import CallForm, RewardSample
from flowrt.rewards.outcomes import Result, RewardOutcome

SPLIT = (Result.ERROR, Result.MEMORY, Result.TIMEOUT)
"""How a call with several samples fails as a whole, by one of them: it is made again with half of the samples."""


def new_number() -> int:
    """A number for a call in messages, of 63 bits, which a function cannot guess."""
    return secrets.randbits(63)


@dataclass(slots=True, eq=False)
class Scoring:
    """Samples that wait for their outcomes: one, or a group."""

    samples: Sequence[RewardSample]
    outcomes: "asyncio.Future[list[RewardOutcome]]"


@dataclass(slots=True, eq=False)
class RewardCall:
    """A call of one function, with the samples of one `Scoring`, or of several for a batch function."""

    function: int
    """Index of the function among those of the pool."""
    scorings: list[Scoring]
    attempts: int = 0
    """Number of times that a child died during the call."""
    is_part: bool = False
    """Whether it has a part of the samples of a call that failed: it is not joined with others again."""

    @property
    def is_done(self) -> bool:
        """Whether no outcome is waited for: all are set or cancelled."""
        return all(scoring.outcomes.done() for scoring in self.scorings)

    def message(self, number: int, facts: Sequence[str]) -> list[object]:
        """The call for a child, with those facts of the samples that the function takes."""
        samples = [sample for scoring in self.scorings for sample in scoring.samples]
        taken = [{name: sample.facts[name] for name in facts if name in sample.facts} for sample in samples]
        rows = [[sample.response, sample.row, of] for sample, of in zip(samples, taken, strict=True)]
        return [number, self.function, rows]

    def finish(self, outcomes: Sequence[RewardOutcome]) -> None:
        """Set the outcomes, one a sample, or one for all of them."""
        count = sum(len(scoring.samples) for scoring in self.scorings)
        every = outcomes if len(outcomes) == count else [outcomes[0]] * count
        place = 0
        for scoring in self.scorings:
            own, place = every[place : place + len(scoring.samples)], place + len(scoring.samples)
            if not scoring.outcomes.done():
                scoring.outcomes.set_result(list(own))

    def fail(self, error: BaseException) -> None:
        """Let those who wait for the outcomes raise ``error``."""
        for scoring in self.scorings:
            if not scoring.outcomes.done():
                scoring.outcomes.set_exception(error)

    def halves(self) -> "list[RewardCall]":
        """Two calls for the samples that one call failed for; none if there is only one `Scoring`."""
        if len(self.scorings) < 2:
            return []
        open_ = [scoring for scoring in self.scorings if not scoring.outcomes.done()]
        middle = len(open_) // 2
        return [RewardCall(self.function, part, is_part=True) for part in (open_[:middle], open_[middle:]) if part]


class CallQueue:
    """Calls that wait for a child, the next one first."""

    def __init__(self, form: Callable[[int], CallForm], batch_size: int) -> None:
        """Start empty.

        Args:
            form: called with the index of a function; how it is called.
            batch_size: maximum number of calls of a batch function that are made as one.
        """
        self._form = form
        self._batch_size = batch_size
        self._calls: deque[RewardCall] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, calls: Iterable[RewardCall]) -> None:
        """Append calls."""
        self._calls.extend(calls)

    def put_back(self, calls: Iterable[RewardCall]) -> None:
        """Insert calls before all others, in their order."""
        self._calls.extendleft(reversed([*calls]))

    def take(self) -> RewardCall | None:
        """The next call, with the samples of others of its batch function; None if none waits that is not cancelled."""
        while self._calls:
            call = self._joined(self._calls.popleft())
            if not call.is_done:
                return call
        return None

    def finish(self, call: RewardCall, rows: Sequence[Sequence[Any]], seconds: float) -> None:
        """Set the outcomes of a call, one a sample, as a child has sent them.

        A call with several samples that failed as a whole is put back in two halves.

        Args:
            call: the call, which was taken.
            rows: the fields of each `RewardOutcome`, without its duration.
            seconds: duration of the call.
        """
        each_s = seconds / max(len(rows), 1)
        outcomes = [
            RewardOutcome(result=Result(result), value=value, parts=parts, detail=detail, line=line, seconds=each_s)
            for result, value, parts, detail, line in rows
        ]
        if all(outcome.result in SPLIT for outcome in outcomes) and (halves := call.halves()):
            self.put_back(halves)
        else:
            call.finish(outcomes)

    def fail(self, error: BaseException) -> None:
        """Let those who wait for an outcome raise ``error``."""
        while self._calls:
            self._calls.popleft().fail(error)

    def _joined(self, call: RewardCall) -> RewardCall:
        """A call with the samples of others of its batch function, which are taken out of the queue."""
        if self._form(call.function).form != "batch" or call.attempts or call.is_part:
            return call
        others = [of for of in self._calls if of.function == call.function and not (of.attempts or of.is_part)]
        for other in others[: self._batch_size - 1]:
            self._calls.remove(other)
            call.scorings += other.scorings
        return call
