"""Entries of the replay log, and the live samples that a restarted controller rebuilds from them.

An entry is on disk before any message that follows from it is sent, and is deleted with its groups. That a worker holds
a tensor is only a claim until the worker confirms it in its inventory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrt.controller.state.dataflow import Flows
from flowrt.controller.state.samples import ColumnLocation, Group, Slot
from flowrt.ids import GroupId, SlotId, WorkerId
from flowrt.protocol.messages import NO_LIMIT, ColumnLengths, Ints, Part, Values


@dataclass(frozen=True, slots=True)
class GroupsOpened:
    """An offer was opened as groups numbered from ``group`` on, with slots numbered from ``slot`` on."""

    owner: str
    request: int
    flow: str
    prompts: Ints
    epoch: int
    members: int
    at_least: int
    lengths: tuple[ColumnLengths, ...]
    tags: tuple[Values, ...]
    group: int
    slot: int
    at_most: int = NO_LIMIT


@dataclass(frozen=True, slots=True)
class StageCommitted:
    """A commit was accepted for these slots."""

    worker: str
    stage: str
    slots: Ints
    leases: Ints
    parts: tuple[Part, ...]
    inline: tuple[Values, ...]
    spans: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class StageUndone:
    """A stage (``""``: no stage) and all that depend on it were undone for a slot, whose attempt is now ``attempt``."""

    slot: int
    stage: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GroupsClosed:
    """These groups and slots are no longer live."""

    groups: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class CounterSet:
    """A counter of the run has this value; its name is one of `STEP` to `LATEST`."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker joined."""

    worker: str
    role: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is gone."""

    worker: str


UNDECIDED = -1
"""Number of steps in a `RunPreempted` before it is decided after which step the trainers leave."""


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """A worker was told to drain, by an operator or because it was terminated."""

    worker: str
    by_operator: bool


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """The drain of a worker is over: it has left, or another process has joined under its name."""

    worker: str


@dataclass(frozen=True, slots=True)
class RunPreempted:
    """Preemption of the run was ordered; the trainers leave after ``steps`` steps, or it is not decided yet."""

    reason: str
    code: int
    kept: int
    steps: int = UNDECIDED


Order = WorkerDrained | RunPreempted
"""What a controller has told workers to do, which a restarted one carries on with."""
GroupEntry = GroupsOpened | StageCommitted | StageUndone | GroupsClosed
Entry = GroupEntry | CounterSet | WorkerJoined | WorkerLeft | Order | DrainEnded
STEP = "step"
"""The step in training."""
FILTERED = "filtered"
"""Groups that the filter has dropped in the step in training."""
SKIPPED = "skipped"
"""Prompts that the curriculum has skipped in the step in training."""
SHARE_ENDED = "share_ended"
"""The last step of which a trainer was told that no micro-batch is left."""
JOINED = "joined "
"""Prefix of a counter that is set for each role that has had a worker."""
VACANT = "vacant "
"""Prefix of the counter of a role, which is 1 while the role is vacant."""
VIOLATIONS = "violations "
"""Prefix of the counter of a guard's consecutive violations, by the index of its rule."""
HELD_UNTIL = "held_until"
"""The step before which a guard holds the staleness bound at 0."""
LATEST = "latest "
"""Prefix of the counter of a model's latest version."""


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """What the replay log of an earlier controller contains."""

    numbers: dict[str, int] = field(default_factory=dict)  # counters by name
    members: dict[str, str] = field(default_factory=dict)  # role of each member
    entries: Sequence[GroupEntry] = ()
    dropped: dict[str, int] = field(default_factory=dict)  # dropped samples by reason
    orders: tuple[Order, ...] = ()  # drains and preemption in progress


class ReplayedSamples:
    """Live groups rebuilt from the log, with columns whose owners are not confirmed yet."""

    def __init__(self, flows: Flows, entries: Sequence[GroupEntry]) -> None:
        self._flows = flows
        self.groups: dict[int, Group] = {}
        self._slots: dict[int, Slot] = {}
        self.claims: dict[tuple[str, int], set[WorkerId]] = defaultdict(set)  # of (column, slot or group)
        self.offers: dict[tuple[WorkerId, int], GroupsOpened] = {}
        self.commits: dict[tuple[str, int], int] = {}  # the lease under which a stage was done for a slot
        for entry in entries:
            match entry:
                case GroupsOpened():
                    self._begin(entry)
                case StageCommitted():
                    self._make(entry)
                case StageUndone():
                    self._unmake(entry)
                case GroupsClosed(groups, slots):
                    self._leave(groups, slots)

    def _begin(self, entry: GroupsOpened) -> None:
        owner = WorkerId(entry.owner)
        self.offers[owner, entry.request] = entry
        for index, prompt in enumerate(entry.prompts):
            group = Group(
                group_id=GroupId(entry.group + index),
                flow=entry.flow,
                prompt=prompt,
                epoch=entry.epoch,
                at_least=entry.at_least,
                at_most=entry.at_most,
                source=owner,
            )
            first = index * entry.members
            for member in range(entry.members):
                slot = Slot(SlotId(entry.slot + first + member), group, member)
                slot.inline = {tag.column: tag.values[first + member] for tag in entry.tags}
                group.slots.append(slot)
                self._slots[slot.id] = slot
            for length in entry.lengths:
                group.keep(length.column, ColumnLocation(length.lengths[index], set()))
                self.claims[length.column, group.id] = {owner}
            self.groups[group.id] = group

    def _make(self, entry: StageCommitted) -> None:
        worker, bit = WorkerId(entry.worker), self._flows.bits[entry.stage]
        for row, slot_id in enumerate(entry.slots):
            slot = self._slots.get(slot_id)
            if slot is None:
                continue  # its group is closed; the entry remains because of another group
            slot.done |= bit
            slot.inline = {**slot.inline, **{inline.column: inline.values[row] for inline in entry.inline}}
            for part in entry.parts:
                slot.keep(part.column, ColumnLocation(part.lengths[row], set()))
                self.claims[part.column, slot_id] = {worker}
            for column in self._flows.fetched[entry.stage]:
                # A worker that has done the stage holds the columns that the stage needs.
                item = slot.group.id if column in slot.group.tensors else slot_id
                self.claims[column, item].add(worker)
            if entry.spans:
                slot.spans, slot.spans_of = tuple(entry.spans[row]), entry.stage
            self.commits[entry.stage, slot_id] = entry.leases[row]

    def _unmake(self, entry: StageUndone) -> None:
        slot = self._slots.get(entry.slot)
        if slot is None:
            return
        slot.attempt = entry.attempt
        undone = self._flows.undone_with(entry.stage) if entry.stage else []
        for name in undone:
            self._unmark(slot, name)
            if slot.spans_of == name:
                slot.spans, slot.spans_of = (), ""
        for name in self._flows.undone_for_group(undone):
            for other in slot.group.slots:
                self._unmark(other, name)

    def _unmark(self, slot: Slot, stage: str) -> None:
        slot.done &= ~self._flows.bits[stage]
        self.commits.pop((stage, slot.id), None)
        for column in self._flows.stages[stage].makes:
            slot.forget(column)
            self.claims.pop((column, slot.id), None)

    def _leave(self, groups: Sequence[int], slots: Sequence[int]) -> None:
        for group_id in groups:
            group = self.groups.pop(group_id, None)
            if group is not None:
                self._forget([slot.id for slot in group.slots])
                for column in group.tensors:
                    self.claims.pop((column, group_id), None)
        for slot_id in slots:
            slot = self._slots.get(slot_id)
            if slot is not None:
                slot.group.slots.remove(slot)
                self._forget([slot_id])

    def _forget(self, slots: Sequence[int]) -> None:
        for slot_id in slots:
            slot = self._slots.pop(slot_id)
            for column in slot.tensors:
                self.claims.pop((column, slot_id), None)
            for stage in self._flows.stages:
                self.commits.pop((stage, slot_id), None)
