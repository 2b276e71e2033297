"""The state of the guards of a run between steps.

A restarted controller and a resumed run begin without earlier values for medians. A restarted controller restores
counts and a hold; a resumed run begins with counts of 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowrt.controller.events import PreemptRun
from flowrt.controller.policies.guards import GuardRule

MAX_LOGGED = 8
"""Maximum number of logged firings that are kept, and of firings in a status."""


@dataclass(slots=True)
class Guards:
    """Counts of each rule, in the order of the rules, and the end of a hold."""

    violations: list[int]
    """Consecutive steps with a violation."""
    logged: list[int | None]
    """Step in which a firing was last logged; None: never."""
    recent: dict[str, list[float]] = field(default_factory=dict)
    """The last finite values of the metrics that a rule compares with their median, oldest first."""
    firing: list[str] = field(default_factory=list)
    """The firings in the step that was closed last."""
    log: list[tuple[int, str]] = field(default_factory=list)
    """The newest firings that were logged: (step, text)."""
    held_until: int = 0
    """Steps before this one have a staleness bound of 0."""
    order: PreemptRun | None = None
    """The order of a guard to end the run; None if there is none, or once it is taken."""

    def note_values(self, rules: Iterable[GuardRule], metrics: Mapping[str, float]) -> None:
        """Add the finite metrics of a step to the values whose medians limits are relative to."""
        windows: dict[str, int] = {}
        for rule in rules:
            if rule.median_of:
                windows[rule.metric] = max(rule.median_of, windows.get(rule.metric, 0))
        for metric, window in windows.items():
            value = metrics.get(metric)
            if value is not None and math.isfinite(value):
                self.recent[metric] = [*self.recent.get(metric, []), value][-window:]

    def note_logged(self, index: int, step: int, text: str) -> None:
        """Record that the firing of the rule with this index in ``step`` was logged."""
        self.logged[index] = step
        self.log = [*self.log, (step, text)][-MAX_LOGGED:]

    def hold(self, until: int) -> bool:
        """Set the staleness bound to 0 for steps before ``until``; returns whether that prolongs the hold."""
        is_later = until > self.held_until
        self.held_until = max(self.held_until, until)
        return is_later

    def take_order(self) -> PreemptRun | None:
        """Remove and return the order to end the run; None if there is none."""
        order, self.order = self.order, None
        return order
