"""The plan of a whole optimiser step: which rank trains which groups, and how many tokens of each sample.

Steps are planned only where a policy shares them among ranks or cuts them to a budget of tokens.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from flowrt.controller.state.samples import NO_STEP, Group
from flowrt.ids import GroupId, WorkerId


@dataclass(slots=True)
class StepPlan:
    """The plan of the step with the number ``step``; `NO_STEP` if there is none."""

    step: int = NO_STEP
    shares: Sequence[list[Group]] = ()
    """The groups of each rank, or one list for all ranks."""
    is_shared: bool = False
    kept: dict[int, int] = field(default_factory=dict)
    """Number of trained tokens by slot id, where steps are cut."""
    ranks: dict[WorkerId, int] = field(default_factory=dict)
    """Index of each rank in ``shares``, in the order in which the ranks asked."""

    def fill(self, step: int, groups: list[Group], shares: list[list[Group]] | None) -> None:
        """Plan a step of these groups, shared among the ranks unless ``shares`` is None."""
        self.step = step
        self.is_shared = shares is not None
        self.shares = [groups] if shares is None else shares

    def keep(self, kept: dict[int, int]) -> None:
        """Set the number of trained tokens of each sample, by slot id."""
        self.kept = kept

    def is_valid(self, step: int, live: Container[GroupId]) -> bool:
        """Whether the step is planned and every group of the plan is live."""
        return self.step == step and all(group.id in live for share in self.shares for group in share)

    def left(self, taken: Container[GroupId]) -> int:
        """Number of groups of the plan that no trainer has taken."""
        return sum(group.id not in taken for share in self.shares for group in share)

    def share_of(self, worker: WorkerId) -> list[Group]:
        """The groups of this step that the worker is to train, in order of issue; empty if it has no share."""
        if not self.is_shared:
            return self.shares[0]
        rank = self.ranks.setdefault(worker, len(self.ranks))
        return self.shares[rank] if rank < len(self.shares) else []

    def restart(self, step: int) -> None:
        """Record that the controller was restarted in this step, whose next plan is then a second one."""
        self.step = step

    def forget(self, worker: WorkerId) -> None:
        """Remove a rank, and plan the rest of the step again; ignored if the worker is no rank."""
        if worker in self.ranks:
            self.ranks.clear()
            self.step = NO_STEP
