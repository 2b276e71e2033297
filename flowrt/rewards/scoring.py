"""One reward from several functions: weights, failed calls, and the numbers that a run reports of them.

The reward of a sample is the weighted sum of its functions' values. A function that returns None does not apply to the
row; the weights of the others are then scaled up so that their sum stays the same. A sample to which none of a weight
above 0 applies is not trained (`UNSCORED`). A failed call counts as 0.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.ids import UNSCORED
from flowrt.rewards.call_forms import CallForm, Rate, RewardSample
from flowrt.rewards.children import FIX
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import FAILURES, Result, RewardOutcome
from flowrt.rewards.pool import RewardPool
from flowrt.rewards.remote import RemoteRewards
from flowrt.rewards.reward_names import RewardFunction, TaskReward, parse_functions
from flowrt.rewards.rows import decode_row
from flowrt.rewards.user_file import as_text
from flowrt.runtime.waits import BoundedElsewhere, wait_all

log = logging.getLogger(__name__)
REWARD = "reward"
"""Column of the reward; ``reward/NAME`` is the column of a function, ``reward/NAME/PART`` that of a part."""
APPLIES = "applies"
"""``applies/NAME`` is a column: 1 where the function applies, else 0; only with several functions."""
FAILED = "reward_failures"
"""``reward_failures/RESULT`` is a column: 1 where a call ended with this result, else 0; see also `UNSCORED`."""
CALLS = BoundedElsewhere("the deadlines of reward functions")
WHOLE_TURN = ("format", "length")
"""Kinds of functions that score the whole turn, whatever ``reward.after`` is."""
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
    """`Result.NOT_APPLICABLE` if no function of a weight above 0 applies, else the result of the first failed call."""
    seconds: float = 0.0
    """Sum of the durations of the calls, in seconds."""


def reward_columns(options: RewardOptions) -> tuple[str, ...]:
    """Names of the columns that scoring makes in addition to the reward; empty without functions."""
    functions = parse_functions(options.functions)
    if not functions:
        return ()
    parts = [part for part in options.parts if not part.endswith("/")]
    names = [f"{REWARD}/{name}" for name in (*(function.name for function in functions), *parts)]
    names += [f"{APPLIES}/{function.name}" for function in functions] if len(functions) > 1 else []
    can_fail = {Result.NOT_APPLICABLE}
    if any(function.is_remote for function in functions):
        can_fail |= {Result.HTTP, Result.INVALID, Result.TIMEOUT}
    if not all(function.is_remote for function in functions):
        can_fail |= {*FAILURES} - {Result.HTTP}
    return (*names, *(f"{FAILED}/{result}" for result in Result if result in can_fail))


def is_scored(functions: Sequence[RewardFunction], outcomes: Sequence[RewardOutcome]) -> bool:
    """Whether a function of a weight above 0 applies: those of weight 0 are only logged."""
    return any(
        function.weight and outcome.result is not Result.NOT_APPLICABLE
        for function, outcome in zip(functions, outcomes, strict=True)
    )


def combined(functions: Sequence[RewardFunction], outcomes: Sequence[RewardOutcome]) -> float:
    """The weighted sum of the values of the functions that apply; 0 if it is not `is_scored`.

    Their weights are scaled up so that they sum to those of all functions.
    """
    pairs = list(zip(functions, outcomes, strict=True))
    applying = [(function, outcome) for function, outcome in pairs if outcome.result is not Result.NOT_APPLICABLE]
    weight = sum(function.weight for function, _ in applying)
    if len(applying) == len(pairs):
        return sum(function.weight * outcome.value for function, outcome in pairs)
    if not weight:
        return 0.0
    return sum(function.weight for function in functions) * sum(
        function.weight / weight * outcome.value for function, outcome in applying
    )


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
        model: str = "",
    ) -> None:
        """Parse the functions; no process is started yet. Raises ConfigError if they are malformed or a key is missing.

        Args:
            options: the functions and how they are called.
            is_deterministic: whether a timeout, which depends on the clock, ends the run.
            cache: file of answers to requests; None: they are kept in memory only.
            output: file descriptor for the output of the functions; None: that of this process.
            task: the reward of a task, for a function of kind "task".
            model: directory of the run's model, for functions that take its tokenizer.
        """
        self.functions = parse_functions(options.functions)
        self._options = options
        self._is_deterministic = is_deterministic
        self._columns = reward_columns(options)
        local = [function for function in self.functions if not function.is_remote]
        self._numbers = {function.name: index for index, function in enumerate(local)}
        rate = Rate(options.rate_per_s)
        self._pool = RewardPool(local, options, output, task, model, rate) if local else None
        remote = [function for function in self.functions if function.is_remote]
        self._remote = RemoteRewards(remote, options, cache, rate) if remote else None
        self._window: deque[str] = deque(maxlen=WINDOW)
        """For each of the last calls, how it failed; empty if it did not fail."""
        self._unscored = 0
        """Number of samples, since the last other one, that no function scored."""
        self._unknown_parts: set[str] = set()
        self._weighted = "" if all(function.weight for function in self.functions) else " of a weight above 0"

    async def load(self, progress: Callable[[str], None] = log.info) -> None:
        """Load the functions in a child process, unless they are; ``progress`` receives notes on long waits.

        Raises ConfigError if one cannot be loaded.
        """
        if self._pool is not None and not self._pool.is_loaded:
            await self._pool.load(progress)

    def form(self, function: RewardFunction) -> CallForm:
        """How a function is called. `load` has been called."""
        number = self._numbers.get(function.name)
        return CallForm(is_async=True) if self._pool is None or number is None else self._pool.form(number)

    @property
    def of_groups(self) -> list[str]:
        """Names of the functions that take whole groups. `load` has been called."""
        return [function.name for function in self.functions if self.form(function).form == "group"]

    @property
    def facts(self) -> frozenset[str]:
        """Names of the facts of samples that the functions take. `load` has been called."""
        return frozenset(name for function in self.functions for name in self.form(function).facts)

    async def outcomes(self, response: str, row: bytes) -> list[RewardOutcome]:
        """The outcomes of all functions for a response, in the order of ``functions``; see `outcomes_of`.

        ``row``: the row's columns, with the answer, as `flowrt.rewards.rows` writes them.
        """
        return (await self.outcomes_of([RewardSample(response, row)]))[0]

    async def outcomes_of(self, samples: Sequence[RewardSample]) -> list[list[RewardOutcome]]:
        """For each sample the outcomes of all functions, in the order of ``functions``.

        The samples are those of a group if a function takes whole groups. Raises FlowError if the pool has failed or is
        closed, ConfigError if the functions cannot be loaded.
        """
        await self.load()
        of_functions = [self._calls(function, samples) for function in self.functions]
        calls = [call for calls in of_functions for call in calls]
        try:
            await wait_all(calls, CALLS, "rewards", "reward functions")
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise
        if error := next(filter(None, [call.exception() for call in calls]), None):
            raise error
        by_function = [[outcome for call in calls for outcome in call.result()] for calls in of_functions]
        return [list(of_sample) for of_sample in zip(*by_function, strict=True)]

    def _calls(
        self, function: RewardFunction, samples: Sequence[RewardSample]
    ) -> list["asyncio.Future[list[RewardOutcome]]"]:
        """Begin to score samples with a function."""
        number = self._numbers.get(function.name)
        if self._pool is not None and number is not None:
            samples = [self._seen(function, sample) for sample in samples]
            groups = [samples] if self._pool.form(number).form == "group" else [[sample] for sample in samples]
            return [self._pool.call(number, group) for group in groups]
        return [asyncio.ensure_future(self._asked(function, sample)) for sample in samples]

    async def _asked(self, function: RewardFunction, sample: RewardSample) -> list[RewardOutcome]:
        assert self._remote is not None
        return [await self._remote.call(function, self._seen(function, sample).response, sample.row)]

    def _seen(self, function: RewardFunction, sample: RewardSample) -> RewardSample:
        """The sample with that part of its turn as the response which the function scores."""
        if not self._options.after or function.kind in WHOLE_TURN:
            return sample
        _, separator, rest = sample.response.rpartition(self._options.after)
        is_whole = not separator and self._options.without_after == "whole"
        return sample if is_whole else replace(sample, response=rest if separator else "")

    async def score(self, response: str, row: bytes) -> SampleReward:
        """The reward of a response; ``row`` as for `outcomes`, errors as for `score_all`."""
        return (await self.score_all([RewardSample(response, row)]))[0]

    async def score_all(self, samples: Sequence[RewardSample]) -> list[SampleReward]:
        """The rewards of samples: of a group, if a function takes whole groups.

        Raises ConfigError if a failure, or the share of failures, ends the run.
        """
        all_outcomes = await self.outcomes_of(samples)
        return [self._scored(sample, outcomes) for sample, outcomes in zip(samples, all_outcomes, strict=True)]

    def _scored(self, sample: RewardSample, outcomes: Sequence[RewardOutcome]) -> SampleReward:
        response, row = sample.response, sample.row
        self._note(outcomes, response, row)
        failures = self.failures(outcomes, response, row, self.functions)
        self._count(outcomes, failures)
        failure = failures[0] if failures else ""
        if failure and (self._options.on_failure == "stop" or self._stops(outcomes)):
            raise ConfigError(f"{failure}; {FIX}")
        reason = next((str(outcome.result) for outcome in outcomes if outcome.is_failure), "")
        if not is_scored(self.functions, outcomes):
            reason = str(Result.NOT_APPLICABLE)
        seconds = sum(outcome.seconds for outcome in outcomes)
        return SampleReward(combined(self.functions, outcomes), self._numbers_of(outcomes), failure, reason, seconds)

    async def close(self) -> None:
        """End the child processes and close the connections."""
        if self._pool is not None:
            await self._pool.close()
        if self._remote is not None:
            await self._remote.close()

    def _stops(self, outcomes: Sequence[RewardOutcome]) -> bool:
        return self._is_deterministic and any(outcome.result is Result.TIMEOUT for outcome in outcomes)

    def failures(
        self, outcomes: Sequence[RewardOutcome], response: str, row: bytes, functions: Sequence[RewardFunction]
    ) -> list[str]:
        """A sentence for each of these functions that failed."""
        return [
            f"{function.at(outcome.line)}: {outcome.detail}, {on(response, row)}"
            for function, outcome in zip(functions, outcomes, strict=True)
            if outcome.is_failure
        ]

    def _note(self, outcomes: Sequence[RewardOutcome], response: str, row: bytes) -> None:
        """Log samples to which no function applies, and parts without a metric.

        Raises ConfigError if no function applies to any of many samples: nothing would be trained.
        """
        for function, outcome in zip(self.functions, outcomes, strict=True):
            for part in outcome.parts:
                name = f"{function.name}/{part}"
                if name not in self._options.parts and name not in self._unknown_parts:
                    self._unknown_parts.add(name)
                    log.warning(
                        "%s: it gave %r, which it did not give for the first rows before the run: it has no metric",
                        *(function.described, part),
                    )
        if is_scored(self.functions, outcomes):
            self._unscored = 0
            return
        self._unscored += 1
        if self._unscored >= WINDOW and self._options.max_failures < 1:
            raise ConfigError(
                f"no reward function{self._weighted} applies to any of the last {WINDOW} samples, the last "
                f"{on(response, row)}; {FIX}"
            )
        if UNSCORED not in self._unknown_parts:
            self._unknown_parts.add(UNSCORED)
            log.warning(
                "no reward function%s applies, %s: such samples are not trained, and counted as %s",
                *(self._weighted, on(response, row), UNSCORED),
            )

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
        if not is_scored(self.functions, outcomes):
            numbers[UNSCORED] = 1.0
        return numbers


def on(response: str, row: bytes) -> str:
    """The response and the reference answer of a call, shortened, as the end of a sentence."""
    answer = as_text(decode_row(row).get("answer"))
    return f"on the response {_cut(response)} to the answer {_cut(answer)}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")
