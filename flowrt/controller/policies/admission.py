"""Admission policy: may a group be opened, a sample started, a sample trained?

Staleness of a sample when it is trained in step s is s minus the oldest version that generated one of its tokens
(step s trains version s). The default keeps it within a bound, always:

* *trained*: a sample is only trained while s - oldest <= bound. This check alone makes the bound strict.
* *started*: a sample is only started on version v if it would still be in bound at the step that it is expected to be
  trained in, given the groups ahead of it. At bound 0 this makes generation wait for the newest weights.
* *opened*: at most (bound + 1) x groups-per-step groups are live at once; more could not be trained in bound.

A guard with action hold lowers the bound to 0 for some steps (`OnPolicy`).
"""

from dataclasses import dataclass
from typing import Protocol

from flowrt.errors import ConfigError


class Admission(Protocol):
    """Decides whether a group may be opened, a sample started, and a sample trained.

    ``may_open`` is asked for one more group than ``live_groups`` live ones; ``may_start`` for a sample that a worker
    would generate with ``version`` and that is expected to be trained in ``expected_step``; ``may_train`` for a sample
    in ``step``, with the oldest version that generated one of its tokens.
    """

    def may_open(self, live_groups: int, groups_per_step: int) -> bool: ...

    def may_start(self, expected_step: int, version: int) -> bool: ...

    def may_train(self, step: int, oldest_version: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class StrictLag:
    """Staleness never exceeds ``bound`` versions; 0 is the synchronous loop. Raises ConfigError for less than 0."""

    bound: int

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ConfigError(f"max_staleness is {self.bound}, but a sample cannot come from the future; use 0 or more")

    def may_open(self, live_groups: int, groups_per_step: int) -> bool:
        return live_groups < (self.bound + 1) * groups_per_step

    def may_start(self, expected_step: int, version: int) -> bool:
        return expected_step - version <= self.bound

    def may_train(self, step: int, oldest_version: int) -> bool:
        return step - oldest_version <= self.bound


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """A staleness bound of 0 in the steps before step ``until``, and the bound of ``usual`` from then on.

    While the bound is 0, samples of older versions are lost, like all samples that exceed the bound.
    """

    usual: Admission
    until: int

    def may_open(self, live_groups: int, groups_per_step: int) -> bool:
        return live_groups < groups_per_step and self.usual.may_open(live_groups, groups_per_step)

    def may_start(self, expected_step: int, version: int) -> bool:
        if expected_step < self.until and expected_step > version:
            return False
        return self.usual.may_start(expected_step, version)

    def may_train(self, step: int, oldest_version: int) -> bool:
        if step < self.until and step > oldest_version:
            return False
        return self.usual.may_train(step, oldest_version)
