"""Steps that are looked at as a whole before any of them is trained: shared among ranks, cut to a budget of tokens."""

from collections.abc import Callable, Container, Sequence

from flowrt.controller.batchers import Batcher, FixedTokens
from flowrt.controller.sharing import Sharing
from flowrt.controller.slots import NO_STEP, Group, Slot
from flowrt.ids import GroupId, WorkerId


class StepPlan:
    """Which rank trains which groups of the step, and how many tokens of each sample."""

    def __init__(self, sharing: Sharing, cut: FixedTokens | None) -> None:
        self._sharing = sharing
        self._cut = cut
        self.step = NO_STEP
        self._shares: list[list[Group]] = []
        self._shared = False
        self._ranks: dict[WorkerId, int] = {}
        self._kept: dict[int, int] = {}

    @property
    def is_needed(self) -> bool:
        """Whether the policies ask for whole steps; otherwise micro-batches are streamed as they become ready."""
        return self._sharing.whole_step or self._cut is not None

    def make(self, step: int, groups: Sequence[Group], tokens_of: Callable[[Group], int]) -> None:
        """All groups of the step are ready.

        What is planned anew in the same step goes to whoever asks: some ranks may have been told that they are done.
        """
        again, self.step = self.step == step, step
        groups = sorted(groups, key=lambda group: group.id)
        shares = None if again else self._sharing.split(groups, [tokens_of(group) for group in groups])
        self._shared = shares is not None
        self._shares = [list(groups)] if shares is None else shares
        if self._cut is not None:
            slots = [slot for group in groups for slot in group.slots]
            kept = self._cut.kept([_generated(slot) for slot in slots], step)
            self._kept = {slot.id: count for slot, count in zip(slots, kept, strict=True)}

    def holds(self, step: int, groups: Container[GroupId]) -> bool:
        """The step is planned, and every group of the plan is still there."""
        return self.step == step and all(group.id in groups for share in self._shares for group in share)

    def left(self, taken: Container[GroupId]) -> int:
        """How many of the plan's groups nobody has taken."""
        return sum(group.id not in taken for share in self._shares for group in share)

    def share_of(self, worker: WorkerId) -> list[Group]:
        """The groups of this step that the worker is to train, in order of issue."""
        if not self._shared:
            return self._shares[0]
        rank = self._ranks.setdefault(worker, len(self._ranks))
        return self._shares[rank] if rank < len(self._shares) else []

    def kept(self, slot: Slot) -> int | None:
        """How many tokens of the sample are trained; None: no step is cut.

        One that was lost and made again since the step was planned is cut where the first one was.
        """
        return None if self._cut is None else min(self._kept.get(slot.id, 0), _generated(slot))

    def forget(self, worker: WorkerId) -> None:
        """The rank is gone: what is left of the step is shared anew among those that ask."""
        if worker in self._ranks:
            self._ranks.clear()
            self.step = NO_STEP


def _generated(slot: Slot) -> int:
    return sum(slot.spans[1::2])


def micro_batch(groups: Sequence[Group], batcher: Batcher, tokens_of: Callable[[Group], int]) -> list[Group]:
    """The first of these groups that fill a micro-batch, or all."""
    chosen: list[Group] = []
    tokens = rows = 0
    for group in groups:
        if batcher.full(len(chosen), tokens, rows):
            break
        chosen.append(group)
        tokens += tokens_of(group)
        rows += len(group.slots)
    return chosen
