"""The training window: which groups belong to the optimiser step in progress; and the plan of a whole step.

A step takes a fixed number of groups. Finished groups are taken oldest first, but places are kept for groups that
would be too old for the next step: if groups that finish early took these places, those with long responses would be
dropped. Steps are planned only where a policy shares them among ranks or cuts them to a budget of tokens.
"""

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flowrt.controller.policies.admission import Admission
from flowrt.controller.policies.batching import Batcher
from flowrt.controller.state.ready_groups import ReadyGroups
from flowrt.controller.state.slots import NO_STEP, Group
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
    """With ``strict_issue_order``: the group up to which the filter has decided on all groups; -1: on none."""
    oldest_versions: dict[GroupId, int | None] = field(default_factory=dict)  # of each waiting group
    _of_version: dict[int | None, dict[GroupId, None]] = field(default_factory=dict)  # waiting groups by that

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

    def stop(self) -> int:
        """Begin no further step; returns the last one.

        The step in training is the last one if a rank may already wait for the others at its end; otherwise the last
        one is the step before it, and no rank completes the step in training.
        """
        if self.over:
            return self.step - 1
        no_rank_waits = self.share_ended_step < self.step and self.places > 0
        self.last = self.step - 1 if no_rank_waits else self.step
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
        self.work.add_window()
        return trained

    def due(self, ready: Iterable[GroupId], complete: Container[GroupId]) -> list[GroupId]:
        """The groups that the filter has to decide on now: in order of issue, up to the first that is not complete.

        Args:
            ready: groups that have become ready; those up to `decided`, made again, are returned first.
            complete: all groups that are ready to train.
        """
        due = [group_id for group_id in ready if group_id <= self.decided]
        for index in range(bisect_right(self.waiting, self.decided), len(self.waiting)):
            if (group_id := self.waiting[index]) not in complete:
                break
            due.append(group_id)
            self.decided = group_id
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

    @property
    def versions(self) -> list[int | None]:
        """The oldest versions of waiting groups."""
        return list(self._of_version)

    def of_versions(self, versions: Iterable[int | None]) -> list[GroupId]:
        """The waiting groups of these oldest versions, in order of issue."""
        return sorted(number for version in versions for number in self._of_version[version])

    def choose(
        self, ready: ReadyGroups, admission: Admission, batcher: Batcher, tokens_of: Callable[[Group], int]
    ) -> list[Group]:
        """The next micro-batch of this step, from the ready groups; empty until it is full or completes the step.

        Costs O(groups of the micro-batch + distinct oldest versions), however many groups wait or are ready.
        """
        if len(ready) < self.places and not batcher.full(len(ready), *ready.totals(tokens_of)):
            return []
        batch = _MicroBatch(batcher)
        if self.strict_issue_order:
            for number in itertools.takewhile(lambda number: number in ready, self.waiting):
                if len(batch.groups) == self.places or batch.is_full:
                    break
                batch.add(ready[number], ready.tokens(number, tokens_of))
        else:
            self._choose_by_deadline(batch, ready, admission, tokens_of)
        return batch.groups if len(batch.groups) == self.places or batch.is_full else []

    def _choose_by_deadline(
        self, batch: "_MicroBatch", ready: ReadyGroups, admission: Admission, tokens_of: Callable[[Group], int]
    ) -> None:
        """Fill the batch with groups that this step has to train, then with others, each in order of issue."""
        deadlines = {version: self._deadline(version, admission) for version in (*self._of_version, *ready.by_version)}
        by_deadline: Counter[int] = Counter()
        for version, same in self._of_version.items():
            if (last := deadlines[version]) is not None:
                by_deadline[last] += len(same)
        # The next group of each version: (whether a later step may train it, its number, its version and place there).
        heads = [
            (deadlines[number] != self.step, groups[0], at)
            for at, (number, groups) in enumerate(ready.by_version.items())
        ]
        of_versions = list(ready.by_version.items())
        places = [0] * len(of_versions)
        heapq.heapify(heads)
        while heads and len(batch.groups) < self.places and not batch.is_full:
            is_later, number, at = heapq.heappop(heads)
            version, groups = of_versions[at]
            mine = deadlines[version]
            if not self._leaves_room(mine, len(batch.groups), by_deadline):
                continue  # nor does any other group of this version
            if mine is not None:
                by_deadline[mine] -= 1
            batch.add(ready[number], ready.tokens(number, tokens_of))
            places[at] += 1
            if places[at] < len(groups):
                heapq.heappush(heads, (is_later, groups[places[at]], at))

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
        self._of_version.setdefault(oldest, {})[group.id] = None

    def _forget_version(self, group: Group) -> None:
        oldest = self.oldest_versions.pop(group.id)
        same = self._of_version[oldest]
        del same[group.id]
        if not same:
            del self._of_version[oldest]


@dataclass(slots=True)
class StepPlan:
    """The plan of the step ``step``: which rank trains which groups, and how many tokens; `NO_STEP`: there is none."""

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

    def forget(self, worker: WorkerId) -> None:
        """Remove a rank, and plan the rest of the step again; ignored if the worker is no rank."""
        if worker in self.ranks:
            self.ranks.clear()
            self.step = NO_STEP


class _MicroBatch:
    """A micro-batch that is being filled."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.groups: list[Group] = []
        self._tokens = self._rows = 0
        self.is_full = batcher.full(0, 0, 0)

    def add(self, group: Group, tokens: int) -> None:
        self.groups.append(group)
        self._tokens += tokens
        self._rows += len(group.slots)
        self.is_full = self._batcher.full(len(self.groups), self._tokens, self._rows)
