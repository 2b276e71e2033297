"""The training window: which groups belong to the optimiser step in progress.

A step takes a fixed number of groups. Finished groups are taken oldest first, but places are kept for groups that
would be too old for the next step: if groups that finish early took these places, those with long responses would be
dropped.
"""

import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from flowrt.controller.policies.admission import Admission
from flowrt.controller.policies.batching import Batcher
from flowrt.controller.state.samples import Group
from flowrt.controller.state.worklist import Worklist
from flowrt.ids import GroupId, WorkerId


@dataclass(slots=True)
class TrainingWindow:
    """State of the step in progress; ``waiting`` are the live groups that no trainer has taken."""

    groups_per_step: int
    steps: int  # of the run
    strict_issue_order: bool  # take groups in issue order (deterministic runs)
    step: int = 0
    taken: dict[GroupId, Group] = field(default_factory=dict)
    waiting: list[GroupId] = field(default_factory=list)
    exhausted: bool = False  # no further prompts will come
    ender: WorkerId | None = None
    """The source that reported the end of the prompts."""
    share_ended_step: int = -1
    """The last step of which a trainer was told that no micro-batch is left."""
    last: int | None = None
    """The last step before the run ends; None: it does not end early."""
    work: Worklist = field(default_factory=Worklist)  # where changes are reported
    filtered: int = 0
    """Groups that the filter has dropped in this step."""
    skipped: int = 0
    """Prompts that the curriculum has skipped in this step."""
    decided: int = -1
    """With ``strict_issue_order``: the group up to which the filter has decided on all groups."""
    oldest_versions: dict[GroupId, int | None] = field(default_factory=dict)  # of each waiting group
    _versions: Counter[int | None] = field(default_factory=Counter)  # waiting groups by oldest version

    @property
    def live(self) -> int:
        """Number of live groups, taken or waiting."""
        return len(self.taken) + len(self.waiting)

    @property
    def over(self) -> bool:
        """Whether no step is left to train."""
        return self.step >= self.steps or (self.exhausted and self.live == 0)

    @property
    def quota(self) -> int:
        """Number of groups of this step; the last step may be smaller if the prompts are exhausted."""
        return min(self.groups_per_step, self.live) if self.exhausted else self.groups_per_step

    @property
    def places(self) -> int:
        """Number of groups that this step can still take."""
        return self.quota - len(self.taken)

    def enough_opened(self) -> bool:
        """Whether the live groups suffice for all remaining steps, so that no more prompts are needed."""
        return self.live >= (self.steps - self.step) * self.groups_per_step

    def enter(self, groups: Iterable[Group]) -> None:
        """Add live groups, which wait."""
        for group in groups:
            self._wait(group)
        self.work.add_window()

    def exhaust(self, source: WorkerId) -> None:
        """Record that the source has no further prompts."""
        self.exhausted = True
        self.ender = source
        self.work.add_window()

    def lose_source(self, source: WorkerId) -> None:
        """Record the loss of a worker: if it reported the end of the prompts, its replacement may offer more."""
        if source == self.ender:
            self.exhausted = False
            self.ender = None
            self.work.add_window()

    def is_past(self, step: int) -> bool:
        """Whether the step is closed, in a run that has steps left."""
        return step < self.step and not self.over

    def is_beyond(self, step: int) -> bool:
        """Whether the step will not be begun, because the run ends before it."""
        return self.last is not None and step > self.last

    def end_share(self) -> None:
        """Record that a trainer is told that no micro-batch of this step is left for it."""
        self.share_ended_step = self.step

    def restore_end(self, last: int) -> None:
        """Begin no step after ``last``, as an earlier controller decided."""
        self.last = last

    def stop(self) -> int:
        """Begin no further step; returns the last one.

        The step in training is the last one if a rank may already wait for the others at its end; otherwise the last
        one is the step before it, and no rank completes the step in training.
        """
        if self.over:
            return self.step - 1
        self.last = self.step - (self.share_ended_step < self.step and self.places > 0)
        return self.last

    def restore(
        self, step: int, groups: Iterable[Group], filtered: int, skipped: int, share_ended_step: int = -1
    ) -> None:
        """Continue at the step of an earlier controller, with its waiting groups and its counts for the step."""
        self.step = step
        self.share_ended_step = share_ended_step
        self.filtered = filtered
        self.skipped = skipped
        self.enter(groups)

    def leave(self, group: Group) -> None:
        """Remove a dropped group."""
        self.work.add_window()
        if self.taken.pop(group.id, None) is None:
            self._stop_waiting(group)

    def take(self, groups: Iterable[Group]) -> None:
        """Move waiting groups into the step in training."""
        for group in groups:
            self._stop_waiting(group)
            self.taken[group.id] = group
        self.work.add_window()

    def put_back(self, group: Group) -> None:
        """Let a taken group wait again; ignored if it is not taken."""
        if self.taken.pop(group.id, None) is not None:
            self._wait(group)
        self.work.add_window()

    def expected_step(self, group: Group) -> int:
        """The step that trains this group if all groups ahead of it are trained first."""
        if group.id in self.taken:
            return self.step
        ahead = len(self.taken) + bisect_left(self.waiting, group.id)
        return self.step + ahead // self.groups_per_step

    def close(self) -> list[Group]:
        """Close the step and begin the next one; returns the groups that were trained."""
        trained = list(self.taken.values())
        self.taken.clear()
        self.step += 1
        self.filtered = self.skipped = 0
        self.decided = -1
        self.work.add_window()
        return trained

    def count_filtered(self) -> None:
        """Count a group that the filter drops in this step."""
        self.filtered += 1

    def count_skipped(self) -> None:
        """Count a prompt that the curriculum skips in this step."""
        self.skipped += 1

    def due(self, ready: Iterable[GroupId], complete: Container[GroupId]) -> list[GroupId]:
        """The groups that the filter has to decide on now: in order of issue, up to the first that is not complete.

        Args:
            ready: groups that have become ready; those up to `decided`, made again, are returned first.
            complete: all groups that are ready to train.
        """
        due = [one for one in ready if one <= self.decided]
        for one in self.waiting[bisect_right(self.waiting, self.decided) :]:
            if one not in complete:
                break
            due.append(one)
            self.decided = one
        return due

    def wait_reason(self, step: int, ready: int) -> str:
        """What a trainer at ``step`` waits for, given the number of ready groups."""
        if step > self.step:
            return f"the end of step {self.step}"
        return f"a full micro-batch of step {self.step}: {ready} of {self.places} groups complete"

    def note_versions(self, groups: Iterable[Group]) -> None:
        """Update the oldest versions of these groups; those that do not wait are ignored."""
        for group in groups:
            if group.id in self.oldest_versions:
                self._forget_version(group)
                self._add_version(group)

    def choose(
        self,
        ready: Mapping[GroupId, Group],
        admission: Admission,
        batcher: Batcher,
        tokens_of: Callable[[Group], int],
    ) -> list[Group]:
        """The next micro-batch of this step, from the ready groups; empty until it is full or completes the step.

        Costs O(ready groups + distinct oldest versions), however many groups wait that are not ready.
        """
        if len(ready) < self.places and not _MicroBatch(batcher, tokens_of).fill(ready.values()):
            return []
        deadlines = {version: self._deadline(version, admission) for version in self._versions}
        by_deadline: Counter[int] = Counter()
        for version, count in self._versions.items():
            if (last := deadlines[version]) is not None:
                by_deadline[last] += count
        last_step = {one: deadlines[self.oldest_versions[one]] for one in ready}
        candidates = sorted(ready, key=lambda one: (last_step[one] != self.step, one))
        if self.strict_issue_order:
            candidates = self._unbroken(ready)
        batch = _MicroBatch(batcher, tokens_of)
        refused: set[int | None] = set()  # deadlines without room, which further groups cannot make
        for one in candidates:
            if len(batch.groups) == self.places or batch.is_full:
                break
            mine = last_step[one]
            if not self.strict_issue_order:
                if mine in refused:
                    continue
                if not self._leaves_room(mine, len(batch.groups), by_deadline):
                    refused.add(mine)
                    continue
            if mine is not None:
                by_deadline[mine] -= 1
            batch.add(ready[one])
        return batch.groups if len(batch.groups) == self.places or batch.is_full else []

    def _deadline(self, oldest: int | None, admission: Admission) -> int | None:
        """The last step that may train a group of this oldest version, among the steps of the live groups.

        None while nothing of the group is generated, or when its deadline lies beyond all live groups.
        """
        if oldest is None:
            return None
        horizon = self.step + self.live // self.groups_per_step + 1
        return next((s for s in range(self.step, horizon) if not admission.may_train(s + 1, oldest)), None)

    def _leaves_room(self, mine: int | None, chosen: int, others: Mapping[int, int]) -> bool:
        """Whether all other groups can be trained by their deadlines if this one takes a place of this step.

        ``mine`` is its deadline; ``others`` counts the waiting groups that are not chosen by theirs.
        """
        free = self.places - chosen - 1
        due = 0
        for last in sorted(others):
            if mine is not None and last >= mine:
                break
            due += others[last]
            if others[last] and due > free + (last - self.step) * self.groups_per_step:
                return False
        return True

    def _wait(self, group: Group) -> None:
        insort(self.waiting, group.id)
        self._add_version(group)

    def _stop_waiting(self, group: Group) -> None:
        del self.waiting[bisect_left(self.waiting, group.id)]
        self._forget_version(group)

    def _add_version(self, group: Group) -> None:
        oldest = self.oldest_versions[group.id] = group.oldest_version()
        self._versions[oldest] += 1

    def _forget_version(self, group: Group) -> None:
        oldest = self.oldest_versions.pop(group.id)
        self._versions[oldest] -= 1
        if not self._versions[oldest]:
            del self._versions[oldest]

    def _unbroken(self, ready: Mapping[GroupId, Group]) -> list[GroupId]:
        """The waiting groups in issue order, up to the first one that is not ready."""
        return list(itertools.takewhile(lambda one: one in ready, self.waiting))


class _MicroBatch:
    """A micro-batch that is being filled."""

    def __init__(self, batcher: Batcher, tokens_of: Callable[[Group], int]) -> None:
        self._batcher = batcher
        self._tokens_of = tokens_of
        self.groups: list[Group] = []
        self._tokens = self._rows = 0
        self.is_full = batcher.full(0, 0, 0)

    def add(self, group: Group) -> None:
        self.groups.append(group)
        self._tokens += self._tokens_of(group)
        self._rows += len(group.slots)
        self.is_full = self._batcher.full(len(self.groups), self._tokens, self._rows)

    def fill(self, groups: Iterable[Group]) -> bool:
        """Add groups until the batch is full; returns whether it is."""
        for group in groups:
            if self.is_full:
                break
            self.add(group)
        return self.is_full
