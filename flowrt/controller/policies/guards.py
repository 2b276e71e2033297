"""Guards: rules on the metrics of a run, each with an action for when a metric stays outside its limit.

A rule fires in every step that ends a sequence of at least ``steps`` violations. The actions are carried out by
`flowrt.controller.transitions.step_end`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Literal

from flowrt.errors import ConfigError

NO_VALUES: Mapping[str, Sequence[float]] = MappingProxyType({})
GuardAction = Literal["warn", "hold", "stop"]
"""warn: a line in the log; hold: a staleness bound of 0 for some steps; stop: a checkpoint, then the end of the run."""


@dataclass(frozen=True, slots=True)
class GuardRule:
    """A limit of one metric.

    Args:
        metric: a field of metrics.jsonl.
        above, below: the metric violates the rule above (below) this; a value that is not finite always does.
        steps: number of consecutive steps with a violation from which on the rule fires, at least 1.
        action: the effect of a firing.
        hold_steps: steps with a staleness bound of 0, counted from the last firing, at least 1; of action "hold".
        median_of: 0: the limit is ``above`` (``below``). Otherwise the limit is ``above`` (``below``) times the median
            of the metric's last ``median_of`` finite values before the step; while there are fewer, or their median is
            not positive, only a value that is not finite violates the rule.

    Raises ConfigError for a value out of range, or unless exactly one of ``above`` and ``below`` is given.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    steps: int = 1
    action: GuardAction = "warn"
    hold_steps: int = 1
    median_of: int = 0

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ConfigError(f"guard on {self.metric} needs exactly one of above and below")
        if self.steps < 1 or self.hold_steps < 1:
            raise ConfigError(f"guard on {self.metric} has steps {self.steps} and hold_steps {self.hold_steps}; use 1")
        if self.median_of and not self.factor > 0:
            raise ConfigError(f"guard on {self.metric} has a limit of {self.factor:g} medians; use one above 0")

    def __str__(self) -> str:
        limit = f"below {self.below:g}" if self.above is None else f"above {self.above:g}"
        if self.median_of:
            limit += f" times the median of {self.median_of} steps"
        return f"{self.metric} {limit} for {self.steps} step{'s' if self.steps > 1 else ''} ({self.action})"

    @property
    def factor(self) -> float:
        """``above`` or ``below``, whichever is given."""
        return (self.below or 0.0) if self.above is None else self.above

    def limit(self, recent: Sequence[float]) -> float | None:
        """The limit of a step, given the metric's finite values before it, oldest first; None if there is none yet."""
        if not self.median_of:
            return self.factor
        values = recent[-self.median_of :]
        if len(values) < self.median_of or (middle := median(values)) <= 0:
            return None
        return self.factor * middle

    def is_violated(self, value: float, recent: Sequence[float] = ()) -> bool:
        """Whether a value violates the rule, given the metric's finite values before it, oldest first."""
        if not math.isfinite(value):
            return True
        limit = self.limit(recent)
        if limit is None:
            return False
        return value > limit if self.above is not None else value < limit


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule that fires.

    Attributes:
        index: place of the rule in the list of all rules.
        rule: the rule.
        value: value of its metric in the step of the firing.
        violations: number of consecutive steps with a violation, up to this one.
        limit: limit in this step; None if there was no limit yet and the value is not finite.
    """

    index: int
    rule: GuardRule
    value: float
    violations: int
    limit: float | None = None

    def __str__(self) -> str:
        times = "1 step" if self.violations == 1 else f"{self.violations} consecutive steps"
        of = f" of {self.limit:.6g}" if self.rule.median_of and self.limit is not None else ""
        return f"guard {self.rule}: {self.rule.metric} is {self.value:.6g}, outside its limit{of} for {times}"


def count_violations(
    rules: Sequence[GuardRule],
    violations: Sequence[int],
    metrics: Mapping[str, float],
    recent: Mapping[str, Sequence[float]] = NO_VALUES,
) -> tuple[list[int], list[Firing]]:
    """The rules that fire in a step.

    Args:
        rules: all rules.
        violations: for each rule, the number of consecutive violations up to the previous step.
        metrics: values of the step by name; a rule whose metric is absent is not violated.
        recent: finite values of each metric in earlier steps, oldest first.

    Returns:
        For each rule, the number of consecutive violations up to this step; and the firings in the order of the rules.
    """
    counts: list[int] = []
    firings: list[Firing] = []
    for index, (rule, before) in enumerate(zip(rules, violations, strict=True)):
        value = metrics.get(rule.metric)
        values = recent.get(rule.metric, ())
        count = before + 1 if value is not None and rule.is_violated(value, values) else 0
        counts.append(count)
        if value is not None and count >= rule.steps:
            firings.append(Firing(index, rule, value, count, rule.limit(values)))
    return counts, firings
