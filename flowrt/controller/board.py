"""The board: every transition of a slot, in one place.

A slot is ready for a stage when every column that the stage needs exists, the stage has not been done and
nobody has a lease on it. A stage that takes whole groups is ready when all its slots are. Undoing a stage undoes
what was made from its columns, so nothing derived from a lost tensor survives it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from flowrt.controller.dispatch import Queue
from flowrt.controller.flows import Flows
from flowrt.controller.slots import NO_STEP, Group, Holding, Lease, Slot, made
from flowrt.errors import LocalProtocolError
from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.wire.records import Column, Stage


class Board:
    """All live groups and their slots. ``changed`` collects the stages for which something has become ready."""

    def __init__(
        self, columns: Sequence[Column], stages: Sequence[Stage], make_queue: Callable[[Stage], Queue]
    ) -> None:
        self.flows = flows = Flows(columns, stages)
        self.columns, self.stages, self._bits = flows.columns, flows.stages, flows.bits
        self.groups: dict[GroupId, Group] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.ready: dict[str, Queue] = {s.name: make_queue(s) for s in stages if not s.whole_groups}
        self.ready_groups: dict[str, dict[GroupId, Group]] = {s.name: {} for s in stages if s.whole_groups}
        self.changed: set[str] = set()
        self.freed = False  # rows have gone: somebody may wait for their room
        self.undone = {stage.name: 0 for stage in stages}  # live slots for which the stage has not been done
        self.rows: Counter[str] = Counter()  # live slots of each flow, and the bytes of their tensors
        self.bytes: Counter[str] = Counter()
        self.begin_at(0)

    def begin_at(self, number: int) -> None:
        """Groups, slots and leases get numbers from here on: none that somebody may remember under another meaning."""
        self._next_group = self._next_slot = self._next_lease = self.first_lease = number

    def is_done(self, slot: Slot, stage: str) -> bool:
        return bool(slot.done & self._bits[stage])

    # ---- the walk of a slot

    def open(
        self,
        flow: str,
        prompts: Sequence[int],
        epoch: int,
        members: int,
        at_least: int,
        owner: WorkerId,
        lengths: Mapping[str, Sequence[int]],
        tags: Mapping[str, Sequence[float]],
    ) -> list[Group]:
        """Add a group of ``members`` slots for each prompt; ``owner`` holds the group columns.

        ``lengths`` has one number a prompt for each of them, ``tags`` (inline columns) one number a slot.
        """
        groups, slots = made(flow, prompts, epoch, members, at_least, self._next_group, self._next_slot)
        first_group, first_slot = self._next_group, self._next_slot
        self._next_group += len(groups)
        self._next_slot += len(slots)
        self.groups.update(zip(cast(Sequence[GroupId], range(first_group, self._next_group)), groups, strict=True))
        self.slots.update(zip(cast(Sequence[SlotId], range(first_slot, self._next_slot)), slots, strict=True))
        self.rows[flow] += len(slots)
        for column, of_group in lengths.items():
            self.bytes[flow] += sum(of_group) * self.flows.item_bytes[column]
            for group, length in zip(groups, of_group, strict=True):
                group.keep(column, Holding(length, {owner}))
        self._tell(slots, tags)
        for stage in self.flows.of(flow):
            self.undone[stage.name] += len(slots)
            if slots and all(map(slots[0].has, stage.needs)):
                self._enqueue(stage, groups, slots)
        return groups

    def _enqueue(self, stage: Stage, groups: Sequence[Group], slots: Iterable[Slot]) -> None:
        self.changed.add(stage.name)
        if stage.whole_groups:
            self.ready_groups[stage.name].update((group.id, group) for group in groups)
        else:
            self.ready[stage.name].add(slots)

    def lease(
        self,
        stage: str,
        slots: Sequence[Slot],
        worker: WorkerId,
        deadline_s: float,
        version: int,
        step: int = NO_STEP,
        number: LeaseId | None = None,
    ) -> Lease:
        """Give the right to run ``stage`` on these slots, which have left its queue, to ``worker``.

        A lease that is renewed keeps its ``number``.
        """
        bit = self._bits[stage]
        if number is None:
            number = LeaseId(self._next_lease)
            self._next_lease += 1
        leased = {}
        for slot in slots:
            if stage in slot.leases or slot.done & bit:
                raise LocalProtocolError(f"slot {slot.id} (stage {stage}) is not ready and cannot be leased")
            leased[slot.id] = slot
        lease = self.leases[number] = Lease(number, stage, worker, deadline_s, version, step, leased)
        for slot in slots:
            slot.leases[stage] = lease
        if self.stages[stage].whole_groups:
            for slot in slots:
                self.ready_groups[stage].pop(slot.group.id, None)
        return lease

    def find_lease(self, lease_id: int, worker: WorkerId) -> Lease | None:
        """The lease, if it is still valid and this worker's."""
        lease = self.leases.get(LeaseId(lease_id))
        return lease if lease is not None and lease.worker == worker else None

    def finish(self, lease: Lease) -> list[Slot]:
        """A stage that makes nothing is done for all slots of the lease; returns them."""
        stage, bit = lease.stage, self._bits[lease.stage]
        slots = [*lease.slots.values()]
        for slot in slots:
            del slot.leases[stage]
            slot.done |= bit
        lease.slots.clear()
        del self.leases[lease.id]
        self._settle(stage, lease.worker, slots)
        return slots

    def commit(
        self,
        lease: Lease,
        slots: Sequence[Slot],
        lengths: Mapping[str, Sequence[int]],
        inline: Mapping[str, Sequence[float]],
        spans: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """The stage is done for these slots of the lease: its columns become visible at once, all of them."""
        stage, worker, bit = lease.stage, lease.worker, self._bits[lease.stage]
        for slot in slots:
            del slot.leases[stage], lease.slots[slot.id]
            slot.done |= bit
        if not lease.slots:
            del self.leases[lease.id]
        self._settle(stage, worker, slots)
        self._tell(slots, inline)
        for column, of_slot in lengths.items():
            for slot, length in zip(slots, of_slot, strict=True):
                slot.keep(column, Holding(length, {worker}))
                self.bytes[slot.group.flow] += length * self.flows.item_bytes[column]
        if spans:
            for slot, span in zip(slots, spans, strict=True):
                slot.spans, slot.spans_of = span, stage
        for after in self.flows.after[stage]:
            for slot in slots:
                self.look(slot, after)

    def release(self, slot: Slot, stage: str) -> None:
        """The lease ends without a result; the slot is ready again if its needs are still met."""
        self._end_lease(slot, stage)
        self.look(slot, self.stages[stage])

    def undo(self, slot: Slot, stage: str) -> dict[WorkerId, set[str]]:
        """Forget what ``stage`` made of this slot and all that was made from it; returns who holds dead copies."""
        undone: set[str] = set()
        pending = [stage]
        while pending:
            name = pending.pop()
            if name not in undone:
                undone.add(name)
                pending += [after.name for after in self.flows.after[name]]
        dead: dict[WorkerId, set[str]] = {}
        for name in undone:
            self._end_lease(slot, name)
            self._dequeue(slot, name)
            if slot.done & self._bits[name]:
                slot.done -= self._bits[name]
                self.undone[name] += 1
            for column in self.stages[name].makes:
                holding = slot.forget(column)
                if holding is not None:
                    self.bytes[slot.group.flow] -= holding.length * self.flows.item_bytes[column]
                    for worker in holding.holders:
                        dead.setdefault(worker, set()).add(column)
        if slot.spans_of in undone:
            slot.spans, slot.spans_of = (), ""
        for name in undone:
            self.look(slot, self.stages[name])
        return dead

    def remove(self, slot: Slot) -> None:
        """The slot leaves its group, which goes on without it."""
        self._take_off(slot)
        self._weigh_off(slot.group.flow, slot.tensors)
        self.rows[slot.group.flow] -= 1
        self.freed = True
        slot.group.slots.remove(slot)
        for name in self.ready_groups:
            if slot.group.slots:
                self.look(slot.group.slots[0], self.stages[name])

    def close(self, groups: Iterable[Group]) -> None:
        """These groups leave the board: trained, scored or dropped."""
        self.freed = True
        flow, bits, rows, live = "", 0, 0, self.slots
        ready_groups = [ready for ready in self.ready_groups.values() if ready]
        for group in groups:
            if group.flow != flow:
                self.rows[flow] -= rows
                flow, bits, rows = group.flow, self.flows.all_bits(group.flow), 0
            for slot in group.slots:
                rows += 1
                if slot.tensors:
                    self._weigh_off(flow, slot.tensors)
                if slot.done == bits:
                    del live[slot.id]
                else:
                    self._take_off(slot)
            if group.tensors:
                self._weigh_off(flow, group.tensors)
            for ready in ready_groups:
                ready.pop(group.id, None)
            del self.groups[group.id]
            group.slots.clear()  # no cycle of references: freed at once, without the collector
        if flow:
            self.rows[flow] -= rows

    def _take_off(self, slot: Slot) -> None:
        for stage in self.flows.of(slot.group.flow):
            self._end_lease(slot, stage.name)
            self._dequeue(slot, stage.name)
            if not slot.done & self._bits[stage.name]:
                self.undone[stage.name] -= 1
                self.changed.add(stage.name)
        del self.slots[slot.id]

    # ---- inside

    def _settle(self, stage: str, worker: WorkerId, slots: Sequence[Slot]) -> None:
        """The stage has been done for these, by a worker that therefore has what the stage needed of them."""
        self.undone[stage] -= len(slots)
        if not self.undone[stage]:
            self.changed.add(stage)
        for column in self.flows.fetched[stage]:
            for slot in slots:
                needed = slot.holding(column)
                if needed is not None and needed.sent.pop(worker, None) is not None:
                    needed.owners.add(worker)

    @staticmethod
    def _tell(slots: Sequence[Slot], columns: Mapping[str, Sequence[float]]) -> None:
        for column, values in columns.items():
            for slot, value in zip(slots, values, strict=True):
                slot.inline = {**slot.inline, column: value} if slot.inline else {column: value}

    def _end_lease(self, slot: Slot, stage: str) -> None:
        lease = slot.leases.pop(stage, None)
        if lease is not None:
            del lease.slots[slot.id]
            if not lease.slots:
                del self.leases[lease.id]

    def _dequeue(self, slot: Slot, stage: str) -> None:
        if stage in self.ready:
            self.ready[stage].discard(slot)
        else:
            self.ready_groups[stage].pop(slot.group.id, None)

    def _weigh_off(self, flow: str, tensors: Mapping[str, Holding]) -> None:
        for column, holding in tensors.items():
            self.bytes[flow] -= holding.length * self.flows.item_bytes[column]

    def look(self, slot: Slot, stage: Stage) -> None:
        """Queue the slot (or its group) for a stage if it has become ready for it."""
        group = slot.group
        if stage.flow not in ("", group.flow):
            return
        if all(self.is_ready(one, stage) for one in (group.slots if stage.whole_groups else (slot,))):
            self._enqueue(stage, (group,), (slot,))

    def is_ready(self, slot: Slot, stage: Stage) -> bool:
        """Nobody has done the stage for this slot or is at it, and all that it needs exists."""
        started = slot.done & self._bits[stage.name] or stage.name in slot.leases
        return not started and all(map(slot.has, stage.needs))
