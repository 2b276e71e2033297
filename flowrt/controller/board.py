"""The board: every transition of a slot, in one place.

A slot is ready for a stage when every column that the stage needs exists, the stage has not been done and
nobody has a lease on it. A stage that takes whole groups is ready when all its slots are. Undoing a stage undoes
what was made from its columns, so nothing derived from a lost tensor survives it.
"""

from collections.abc import Iterable, Iterator, Sequence

from flowrt.controller.dispatch import ReadyQueue
from flowrt.controller.slots import NO_STEP, Group, Holding, Lease, Slot
from flowrt.errors import LocalProtocolError
from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.wire.records import Column, Stage


class Board:
    """All live groups and their slots."""

    def __init__(self, columns: Sequence[Column], stages: Sequence[Stage]) -> None:
        self.columns = {column.name: column for column in columns}
        self.stages = {stage.name: stage for stage in stages}
        self.groups: dict[GroupId, Group] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.leases: dict[LeaseId, Lease] = {}  # in order of their deadlines: every lease lasts equally long
        self.ready: dict[str, ReadyQueue] = {stage.name: ReadyQueue() for stage in stages}
        self._next_group = 0
        self._next_slot = 0
        self._next_lease = 0

    def open(
        self,
        flow: str,
        prompt: int,
        epoch: int,
        members: int,
        at_least: int,
        owner: WorkerId,
        lengths: dict[str, int],
    ) -> Group:
        """Add a group of ``members`` slots whose group columns are held by ``owner``."""
        group = Group(GroupId(self._next_group), flow, prompt, epoch, at_least)
        self._next_group += 1
        group.tensors = {column: Holding(length, {owner}) for column, length in lengths.items()}
        for member in range(members):
            slot = Slot(SlotId(self._next_slot), group, member)
            self._next_slot += 1
            group.slots.append(slot)
            self.slots[slot.id] = slot
        self.groups[group.id] = group
        for slot in group.slots:
            self._refresh(slot)
        return group

    def lease(
        self,
        stage: str,
        slots: Iterable[Slot],
        worker: WorkerId,
        deadline_s: float,
        version: int,
        step: int = NO_STEP,
    ) -> list[Lease]:
        """Give the right to run ``stage`` on these slots to ``worker``."""
        granted = []
        for slot in slots:
            if stage in slot.leases or stage in slot.done:
                raise LocalProtocolError(f"slot {slot.id} (stage {stage}) is not ready and cannot be leased")
            lease = Lease(LeaseId(self._next_lease), slot.id, stage, worker, deadline_s, version, step)
            self._next_lease += 1
            slot.leases[stage] = lease
            self.leases[lease.id] = lease
            granted.append(lease)
            self._refresh(slot)
        return granted

    def find_lease(self, lease_id: int, worker: WorkerId) -> Lease | None:
        """The lease, if it is still valid and this worker's."""
        lease = self.leases.get(LeaseId(lease_id))
        return lease if lease is not None and lease.worker == worker else None

    def commit(
        self, lease: Lease, lengths: dict[str, int], inline: dict[str, float], spans: tuple[int, ...] = ()
    ) -> Slot:
        """The stage is done: its columns become visible at once, all of them."""
        slot = self.slots[lease.slot]
        self._end_lease(slot, lease.stage)
        for column in self.stages[lease.stage].needs:
            needed = slot.holding(column)
            if needed is not None and needed.sent.pop(lease.worker, None) is not None:
                needed.owners.add(lease.worker)
        slot.done.add(lease.stage)
        slot.inline.update(inline)
        for column, length in lengths.items():
            slot.tensors[column] = Holding(length, {lease.worker})
        if spans:
            slot.spans, slot.spans_of = spans, lease.stage
        self._refresh(slot)
        return slot

    def release(self, lease: Lease) -> Slot:
        """The lease ends without a result; the slot is ready again if its needs are still met."""
        slot = self.slots[lease.slot]
        self._end_lease(slot, lease.stage)
        self._refresh(slot)
        return slot

    def undo(self, slot: Slot, stage: str) -> dict[WorkerId, set[str]]:
        """Forget what ``stage`` made of this slot and all that was made from it; returns who holds dead copies."""
        undone: set[str] = set()
        pending = [stage]
        while pending:
            name = pending.pop()
            if name not in undone:
                undone.add(name)
                made = set(self.stages[name].makes)
                pending += [other.name for other in self.stages.values() if made & set(other.needs)]
        dead: dict[WorkerId, set[str]] = {}
        for name in undone:
            self._end_lease(slot, name)
            slot.done.discard(name)
            for column in self.stages[name].makes:
                slot.inline.pop(column, None)
                holding = slot.tensors.pop(column, None)
                for worker in holding.holders if holding else ():
                    dead.setdefault(worker, set()).add(column)
        if slot.spans_of in undone:
            slot.spans, slot.spans_of = (), ""
        self._refresh(slot)
        return dead

    def close(self, group: Group) -> None:
        """The group leaves the board: trained, scored or dropped."""
        for slot in group.slots:
            for stage in list(slot.leases):
                self._end_lease(slot, stage)
            for spec in self.stages.values():
                self.ready[spec.name].discard(group.id if spec.whole_groups else slot.id)
            del self.slots[slot.id]
        del self.groups[group.id]

    def ready_slots(self, stage: str) -> Iterator[Slot]:
        return (self.slots[SlotId(item)] for item in self.ready[stage].oldest_first())

    def ready_groups(self, stage: str) -> Iterator[Group]:
        return (self.groups[GroupId(item)] for item in self.ready[stage].oldest_first())

    def is_complete(self, group: Group) -> bool:
        """Every stage of the group's flow is done on every slot."""
        names = [stage.name for stage in self.stages.values() if stage.flow in ("", group.flow)]
        return all(name in slot.done for slot in group.slots for name in names)

    @staticmethod
    def lose_copies(tensors: dict[str, Holding], worker: WorkerId) -> None:
        """``worker`` has none of these any more."""
        for holding in tensors.values():
            holding.owners.discard(worker)
            holding.sent.pop(worker, None)

    def maker_of(self, column: str) -> str | None:
        """The stage that makes a column; None for what comes with the offer."""
        return next((stage.name for stage in self.stages.values() if column in stage.makes), None)

    def holding(self, column: str, item: int) -> Holding:
        """Who has this column of a slot or group."""
        if self.columns[column].scope == "group":
            return self.groups[GroupId(item)].tensors[column]
        return self.slots[SlotId(item)].tensors[column]

    def find_holding(self, column: str, item: int) -> Holding | None:
        """Like `holding`, for what may be gone or may never have been: None then."""
        spec = self.columns.get(column)
        if spec is None:
            return None
        row = self.groups.get(GroupId(item)) if spec.scope == "group" else self.slots.get(SlotId(item))
        return row.tensors.get(column) if row is not None else None

    def length(self, column: str, item: int) -> int:
        return self.holding(column, item).length

    def _end_lease(self, slot: Slot, stage: str) -> None:
        lease = slot.leases.pop(stage, None)
        if lease is not None:
            del self.leases[lease.id]

    def _refresh(self, slot: Slot) -> None:
        for stage in self.stages.values():
            if stage.flow not in ("", slot.group.flow):
                continue
            queue = self.ready[stage.name]
            item = slot.group.id if stage.whole_groups else slot.id
            if self._is_ready(slot.group.slots if stage.whole_groups else [slot], stage):
                queue.add(item)
            else:
                queue.discard(item)

    @staticmethod
    def _is_ready(slots: Sequence[Slot], stage: Stage) -> bool:
        return all(
            stage.name not in slot.done and stage.name not in slot.leases and all(map(slot.has, stage.needs))
            for slot in slots
        )
