"""Guards: rules on the metrics of a run, each with an action for when a metric stays outside its limit.

A rule fires in every step that ends a sequence of ``steps`` violations. What follows is for
`flowrt.controller.transitions.guarding`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowrt.errors import ConfigError

GuardAction = Literal["warn", "hold", "stop"]
"""warn: a line in the log; hold: a staleness bound of 0 for some steps; stop: a checkpoint, then the end of the run."""


@dataclass(frozen=True, slots=True)
class GuardRule:
    """A limit of one metric. Raises ConfigError unless exactly one of ``above`` and ``below`` is given.

    Args:
        metric: a field of metrics.jsonl.
        above, below: the metric violates the rule above (below) this; a value that is not finite always does.
        steps: consecutive steps with a violation before the rule fires.
        action: what happens then.
        hold_steps: steps with a staleness bound of 0, counted from the last firing; of action "hold".
    """

    metric: str
    above: float | None = None
    below: float | None = None
    steps: int = 1
    action: GuardAction = "warn"
    hold_steps: int = 1

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ConfigError(f"guard on {self.metric} needs exactly one of above and below")
        if self.steps < 1 or self.hold_steps < 1:
            raise ConfigError(f"guard on {self.metric} has steps {self.steps} and hold_steps {self.hold_steps}; use 1")

    def __str__(self) -> str:
        limit = f"below {self.below:g}" if self.above is None else f"above {self.above:g}"
        return f"{self.metric} {limit} for {self.steps} step{'s' if self.steps > 1 else ''} ({self.action})"

    def is_violated(self, value: float) -> bool:
        """Whether a value violates the rule."""
        if not math.isfinite(value):
            return True
        return value > self.above if self.above is not None else self.below is not None and value < self.below


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule that fires.

    Attributes:
        index: of the rule.
        rule: the rule.
        value: of its metric, in the step that fires it.
        violations: consecutive steps with a violation up to this one.
    """

    index: int
    rule: GuardRule
    value: float
    violations: int

    def __str__(self) -> str:
        times = "1 step" if self.violations == 1 else f"{self.violations} consecutive steps"
        return f"guard {self.rule}: {self.rule.metric} is {self.value:.6g}, outside its limit for {times}"


def count_violations(
    rules: Sequence[GuardRule], violations: Sequence[int], metrics: Mapping[str, float]
) -> tuple[list[int], list[Firing]]:
    """The rules that fire in a step.

    Args:
        rules: all rules.
        violations: of each rule, consecutive violations up to the step before.
        metrics: of the step; a rule whose metric the step does not have is not violated.

    Returns:
        The violations up to this step, and the firings in the order of the rules.
    """
    counts: list[int] = []
    firings: list[Firing] = []
    for index, (rule, before) in enumerate(zip(rules, violations, strict=True)):
        value = metrics.get(rule.metric)
        count = before + 1 if value is not None and rule.is_violated(value) else 0
        counts.append(count)
        if value is not None and count >= rule.steps:
            firings.append(Firing(index, rule, value, count))
    return counts, firings
