"""What has to be known of live samples when a controller comes back: told as they walk, and put together again.

The ledger keeps these entries, written before anybody is told of what they say, and forgets them with their groups. Who
has a tensor is only a claim until that worker says again that it has it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrt.controller.flows import Flows
from flowrt.controller.slots import Group, Holding, Slot
from flowrt.ids import GroupId, SlotId, WorkerId
from flowrt.wire.records import Ints, Lengths, Part, Values


@dataclass(frozen=True, slots=True)
class Begun:
    """An offer was opened: these groups, from ``group`` on, with their slots, from ``slot`` on."""

    owner: str
    request: int
    flow: str
    prompts: Ints
    epoch: int
    members: int
    at_least: int
    lengths: tuple[Lengths, ...]
    tags: tuple[Values, ...]
    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class Made:
    """A commit was accepted for these slots."""

    worker: str
    stage: str
    slots: Ints
    leases: Ints
    parts: tuple[Part, ...]
    inline: tuple[Values, ...]
    spans: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class Unmade:
    """A stage (none: ``""``) was undone for this slot, and what was made from it; its next attempt is this one."""

    slot: int
    stage: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Left:
    """These are not live any more."""

    groups: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class Reached:
    """A number of the run has this value now: the step in training, the latest version of a model."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Came:
    """A worker is in."""

    worker: str
    role: str


@dataclass(frozen=True, slots=True)
class Went:
    """A worker is not in any more."""

    worker: str


Entry = Begun | Made | Unmade | Left | Reached | Came | Went
STEP = "step"
LATEST = "latest "
"""Before the name of a model: its latest version."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What a controller that is gone has left behind."""

    numbers: dict[str, int] = field(default_factory=dict)
    crew: dict[str, str] = field(default_factory=dict)  # who was in, and in which role
    entries: Sequence[Begun | Made | Unmade | Left] = ()
    dropped: dict[str, int] = field(default_factory=dict)  # by reason


class Recollection:
    """Live groups as they were, with columns that nobody owns yet."""

    def __init__(self, flows: Flows, entries: Sequence[Begun | Made | Unmade | Left]) -> None:
        self._flows = flows
        self.groups: dict[int, Group] = {}
        self._slots: dict[int, Slot] = {}
        self.claims: dict[tuple[str, int], set[WorkerId]] = defaultdict(set)  # of (column, slot or group)
        self.offers: dict[tuple[WorkerId, int], Begun] = {}
        self.commits: dict[tuple[str, int], int] = {}  # the lease under which a stage was done for a slot
        for entry in entries:
            match entry:
                case Begun():
                    self._begin(entry)
                case Made():
                    self._make(entry)
                case Unmade():
                    self._unmake(entry)
                case Left(groups, slots):
                    self._leave(groups, slots)

    def _begin(self, entry: Begun) -> None:
        owner = WorkerId(entry.owner)
        self.offers[owner, entry.request] = entry
        for index, prompt in enumerate(entry.prompts):
            group = Group(GroupId(entry.group + index), entry.flow, prompt, entry.epoch, entry.at_least)
            first = index * entry.members
            for member in range(entry.members):
                slot = Slot(SlotId(entry.slot + first + member), group, member)
                slot.inline = {one.column: one.values[first + member] for one in entry.tags}
                group.slots.append(slot)
                self._slots[slot.id] = slot
            for one in entry.lengths:
                group.keep(one.column, Holding(one.lengths[index], set()))
                self.claims[one.column, group.id] = {owner}
            self.groups[group.id] = group

    def _make(self, entry: Made) -> None:
        worker, bit = WorkerId(entry.worker), self._flows.bits[entry.stage]
        for row, slot_id in enumerate(entry.slots):
            slot = self._slots.get(slot_id)
            if slot is None:
                continue  # its group has left, and the entry is still here because of another
            slot.done |= bit
            slot.inline = {**slot.inline, **{one.column: one.values[row] for one in entry.inline}}
            for part in entry.parts:
                slot.keep(part.column, Holding(part.lengths[row], set()))
                self.claims[part.column, slot_id] = {worker}
            for column in self._flows.fetched[entry.stage]:
                # Whoever has done it has what it needs.
                item = slot.group.id if column in slot.group.tensors else slot_id
                self.claims[column, item].add(worker)
            if entry.spans:
                slot.spans, slot.spans_of = tuple(entry.spans[row]), entry.stage
            self.commits[entry.stage, slot_id] = entry.leases[row]

    def _unmake(self, entry: Unmade) -> None:
        slot = self._slots.get(entry.slot)
        if slot is None:
            return
        slot.attempt = entry.attempt
        pending = [entry.stage] if entry.stage else []
        while pending:
            name = pending.pop()
            pending += [after.name for after in self._flows.after[name]]
            slot.done &= ~self._flows.bits[name]
            self.commits.pop((name, slot.id), None)
            for column in self._flows.stages[name].makes:
                slot.forget(column)
                self.claims.pop((column, slot.id), None)
            if slot.spans_of == name:
                slot.spans, slot.spans_of = (), ""

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
