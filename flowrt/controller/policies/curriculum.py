"""Curriculum policy: is a prompt sampled in this epoch, given the rewards of its earlier groups?

The controller asks when it opens the prompt's offer. A skipped prompt is dropped in the ledger with a reason, so it is
in exactly one state, and the source keeps its order. Only groups that were trained or filtered in steps before the one
in training count: the answer does not depend on timing within a step, and a resumed run gives the same answers.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrt.errors import ConfigError

MIN_FLOOR = 0.01
"""Least value of ``floor``: on average, a source offers at most 100 prompts for each prompt that is sampled."""


class Curriculum(Protocol):
    """Decides which prompts are sampled in an epoch."""

    @property
    def history(self) -> int:
        """Number of earlier groups of a prompt whose rewards `skips` reads."""
        ...

    def skips(self, prompt: int, epoch: int, rewards: Sequence[float]) -> bool:
        """Whether the prompt is left out of this epoch.

        Args:
            prompt: number of the prompt.
            epoch: the epoch in which it is offered.
            rewards: mean rewards of its last groups, oldest first, at most ``history``; empty if it was never trained.
        """
        ...


@dataclass(frozen=True, slots=True)
class EveryPrompt:
    """Every prompt once in each epoch."""

    @property
    def history(self) -> int:
        return 0

    def skips(self, prompt: int, epoch: int, rewards: Sequence[float]) -> bool:  # noqa: ARG002 (part of the protocol)
        return False


@dataclass(frozen=True, slots=True)
class SolveRate:
    """Sample a prompt with probability floor + (1 - floor) * u / u(1/2), and a prompt without rewards always.

    u(r) = 1 - r^n - (1 - r)^n is the probability that the next group of n samples has both solved and failed ones: a
    group of equal rewards has no learning signal. For n = 2, u / u(1/2) is 4r(1 - r), the variance of a reward of 0 or
    1 relative to its maximum; for larger groups, a prompt of solve rate 0.9 is nearly as good as one of 0.5. The
    probability is compared with a hash of seed, epoch and prompt.

    u is the mean of u(r) over the posterior of the solve rate r, under a Beta(prior, prior) prior: a prompt counts as
    impossible only after many samples of which none is solved (at solve rate 0.1, 43 groups of 8 in 100 have no solved
    sample).

    Raises ConfigError for a value out of range.
    """

    history: int
    floor: float
    failed_reward: float = 0.0
    """Mean reward of solve rate 0; lower ones count as 0 too."""
    solved_reward: float = 1.0
    """Mean reward of solve rate 1; higher ones count as 1 too."""
    seed: int = 0
    prior: float = 0.0
    """Solved and failed samples that are added to those measured; 0: the measured rate, 1: a uniform prior, 0.5:
    Jeffreys' prior, under which most prompts are solved nearly always or nearly never."""
    group_size: int = 2
    """Number of samples that a group's mean reward is taken over (n)."""

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ConfigError(f"a solve rate over the last {self.history} groups is undefined; use 1 or more")
        if not MIN_FLOOR <= self.floor <= 1:
            raise ConfigError(f"the least probability of a prompt is {self.floor}; use {MIN_FLOOR} to 1")
        if self.prior < 0 or self.group_size < 2:
            raise ConfigError(f"a prior of {self.prior} samples for groups of {self.group_size}; use 0, and 2, or more")
        if not self.failed_reward < self.solved_reward:
            raise ConfigError(
                f"failed_reward is {self.failed_reward}, not below solved_reward ({self.solved_reward}); change one"
            )

    def skips(self, prompt: int, epoch: int, rewards: Sequence[float]) -> bool:
        if not rewards:
            return False
        return _draw(self.seed, epoch, prompt) >= self.probability(rewards)

    def probability(self, rewards: Sequence[float]) -> float:
        """The probability with which a prompt of these mean rewards (at least one) is sampled."""
        mean = sum(rewards) / len(rewards)
        rate = min(max((mean - self.failed_reward) / (self.solved_reward - self.failed_reward), 0.0), 1.0)
        samples = len(rewards) * self.group_size
        solved, failed = rate * samples + self.prior, (1 - rate) * samples + self.prior
        equal = self._all(solved, failed) + self._all(failed, solved)
        return self.floor + (1 - self.floor) * (1 - equal) / (1 - 0.5 ** (self.group_size - 1))

    def _all(self, alpha: float, beta: float) -> float:
        """The probability that all samples of the next group are solved, if the solve rate is Beta(alpha, beta).

        Without a prior the solve rate is alpha / (alpha + beta).
        """
        if not self.prior:  # the measured rate itself
            return (alpha / (alpha + beta)) ** self.group_size
        of_all = math.lgamma(alpha + self.group_size) - math.lgamma(alpha)
        return math.exp(of_all + math.lgamma(alpha + beta) - math.lgamma(alpha + beta + self.group_size))


def _draw(seed: int, epoch: int, prompt: int) -> float:
    """A pseudorandom number from 0 to below 1, the same on every machine."""
    digest = hashlib.blake2b(f"curriculum {seed} {epoch} {prompt}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53
