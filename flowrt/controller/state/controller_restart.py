"""Restart of the controller: the entries of the restart log, the live samples rebuilt from them, and the recovery.

- An entry is on disk before any message that follows from it is sent, and is deleted with its groups.
- A restarted controller recovers until the workers of the earlier one have rejoined: requests are parked, and no column
  counts as lost. That a worker holds a tensor is only a claim until the worker confirms it in its inventory.

`flowrt.controller.transitions.rejoin` has the transitions. Lost workers, and the work they held: `rollback` there.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flowrt.controller.state.dataflow import Flows
from flowrt.controller.state.slots import ColumnLocation, Group, Slot
from flowrt.ids import GroupId, SlotId, WorkerId
from flowrt.protocol.messages import (
    NO_LIMIT,
    CheckpointWritten,
    ColumnLengths,
    Int,
    Ints,
    Part,
    ProtocolRecord,
    StepCompleted,
    Values,
)


class GroupsOpened(ProtocolRecord):
    """An offer was opened as groups numbered from ``group`` on, with slots numbered from ``slot`` on."""

    owner: str
    request: Int
    flow: str
    prompts: Ints
    epoch: Int
    members: Int
    at_least: Int
    lengths: tuple[ColumnLengths, ...]
    tags: tuple[Values, ...]
    group: Int
    slot: Int
    at_most: Int = NO_LIMIT


class StageCommitted(ProtocolRecord):
    """A commit was accepted for these slots."""

    worker: str
    stage: str
    slots: Ints
    leases: Ints
    parts: tuple[Part, ...]
    inline: tuple[Values, ...]
    spans: tuple[Ints, ...]


class StageUndone(ProtocolRecord):
    """A stage (``""``: no stage) and all that depend on it were undone for a slot, whose attempt is now ``attempt``."""

    slot: Int
    stage: str
    attempt: Int


class GroupsClosed(ProtocolRecord):
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


class WorkerDrained(ProtocolRecord):
    """A worker was told to drain, by an operator or because it was terminated."""

    worker: str
    by_operator: bool


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """The drain of a worker is over: it has left, or another process has joined under its name."""

    worker: str


class RunPreempted(ProtocolRecord):
    """Preemption of the run was ordered; the trainers leave after ``steps`` steps, or it is not decided yet."""

    reason: str
    code: Int
    kept: Int
    steps: Int = UNDECIDED


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
    """What the restart log of an earlier controller contains."""

    numbers: dict[str, int] = field(default_factory=dict)  # counters by name
    members: dict[str, str] = field(default_factory=dict)  # role of each member
    entries: Sequence[GroupEntry] = ()
    dropped: dict[str, int] = field(default_factory=dict)  # dropped samples by reason
    orders: tuple[Order, ...] = ()  # drains and preemption in progress


class RestoredSamples:
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
                group.set_location(length.column, ColumnLocation(length.lengths[index], set()))
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
                slot.set_location(part.column, ColumnLocation(part.lengths[row], set()))
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


Deferrable = StepCompleted | CheckpointWritten
"""Messages that are handled after recovery: a step contains the work of several workers."""


@dataclass(slots=True)
class Recovery:
    """The mode of the controller: recovering while ``is_active``, serving otherwise."""

    restored: RestoredSamples | None = None
    claims: Mapping[tuple[str, int], Collection[WorkerId]] = field(default_factory=dict)
    """Workers that held a column according to the restart log, by (column, id of the slot or group)."""
    awaited: dict[WorkerId, str] = field(default_factory=dict)
    """Workers of the earlier controller that have not sent their inventories, and their roles."""
    vacant: list[str] = field(default_factory=list)
    """Roles that were vacant under the earlier controller."""
    returned: set[WorkerId] = field(default_factory=set)
    """Members that rejoined from an earlier controller."""
    unconfirmed: set[WorkerId] = field(default_factory=set)
    """Those of them that have not sent their inventories: they get no work and no weights, also after recovery."""
    deferred: list[tuple[WorkerId, Deferrable]] = field(default_factory=list)
    until_s: float | None = None  # end of the rejoin timeout; None: not begun
    is_active: bool = False

    def begin(self, restored: RestoredSamples, members: Mapping[str, str]) -> None:
        """Enter recovery with the samples of an earlier controller and the roles of its members."""
        self.restored = restored
        self.is_active = True
        self.claims = restored.claims
        self.awaited = {WorkerId(worker): role for worker, role in members.items()}

    def join(self, worker: WorkerId, term: int) -> None:
        """Note a worker that rejoined, if it has a ``term``, or a new one, which holds nothing of an earlier worker."""
        if term:
            self.returned.add(worker)
            self.unconfirmed.add(worker)
        else:
            self.returned.discard(worker)
            self.unconfirmed.discard(worker)
            self.awaited.pop(worker, None)

    def is_parked(self, worker: WorkerId) -> bool:
        """Whether pulls of the worker wait: for the end of recovery, or for its inventory.

        A slot that a worker was granted before its inventory is handled might be one of which the inventory lists older
        tensors; the order to free these would free the new ones.
        """
        return self.is_active or worker in self.unconfirmed

    def take_deferred(self) -> list[tuple[WorkerId, Deferrable]]:
        """Remove and return the deferred messages, in order of arrival."""
        deferred = self.deferred
        self.deferred = []
        return deferred

    def complete(self, worker: WorkerId) -> None:
        """Note that the worker has sent its inventory."""
        self.awaited.pop(worker, None)
        self.unconfirmed.discard(worker)

    def is_over(self, now: float, timeout_s: float) -> bool:
        """Whether all awaited workers have returned, or the timeout is over, which starts with the first call."""
        if self.until_s is None:
            self.until_s = now + timeout_s
        return not self.awaited or now >= self.until_s

    def extend_deadline(self, seconds: float) -> None:
        """Extend the rejoin timeout, if it has begun."""
        if self.until_s is not None:
            self.until_s += seconds

    def end(self) -> dict[WorkerId, str]:
        """Leave recovery; returns the workers that did not return, and their roles.

        What an inventory that comes later lists may be made again by then, so no worker is known to hold it any more.
        """
        absent = self.awaited
        self.restored = None
        self.claims = {}
        self.is_active = False
        self.awaited = {}
        return absent
