"""What the guards of a run remember between steps.

The counts start at 0 in a restarted controller and in a resumed run; a hold outlives the controller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrt.controller.events import PreemptRun


@dataclass(slots=True)
class Guards:
    """Counts of each rule, in the order of the rules, and the end of a hold."""

    violations: list[int]
    """Consecutive steps with a violation."""
    logged: list[int | None]
    """Step in which a firing was last logged; None: never."""
    held_until: int = 0
    """Steps before this one have a staleness bound of 0."""
    order: PreemptRun | None = None
    """How the run is to end, if a guard stops it."""

    def count(self, violations: Sequence[int]) -> None:
        """Set the consecutive violations after a step."""
        self.violations = list(violations)

    def note_logged(self, index: int, step: int) -> None:
        """The firing of a rule in this step is logged."""
        self.logged[index] = step

    def hold(self, until: int) -> bool:
        """Hold the run up to this step; returns whether that is later than before."""
        is_later = until > self.held_until
        self.held_until = max(self.held_until, until)
        return is_later

    def stop(self, order: PreemptRun) -> None:
        """Let the run end; later orders are ignored."""
        self.order = self.order or order

    def take_order(self) -> PreemptRun | None:
        """The order to end the run, which is given once."""
        order, self.order = self.order, None
        return order
