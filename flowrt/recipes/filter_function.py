"""A user's filter function (``algorithm.filter.function``), called in a child process (`flowrt.rewards.pool`).

- An error while the file is loaded, or in a first call with rewards of 0 and 1, is reported in one sentence before a
  run starts.
- During a run, a group is filtered if the call on it raises, exceeds its deadline, ends its process or returns
  something other than True or False: `FilterFunction.decide` returns the kind of failure, and the next call gets a
  working process.
"""

import asyncio
import json
import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrt.controller.policies.group_filter import ENDED, HUNG, KEPT, RAISED, REFUSED, WRONG
from flowrt.errors import ConfigError
from flowrt.recipes.algorithm_config import FilterConfig
from flowrt.recipes.config import RunConfig
from flowrt.rewards.call_forms import RewardSample
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result
from flowrt.rewards.pool import RewardPool
from flowrt.rewards.reward_names import RewardFunction
from flowrt.rewards.user_file import FILTER, REWARDS
from flowrt.runtime.waits import BoundedElsewhere, wait_until

log = logging.getLogger(__name__)
FUNCTION = "keep"
"""Name of the function if the option is FILE.py without a name."""
DECISIONS: Mapping[Result, float] = {
    Result.ERROR: RAISED,
    Result.MEMORY: RAISED,
    Result.TIMEOUT: HUNG,
    Result.DIED: ENDED,
    Result.INVALID: WRONG,
}
"""The decision on a group, by the result of a failed call."""
CALL = BoundedElsewhere("algorithm.filter.function_timeout_s")
FIX = "correct it"
MAX_REWARDS_CHARS = 60


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Arguments that a filter function may take by name, besides the rewards."""

    prompt: int
    """The number of the prompt."""
    epoch: int
    """The pass over the prompts, from 0."""
    lengths: list[int]
    """Response tokens of each sample."""
    version: int
    """The oldest policy version that generated a token of the group: the number of steps trained before."""


class FunctionFailed(Exception):
    """A call of the filter function failed; ``decision`` is the kind of failure, a value of `DECISIONS`."""

    def __init__(self, decision: float, what: str) -> None:
        super().__init__(what)
        self.decision = decision


class FilterFunction:
    """A filter function and the child process that runs it, which `load` or the first call starts."""

    def __init__(self, options: FilterConfig, output: int | None = None) -> None:
        """Raises ConfigError if ``options.function`` does not name a Python file.

        Args:
            options: ``function``, as FILE.py (its function `keep`) or FILE.py:FUNCTION, and ``function_timeout_s``, the
                deadline for loading the file and for each call, in seconds.
            output: file descriptor for the function's output; None: that of this process.
        """
        path, _, name = options.function.partition(":")
        option = f"algorithm.filter.function is {options.function!r}"
        if not Path(path).is_file():
            raise ConfigError(f"{option}, and there is no file {path!r}; give FILE.py:FUNCTION")
        if Path(path).suffix != ".py":
            raise ConfigError(f"{option}, and {path} is not a Python file; its name must end in .py")
        self._function = RewardFunction(name or FUNCTION, FILTER, f"{path}:{name or FUNCTION}")
        limit_s = options.function_timeout_s
        self.longest_call_s = 2 * limit_s
        """Longest duration of a decision, with the start of the process, in seconds."""
        self._pool = RewardPool(
            [self._function], RewardOptions(timeout_s=limit_s, load_timeout_s=limit_s, retries=0), output
        )
        self._failures = 0

    async def load(self, progress: Callable[[str], None] = log.info) -> None:
        """Start the process and load the file; ``progress`` receives notes on long waits.

        Raises ConfigError if the file cannot be loaded.
        """
        await self._pool.load(progress)

    async def decide(self, rewards: Sequence[float], facts: GroupFacts) -> float:
        """The decision on a group: `KEPT`, `REFUSED`, or the kind of failure of the call, which is logged.

        Args:
            rewards: of the samples of the group.
            facts: the other arguments that the function may take.

        Raises ConfigError if the process has to be started again and the file can no longer be loaded.
        """
        try:
            return KEPT if await self.call(rewards, facts) else REFUSED
        except FunctionFailed as failed:
            self._failures += 1
            if not self._failures & (self._failures - 1):  # failures 1, 2, 4, 8, ...
                log.warning("%s; the group is filtered (failure %d of the function)", failed, self._failures)
            return failed.decision

    async def call(self, rewards: Sequence[float], facts: GroupFacts) -> bool:
        """Whether the function keeps a group. Raises FunctionFailed if the call fails, and ConfigError as `decide`."""
        row = json.dumps({REWARDS: list(rewards), **asdict(facts)}).encode()
        await self._pool.load()
        calling = self._pool.call(0, [RewardSample("", row)])
        (outcome,) = await wait_until(calling, CALL, "a decision", "the user's filter function")
        if outcome.is_failure:
            cut = str(list(rewards))
            cut = cut if len(cut) <= MAX_REWARDS_CHARS else f"{cut[:MAX_REWARDS_CHARS]}…"
            doing = f"on the rewards {cut} of prompt {facts.prompt}"
            raise FunctionFailed(
                DECISIONS[outcome.result], f"{self._function.at(outcome.line)}: {outcome.detail}, {doing}"
            )
        return outcome.value == 1.0

    async def close(self) -> None:
        """End the process and all processes that it has started."""
        await self._pool.close()


def check_filter_function(config: RunConfig, progress: Callable[[str], None]) -> None:
    """Load the filter function of a run and call it once, with rewards of 0 and 1. Its output is discarded.

    Does nothing without ``algorithm.filter.function``. Raises ConfigError, in one sentence, if the file cannot be
    loaded or the call fails.
    """
    if config.algorithm.filter.function:
        asyncio.run(_check(config, progress))


async def _check(config: RunConfig, progress: Callable[[str], None]) -> None:
    function = FilterFunction(config.algorithm.filter, subprocess.DEVNULL)
    rewards = [float(member % 2) for member in range(config.group_size)]
    try:
        await function.load(progress)
        await function.call(rewards, GroupFacts(prompt=0, epoch=0, lengths=[1] * len(rewards), version=0))
    except FunctionFailed as failed:
        raise ConfigError(f"{failed}; {FIX}") from None
    finally:
        await function.close()
