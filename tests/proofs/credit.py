"""Scalar formulas of every credit rule, with sums in exact rational arithmetic, and drawn groups.

A formula maps the samples of a step and the index of one of them to its advantage. Sources are in
`flowrt.algorithms.advantages`.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from flowrt.algorithms.advantages import BestOfGroup, CreditRule, GroupAdvantages, OverlongPenalty, PreferencePair
from flowrt.algorithms.algorithm import Groups

EPS = 1e-6


@dataclass(frozen=True)
class DrawnStep:
    """The samples of a step: rewards, groups, lengths in tokens, truncation and summed log ratios (nats) of each."""

    rewards: list[float]
    group: list[int]
    lengths: list[int]
    truncated: list[bool]
    kl: list[float]

    def members(self, at: int) -> list[int]:
        """The indices of the samples in the group of sample ``at``."""
        return [other for other, group in enumerate(self.group) if group == self.group[at]]

    def groups(self) -> Groups:
        """The samples as tensors, with rewards in float64."""
        return Groups(
            rewards_N=torch.tensor(self.rewards, dtype=torch.float64),
            group_N=torch.tensor(self.group),
            lengths_N=torch.tensor(self.lengths),
            truncated_N=torch.tensor(self.truncated),
            staleness_N=torch.zeros(len(self.group), dtype=torch.int64),
            kl_N=torch.tensor(self.kl, dtype=torch.float64),
        )


def draw_groups(rng: random.Random, least: int = 2) -> DrawnStep:
    """1 to 4 interleaved groups of ``least`` to 5 samples; rewards are 0 or 1, all 0.1, in [-10, 10], or in [1, 2]."""
    group = [number for number in range(rng.randint(1, 4)) for _ in range(rng.randint(least, 5))]
    rng.shuffle(group)
    kind = rng.choice(("binary", "equal", "spread", "offset"))
    make: dict[str, Callable[[], float]] = {
        "binary": lambda: float(rng.randint(0, 1)),
        "equal": lambda: 0.1,
        "spread": lambda: rng.uniform(-10, 10),
        "offset": lambda: rng.uniform(1, 2),
    }
    return DrawnStep(
        rewards=[make[kind]() for _ in group],
        group=group,
        lengths=[rng.randint(1, 9) for _ in group],
        truncated=[rng.random() < 0.2 for _ in group],
        kl=[rng.gauss(0, 1) for _ in group],
    )


def average(values: list[float]) -> Fraction:
    """The exact mean."""
    return sum((Fraction(value) for value in values), Fraction()) / len(values)


def deviation(values: list[float]) -> float:
    """The sample standard deviation, with divisor n - 1."""
    return float(statistics.stdev([Fraction(value) for value in values]))


Formula = Callable[[DrawnStep, int], float]


def _group_rewards(drawn: DrawnStep, at: int) -> list[float]:
    return [drawn.rewards[other] for other in drawn.members(at)]


def centred(drawn: DrawnStep, at: int) -> float:
    """Reward minus the mean of the group."""
    return float(Fraction(drawn.rewards[at]) - average(_group_rewards(drawn, at)))


def leave_one_out(drawn: DrawnStep, at: int) -> float:
    """Reward minus the mean of the other samples of the group (RLOO, arXiv 2402.14740)."""
    others = [drawn.rewards[other] for other in drawn.members(at) if other != at]
    return float(Fraction(drawn.rewards[at]) - average(others))


def length_weighted(drawn: DrawnStep, at: int) -> float:
    """Reward minus sum(l r) / sum(l) over the group (OPO, arXiv 2505.23585)."""
    members = drawn.members(at)
    total = sum((drawn.lengths[other] * Fraction(drawn.rewards[other]) for other in members), Fraction())
    return float(Fraction(drawn.rewards[at]) - total / sum(drawn.lengths[other] for other in members))


def over_group_mean(drawn: DrawnStep, at: int) -> float:
    """Centred reward over the mean of the group, 0 for a mean up to EPS or below 0 (MaxRL, arXiv 2602.02710)."""
    mean = float(average(_group_rewards(drawn, at)))
    return centred(drawn, at) / mean if mean > EPS else 0.0


def whitened(values: list[float], at: int) -> float:
    """Value minus the mean of all values, over their standard deviation plus EPS."""
    return float(Fraction(values[at]) - average(values)) / (deviation(values) + EPS)


def penalised(drawn: DrawnStep, at: int, limit: int, cache: int) -> float:
    """Reward with the overlong penalty (DAPO, arXiv 2503.14476, equation 13); limit and cache in tokens."""
    over = drawn.lengths[at] - (limit - cache)
    return drawn.rewards[at] - (0.0 if over <= 0 else 1.0 if over >= cache else over / cache)


def values_of_all(drawn: DrawnStep, formula: Formula) -> list[float]:
    """The formula's value of every sample."""
    return [formula(drawn, at) for at in range(len(drawn.group))]


ADVANTAGES: dict[str, tuple[GroupAdvantages, Formula]] = {
    "grpo": (GroupAdvantages(), lambda d, at: centred(d, at) / (deviation(_group_rewards(d, at)) + EPS)),
    "dr_grpo": (GroupAdvantages(scale="none"), centred),
    "rloo": (GroupAdvantages(baseline="leave_one_out", scale="none"), leave_one_out),
    "reinforce": (GroupAdvantages(baseline="none", scale="none"), lambda d, at: d.rewards[at]),
    "lite_ppo": (GroupAdvantages(scale="batch_std"), lambda d, at: centred(d, at) / (deviation(d.rewards) + EPS)),
    "opo": (GroupAdvantages(baseline="length_weighted", scale="none"), length_weighted),
    "max_rl": (GroupAdvantages(scale="group_mean"), over_group_mean),
    "batch_mean": (
        GroupAdvantages(baseline="batch_mean", scale="none"),
        lambda d, at: float(Fraction(d.rewards[at]) - average(d.rewards)),
    ),
    "reinforce_plus_plus": (
        GroupAdvantages(baseline="none", scale="none", whiten=True),
        lambda d, at: whitened(d.rewards, at),
    ),
    "reinforce_plus_plus_baseline": (
        GroupAdvantages(scale="none", whiten=True),
        lambda d, at: whitened(values_of_all(d, centred), at),
    ),
    "kl_in_reward": (
        GroupAdvantages(baseline="none", scale="none", kl_coef=0.1),
        lambda d, at: float(Fraction(d.rewards[at]) - Fraction(0.1) * Fraction(d.kl[at])),
    ),
    "overlong": (
        GroupAdvantages(baseline="none", scale="none", overlong=OverlongPenalty(limit=8, cache=3)),
        lambda d, at: penalised(d, at, 8, 3),
    ),
    "mask_truncated": (GroupAdvantages(scale="none", mask_truncated=True), centred),
}


def best_of(drawn: DrawnStep, at: int, keep: int, above: float) -> float:
    """1 for the ``keep`` best samples of a group with rewards over ``above``, else 0; the earlier of equal rewards."""
    own_reward = drawn.rewards[at]
    better = [
        other
        for other in drawn.members(at)
        if drawn.rewards[other] > own_reward or (drawn.rewards[other] == own_reward and other < at)
    ]
    return float(len(better) < keep and own_reward > above)


def pair(drawn: DrawnStep, at: int) -> float:
    """1 for the best and -1 for the worst sample of a group, else 0; the earlier of equal rewards."""
    members = drawn.members(at)
    best = max(members, key=lambda other: (drawn.rewards[other], -other))
    worst = min(members, key=lambda other: (drawn.rewards[other], other))
    return 0.0 if drawn.rewards[best] == drawn.rewards[worst] else float(at == best) - float(at == worst)


SELECTIONS: dict[str, tuple[CreditRule, Formula]] = {
    "best": (BestOfGroup(), lambda d, at: best_of(d, at, 1, -math.inf)),
    "best_two_above": (BestOfGroup(keep=2, above=0.5), lambda d, at: best_of(d, at, 2, 0.5)),
    "pair": (PreferencePair(), pair),
}


def credit_error(name: str, drawn: DrawnStep) -> float:
    """Distance of a rule's advantages from the formula, relative to their size above 1.

    Infinity if the rule trains other samples than expected: those of `SELECTIONS`, the samples whose formula is not 0.
    """
    rule: CreditRule
    rule, formula = SELECTIONS[name] if name in SELECTIONS else ADVANTAGES[name]
    credit = rule(drawn.groups())
    wanted = values_of_all(drawn, formula)
    if name in SELECTIONS:
        trained = [value != 0 for value in wanted]
    else:
        trained = [not (name == "mask_truncated" and cut) for cut in drawn.truncated]
    if credit.trained_N.tolist() != trained:
        return math.inf
    size = max([1.0, *map(abs, wanted)])
    advantages: list[float] = credit.advantages_N.tolist()
    return max(abs(a - b) / size for a, b in zip(advantages, wanted, strict=True))
