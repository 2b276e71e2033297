"""Group filter policy: is a complete group worth training?

A filter decides when every sample of a group has all columns that the train stage needs, before a trainer can get the
group. A refused group is dropped, and another prompt is opened in its place. `Settings.filter_tries` bounds the drops
of a step, so a filter that refuses everything cannot stop the run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrt.controller.state.slots import Group
from flowrt.errors import ConfigError
from flowrt.ids import UNSCORED

REWARD = "reward"
"""The inline column of rewards."""
DECISION = "filter_decision"
"""The inline column of the decision of the user's filter function, the same number for all samples of a group."""
KEPT, REFUSED, RAISED, HUNG, ENDED, WRONG = 1.0, 0.0, -1.0, -2.0, -3.0, -4.0
"""Values of the decision column."""
REFUSALS = {
    REFUSED: "the filter function",
    RAISED: "the filter function raised an exception",
    HUNG: "the filter function did not return in time",
    ENDED: "the filter function ended its process",
    WRONG: "the filter function did not return True or False",
}
"""Why a group is not trained, by its decision; a negative decision is a failure of the function."""


class GroupFilter(Protocol):
    """Is this group worth training? The answer must depend on the group alone, because a group may be checked again."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The inline columns that the filter reads; the train stage has to need them too."""
        ...

    def refusal(self, group: Group) -> str:
        """Why the group is not trained, in a few constant words for the ledger; empty to train it."""
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Every group is trained."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def refusal(self, group: Group) -> str:  # noqa: ARG002 (part of the protocol)
        return ""


@dataclass(frozen=True, slots=True)
class ZeroVariance:
    """Refuse groups of equal rewards: their advantages are 0 (dynamic sampling of DAPO, arXiv 2503.14476).

    A group to which no reward function applies is refused, too.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return (REWARD,)

    def refusal(self, group: Group) -> str:
        if all(slot.inline.get(UNSCORED) for slot in group.slots):
            return "no reward function applies"
        return "equal rewards" if has_equal_rewards(group) else ""


@dataclass(frozen=True, slots=True)
class RewardBand:
    """Refuse groups whose mean reward is below ``low`` or above ``high``. Raises ConfigError if low exceeds high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"no mean reward is between {self.low} and {self.high}; use a lower bound that is lower")

    @property
    def needs(self) -> tuple[str, ...]:
        return (REWARD,)

    def refusal(self, group: Group) -> str:
        mean = mean_reward(group)
        if mean is None or self.low <= mean <= self.high:
            return ""
        return f"mean reward below {self.low:g}" if mean < self.low else f"mean reward above {self.high:g}"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """Refuse groups that the user's filter function refuses, and groups on which it fails.

    The reward worker calls the function (`flowrt.roles.filter`); this filter only reads its decision.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return (DECISION,)

    def refusal(self, group: Group) -> str:
        for slot in group.slots:
            decision = slot.inline.get(DECISION, KEPT)
            if decision != KEPT:
                return REFUSALS.get(decision, "an unknown decision of the filter function")
        return ""


@dataclass(frozen=True, slots=True)
class AllOf:
    """Train the groups that every one of these filters keeps; the first refusal is the reason."""

    filters: tuple[GroupFilter, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(column for filter_ in self.filters for column in filter_.needs)

    def refusal(self, group: Group) -> str:
        return next((why for filter_ in self.filters if (why := filter_.refusal(group))), "")


def rewards(group: Group) -> list[float]:
    """The rewards of those samples of the group to which a reward function applies; empty if one was not scored yet."""
    if not all(REWARD in slot.inline for slot in group.slots):
        return []
    return [slot.inline[REWARD] for slot in group.slots if not slot.inline.get(UNSCORED)]


def compared(unscored: Sequence[float]) -> list[int]:
    """The places of those samples of a group that are trained: a reward function applies, to two or more of a group.

    ``unscored`` is 1 for each sample to which none applies. The only sample of a group of one needs no other.
    """
    places = [place for place, flag in enumerate(unscored) if not flag]
    return [] if len(places) == 1 < len(unscored) else places


def mean_reward(group: Group) -> float | None:
    """The mean of `rewards`; None if there are none."""
    group_rewards = rewards(group)
    return sum(group_rewards) / len(group_rewards) if group_rewards else None


def has_equal_rewards(group: Group) -> bool:
    """Whether the group has `rewards`, and these are equal."""
    group_rewards = rewards(group)
    return bool(group_rewards) and min(group_rewards) == max(group_rewards)


def zero_variance_groups(groups: Iterable[Group]) -> int:
    """Number of groups whose rewards are all equal."""
    return sum(map(has_equal_rewards, groups))
