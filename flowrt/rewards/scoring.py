"""One reward from several functions: weights, failed calls, and the numbers that a run reports of them.

The reward of a sample is the weighted sum of its functions' values. A function that returns None does not apply to the
row; the weights of the others are then scaled up so that their sum stays the same. A failed call counts as 0.
"""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.rewards.functions import RewardFunction, TaskReward, parse_functions
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import FAILURES, Result, RewardOutcome
from flowrt.rewards.pool import FIX, RewardPool
from flowrt.rewards.remote import RemoteRewards
from flowrt.rewards.user_file import as_text
from flowrt.runtime.waits import BoundedElsewhere, wait_all

REWARD = "reward"
"""Column of the reward; ``reward/NAME`` is the column of a function, ``reward/NAME/PART`` that of a part."""
APPLIES = "applies"
"""``applies/NAME`` is a column: 1 where the function applies, else 0; only with several functions."""
FAILED = "reward_failures"
"""``reward_failures/RESULT`` is a column: 1 where a call ended with this result, else 0."""
CALLS = BoundedElsewhere("the deadlines of reward functions")
WINDOW = 200
"""Number of calls over which the share of failures is measured."""
MAX_TEXT = 60
"""Maximum number of characters of a response or an answer in an error message."""


@dataclass(frozen=True, slots=True)
class SampleReward:
    """The reward of a sample."""

    reward: float
    numbers: Mapping[str, float]
    """Values of the columns of `reward_columns`, by name."""
    failure: str
    """Which function failed first, and how; empty if none failed."""
    reason: str
    """The result of a failed call; empty if none failed."""
    seconds: float = 0.0
    """Sum of the durations of the calls, in seconds."""


def reward_columns(options: RewardOptions) -> tuple[str, ...]:
    """Names of the columns that scoring makes in addition to the reward; empty without functions."""
    functions = parse_functions(options.functions)
    if not functions:
        return ()
    names = [f"{REWARD}/{one}" for one in (*(function.name for function in functions), *options.parts)]
    names += [f"{APPLIES}/{one.name}" for one in functions] if len(functions) > 1 else []
    can_fail = {Result.NOT_APPLICABLE}
    if any(one.is_remote for one in functions):
        can_fail |= {Result.HTTP, Result.INVALID, Result.TIMEOUT}
    if not all(one.is_remote for one in functions):
        can_fail |= {*FAILURES} - {Result.HTTP}
    return (*names, *(f"{FAILED}/{one}" for one in Result if one in can_fail))


def combined(functions: Sequence[RewardFunction], outcomes: Sequence[RewardOutcome]) -> float:
    """The weighted sum of the values of the functions that apply; 0 if none applies.

    Their weights are scaled up so that they sum to those of all functions.
    """
    pairs = list(zip(functions, outcomes, strict=True))
    applying = [(one, outcome) for one, outcome in pairs if outcome.result is not Result.NOT_APPLICABLE]
    weight = sum(one.weight for one, _ in applying)
    if len(applying) == len(pairs):
        return sum(one.weight * outcome.value for one, outcome in pairs)
    if not weight:
        return 0.0
    return sum(one.weight for one in functions) * sum(one.weight / weight * outcome.value for one, outcome in applying)


class RewardScorer:
    """Scores responses with the reward functions of a run, on an event loop."""

    def __init__(
        self,
        options: RewardOptions,
        *,
        is_deterministic: bool = False,
        cache: Path | None = None,
        output: int | None = None,
        task: TaskReward | None = None,
    ) -> None:
        """Parse the functions; no process is started yet. Raises ConfigError if they are malformed or a key is missing.

        Args:
            options: the functions and how they are called.
            is_deterministic: whether a timeout, which depends on the clock, ends the run.
            cache: file of answers to requests; None: they are kept in memory only.
            output: file descriptor for the output of the functions; None: that of this process.
            task: the reward of a task, for a function of kind "task".
        """
        self.functions = parse_functions(options.functions)
        self._options = options
        self._is_deterministic = is_deterministic
        self._columns = reward_columns(options)
        local = [one for one in self.functions if not one.is_remote]
        self._numbers = {one.name: index for index, one in enumerate(local)}
        self._pool = RewardPool(local, options, output, task) if local else None
        remote = [one for one in self.functions if one.is_remote]
        self._remote = RemoteRewards(remote, options, cache) if remote else None
        self._window: deque[str] = deque(maxlen=WINDOW)
        """For each of the last calls, how it failed; empty if it did not fail."""

    @property
    def pool(self) -> RewardPool | None:
        """The child processes; None if no function needs them."""
        return self._pool

    async def outcomes(self, response: str, row: bytes) -> list[RewardOutcome]:
        """The outcomes of all functions for a response, in the order of ``functions``.

        ``row`` is JSON of the row's columns, with the answer. Raises FlowError if the pool has failed or is closed.
        """
        calls: list[asyncio.Future[RewardOutcome]] = []
        for one in self.functions:
            if self._pool is not None and one.name in self._numbers:
                calls.append(self._pool.call(self._numbers[one.name], response, row))
            elif self._remote is not None:
                calls.append(asyncio.ensure_future(self._remote.call(one, response, row)))
        try:
            await wait_all(calls, CALLS, "rewards", "reward functions")
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise
        if error := next(filter(None, [call.exception() for call in calls]), None):
            raise error
        return [call.result() for call in calls]

    async def score(self, response: str, row: bytes) -> SampleReward:
        """The reward of a response; ``row`` as for `outcomes`.

        Raises ConfigError if a failure, or the share of failures, ends the run.
        """
        outcomes = await self.outcomes(response, row)
        failures = self.failures(outcomes, response, row, self.functions)
        self._count(outcomes, failures)
        failure = failures[0] if failures else ""
        if failure and (self._options.on_failure == "stop" or self._stops(outcomes)):
            raise ConfigError(f"{failure}; {FIX}")
        numbers = self._numbers_of(outcomes)
        reasons = [name.partition("/")[2] for name, one in numbers.items() if one and name.startswith(f"{FAILED}/")]
        seconds = sum(one.seconds for one in outcomes)
        return SampleReward(combined(self.functions, outcomes), numbers, failure, "".join(reasons[:1]), seconds)

    async def close(self) -> None:
        """End the child processes and close the connections."""
        if self._pool is not None:
            await self._pool.close()
        if self._remote is not None:
            await self._remote.close()

    def _stops(self, outcomes: Sequence[RewardOutcome]) -> bool:
        return self._is_deterministic and any(one.result is Result.TIMEOUT for one in outcomes)

    def failures(
        self, outcomes: Sequence[RewardOutcome], response: str, row: bytes, functions: Sequence[RewardFunction]
    ) -> list[str]:
        """A sentence for each of these functions that failed, and one if none of them applies."""
        found = []
        for function, outcome in zip(functions, outcomes, strict=True):
            wrong = self._wrong_parts(function, outcome)
            if outcome.is_failure or wrong:
                found.append(f"{function.at(outcome.line)}: {outcome.detail or wrong}, {on(response, row)}")
        if all(one.result is Result.NOT_APPLICABLE for one in outcomes):
            what = "it returned None" if len(outcomes) == 1 else "no function applies to the row"
            found.append(f"{functions[0].described}: {what}, {on(response, row)}")
        return found

    def _wrong_parts(self, function: RewardFunction, outcome: RewardOutcome) -> str:
        """How the parts of an outcome differ from those found at the start of the run; empty if they do not."""
        known = {one.partition("/")[2] for one in self._options.parts if one.partition("/")[0] == function.name}
        if outcome.result is not Result.OK or not known or known == outcome.parts.keys():
            return ""
        return f"it returned the parts {', '.join(outcome.parts) or 'none'}, not {', '.join(sorted(known))}"

    def _count(self, outcomes: Sequence[RewardOutcome], failures: Sequence[str]) -> None:
        """Count calls and failures; raises ConfigError if their share exceeds ``reward.max_failures``."""
        self._window.extend([*failures, *[""] * (len(outcomes) - len(failures))])
        failed = sum(map(bool, self._window))
        if len(self._window) == WINDOW and failed > self._options.max_failures * WINDOW:
            first = next(filter(None, self._window))
            raise ConfigError(
                f"{failed} of the last {WINDOW} calls of reward functions failed, more than reward.max_failures "
                f"({self._options.max_failures:g}); the first: {first}; {FIX}"
            )

    def _numbers_of(self, outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
        numbers = dict.fromkeys(self._columns, 0.0)
        for function, outcome in zip(self.functions, outcomes, strict=True):
            numbers[f"{REWARD}/{function.name}"] = outcome.value
            for part, value in outcome.parts.items():
                if f"{REWARD}/{function.name}/{part}" in numbers:
                    numbers[f"{REWARD}/{function.name}/{part}"] = value
            if len(outcomes) > 1:
                numbers[f"{APPLIES}/{function.name}"] = float(outcome.result is not Result.NOT_APPLICABLE)
            if outcome.is_failure:
                numbers[f"{FAILED}/{outcome.result}"] = 1.0
            elif self._wrong_parts(function, outcome):
                numbers[f"{FAILED}/{Result.INVALID}"] = 1.0
        if all(one.result is Result.NOT_APPLICABLE for one in outcomes):
            numbers[f"{FAILED}/{Result.NOT_APPLICABLE}"] = 1.0
        return numbers


def on(response: str, row: bytes) -> str:
    """The response and the reference answer of a call, shortened, as the end of a sentence."""
    answer = as_text(json.loads(row).get("answer"))
    return f"on the response {_cut(response)} to the answer {_cut(answer)}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")
