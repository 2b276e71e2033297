"""The table of live slots, groups and leases: every legal change of a slot.

A slot is ready for a stage when every column that the stage needs exists, the stage has not been done and
no worker has a lease on it. A group is ready for a stage that takes whole groups when all its slots are. Undoing a
stage also undoes the stages that need its columns, so nothing that was computed from a lost tensor remains.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from flowrt.controller.policies.dispatch.base import Queue
from flowrt.controller.state.dataflow import Flows
from flowrt.controller.state.evaluations import ExactFirst, ExactGroups, ExactSamples
from flowrt.controller.state.ready_groups import ReadyGroups
from flowrt.controller.state.slots import NO_LEASE, NO_STEP, ColumnLocation, Group, Kept, Lease, Slot, new_groups
from flowrt.controller.state.worklist import Worklist
from flowrt.errors import LocalProtocolError, RemoteProtocolError
from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.protocol.messages import NO_LIMIT, Column, Stage

NO_LEASES: Mapping[LeaseId, Lease] = MappingProxyType({})


class SampleTable:
    """All live groups, their slots and leases. Changes that may unblock requests are reported to ``work``."""

    def __init__(
        self,
        columns: Sequence[Column],
        stages: Sequence[Stage],
        make_queue: Callable[[Stage], Queue],
        work: Worklist | None = None,
    ) -> None:
        self._work = Worklist() if work is None else work
        self.flows = flows = Flows(columns, stages)
        self.columns, self.stages, self._bits = flows.columns, flows.stages, flows.bits
        self.groups: dict[GroupId, Group] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.working: dict[str, dict[WorkerId, dict[LeaseId, Lease]]] = {stage.name: {} for stage in stages}
        """The leases by stage, worker and number."""
        self.held: dict[WorkerId, dict[GroupId, Group]] = {}  # the groups of which a worker is among the holders
        self.ready: dict[str, Queue] = {s.name: make_queue(s) for s in stages if not s.whole_groups}
        self.generating = {name: ExactFirst(self.ready[name]) for name in flows.generating}
        self.ready |= self.generating
        self.exact = ExactSamples()
        self.exact_groups = ExactGroups()
        self.ready_groups = {s.name: ReadyGroups() for s in stages if s.whole_groups}
        self.regenerated: dict[
            GroupId, Group
        ] = {}  # groups whose oldest version may have changed since the last `aged`
        self.undone = {stage.name: 0 for stage in stages}  # live slots for which the stage has not been done
        self.rows: Counter[str] = Counter()  # live slots of each flow, and bytes of the tensors of its groups
        self.bytes: Counter[str] = Counter()
        self.exhausted: dict[str, set[WorkerId]] = {}  # sources that reported the end of their prompts, by flow
        self.begin_at(0)

    def begin_at(self, number: int) -> None:
        """Set the first number of groups, slots and leases, above all numbers of earlier controllers."""
        self._next_group = self._next_slot = self._next_lease = self.first_lease = number

    @property
    def leases_granted(self) -> int:
        """The number of the next lease; it grows by one with each lease that is granted."""
        return self._next_lease

    def count_ready(self, stage: str) -> int:
        """Number of slots that are ready for the stage; of groups, if the stage takes whole groups."""
        return len(self.ready[stage]) if stage in self.ready else len(self.ready_groups[stage])

    def is_done(self, slot: Slot, stage: str) -> bool:
        """Whether the stage is done for the slot."""
        return bool(slot.done & self._bits[stage])

    def exhaust(self, flow: str, source: WorkerId) -> None:
        """Record that the source has no more prompts for the flow."""
        self.exhausted.setdefault(flow, set()).add(source)
        self._work.add_stages(stage.name for stage in self.flows.of(flow))

    def restore(self, groups: Iterable[Group]) -> None:
        """Add the groups of an earlier controller and queue what is ready."""
        for group in groups:
            self.groups[group.id] = group
            if group.is_exact:
                to_generate = sum(self._is_to_generate(slot) for slot in group.slots)
                self.exact.add(group.at_most, len(group.slots), to_generate)
                self.exact_groups.add(group)
            self.slots.update((slot.id, slot) for slot in group.slots)
            self.rows[group.flow] += len(group.slots)
            for tensors in (group.tensors, *(slot.tensors for slot in group.slots)):
                for column, holding in tensors.items():
                    self.bytes[group.flow] += holding.length * self.flows.item_bytes[column]
            for stage in self.flows.of(group.flow):
                self.undone[stage.name] += sum(not self.is_done(slot, stage.name) for slot in group.slots)
                for slot in group.slots[:1] if stage.whole_groups else group.slots:
                    self.enqueue_if_ready(slot, stage)

    # ---- changes of slots

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
        at_most: int = NO_LIMIT,
    ) -> list[Group]:
        """Add a group of ``members`` slots for each prompt; returns the groups.

        ``owner`` holds the group columns: ``lengths`` has the elements of each for each prompt. ``tags`` has the values
        of inline columns for each slot, ordered by group.
        """
        first_group, first_slot = self._next_group, self._next_slot
        groups, slots = new_groups(flow, prompts, epoch, members, at_least, first_group, first_slot, at_most, owner)
        self._next_group += len(groups)
        self._next_slot += len(slots)
        if len(slots) == 1:  # fast path: one slot
            self.groups[groups[0].id] = groups[0]
            self.slots[slots[0].id] = slots[0]
        else:
            self.groups.update(zip(cast(Sequence[GroupId], range(first_group, self._next_group)), groups, strict=True))
            self.slots.update(zip(cast(Sequence[SlotId], range(first_slot, self._next_slot)), slots, strict=True))
        self.rows[flow] += len(slots)
        if at_most != NO_LIMIT:
            self.exact.add(at_most, len(slots), len(slots))
            for group in groups:
                self.exact_groups.add(group)
        if flow not in self.exhausted:
            self.exhausted[flow] = set()
        for column, of_group in lengths.items():
            self.bytes[flow] += sum(of_group) * self.flows.item_bytes[column]
            for group, length in zip(groups, of_group, strict=True):
                group.set_location(column, ColumnLocation(length, {owner}))
        if lengths:
            self.note_holder(owner, groups)
        self._set_inline(slots, tags)
        for stage in self.flows.of(flow):
            self.undone[stage.name] += len(slots)
            if slots and all(map(slots[0].has, stage.needs)):
                self._enqueue(stage, groups, slots)
        return groups

    def _enqueue(self, stage: Stage, groups: Sequence[Group], slots: Iterable[Slot]) -> None:
        self._work.add_stage(stage.name)
        if stage.whole_groups:
            self.ready_groups[stage.name].add(groups)
            self._work.add_ready(group.id for group in groups)
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
        longer: bool = False,
    ) -> Lease:
        """Give the right to run ``stage`` on these slots, which have left its queue, to ``worker``.

        A lease that is renewed keeps its ``number``; a ``longer`` one may end after leases that are granted later.
        Raises LocalProtocolError if the stage is leased or done for one of the slots.
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
        of_stage = self.stages[stage]
        # Hot path: with keywords, creating a lease takes twice as long.
        lease = Lease(number, stage, worker, deadline_s, version if of_stage.generates else None, step, leased, longer)
        self.leases[number] = lease
        working = self.working[stage]
        if worker in working:
            working[worker][number] = lease
        else:
            working[worker] = {number: lease}
        for slot in slots:
            slot.leases[stage] = lease
        if of_stage.generates:
            self._note_versions(slots)
        if of_stage.whole_groups:
            for slot in slots:
                self.ready_groups[stage].discard(slot.group.id)
        return lease

    def extend(self, lease: Lease, deadline_s: float) -> None:
        """Move the deadline of a lease, and the lease to the end of the order of deadlines."""
        lease.deadline_s = deadline_s
        self.leases[lease.id] = self.leases.pop(lease.id)

    def extend_deadlines(self, seconds: float) -> None:
        """Move the deadlines of all leases, which keep their order."""
        for lease in self.leases.values():
            lease.deadline_s += seconds

    def expire(self, lease: Lease) -> None:
        """Count the expiry of a lease on its slots, whose next lease is longer."""
        for slot in lease.slots.values():
            slot.overdue += 1

    def next_attempt(self, slot: Slot) -> None:
        """Count a new attempt to generate the sample, which was lost, and with it what a journal has of it."""
        slot.attempt += 1
        if slot.has_kept:
            self.note_kept(slot, None)

    def note_kept(self, slot: Slot, kept: Kept | None) -> None:
        """Replace what a journal has of a sample; None: nothing that can be used."""
        slot.note_kept(kept)
        self._note_versions((slot,))

    def find_lease(self, lease_id: int, worker: WorkerId) -> Lease | None:
        """The lease, if it has not ended and belongs to this worker; otherwise None."""
        lease = self.leases.get(LeaseId(lease_id))
        return lease if lease is not None and lease.worker == worker else None

    def leases_of(self, worker: WorkerId) -> list[Lease]:
        """The leases of a worker, by stage in the order of the dataflow."""
        return [lease for workers in self.working.values() for lease in workers.get(worker, NO_LEASES).values()]

    def has_lease(self, worker: WorkerId) -> bool:
        """Whether the worker has a lease."""
        return any(worker in workers for workers in self.working.values())

    # ---- holders

    def note_holder(self, worker: WorkerId, groups: Iterable[Group]) -> None:
        """Note that the worker holds, or is sent, tensors of these groups or of their slots."""
        held = self.held.get(worker)
        if held is None:
            held = self.held[worker] = {}
        for group in groups:
            if worker not in group.holders:
                group.holders = {**group.holders, worker: None}
                held[group.id] = group

    def held_by(self, worker: WorkerId) -> list[Group]:
        """The groups of which the worker may hold tensors, in order of issue."""
        held = self.held.get(worker)
        return [held[number] for number in sorted(held)] if held else []

    def lose_holder(self, worker: WorkerId) -> list[Group]:
        """Remove a worker from the holders; returns the groups of which it may have held tensors, in order of issue."""
        groups = self.held_by(worker)
        self.held.pop(worker, None)
        for group in groups:
            group.holders = {holder: None for holder in group.holders if holder != worker}
        return groups

    def check_leases(self, numbers: Iterable[int], worker: WorkerId, stage: str = "") -> None:
        """Raises RemoteProtocolError for a lease that was never granted, or belongs to another worker or stage."""
        for number in numbers:
            lease, fault = self.leases.get(LeaseId(number)), ""
            if lease is None:
                fault = "was never given" if number >= self._next_lease or number < NO_LEASE else ""
            elif lease.worker != worker:
                fault = f"is of {lease.worker}"
            elif stage and lease.stage != stage:
                fault = f"is on stage {lease.stage!r}"
            if fault:
                work = f" for stage {stage[:80]!r}" if stage else ""
                raise RemoteProtocolError(f"{worker} uses lease {number}{work}, which {fault}")

    def finish(self, lease: Lease) -> list[Slot]:
        """Mark a stage that makes no columns as done for all slots of the lease; returns the slots."""
        stage, bit = lease.stage, self._bits[lease.stage]
        slots = [*lease.slots.values()]
        for slot in slots:
            del slot.leases[stage]
            slot.done |= bit
        lease.slots.clear()
        self._close(lease)
        self._count_done(stage, lease.worker, slots)
        return slots

    def end_training(self, stage: str, groups: Iterable[Group]) -> None:
        """Mark the train stage as done for all slots of these groups, which a trainer has leased."""
        bit, done = self._bits[stage], 0
        for group in groups:
            for slot in group.slots:
                lease = slot.leases.pop(stage)
                del lease.slots[slot.id]
                if not lease.slots:
                    self._close(lease)
                slot.done |= bit
            done += len(group.slots)
        self.undone[stage] -= done

    def commit(
        self,
        lease: Lease,
        slots: Sequence[Slot],
        lengths: Mapping[str, Sequence[int]],
        inline: Mapping[str, Sequence[float]],
        spans: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Mark the stage as done for these slots of the lease; all its columns become visible at once.

        For each slot, ``lengths`` has the elements of each tensor column, which the worker of the lease holds,
        ``inline`` the value of each inline column, and ``spans`` the version span (version, tokens, version, tokens,
        ...).
        """
        stage, worker, bit = lease.stage, lease.worker, self._bits[lease.stage]
        for slot in slots:
            del slot.leases[stage], lease.slots[slot.id]
            slot.done |= bit
        if not lease.slots:
            self._close(lease)
        self._count_done(stage, worker, slots)
        if inline:
            self._set_inline(slots, inline)
        for column, of_slot in lengths.items():
            for slot, length in zip(slots, of_slot, strict=True):
                slot.set_location(column, ColumnLocation(length, {worker}))
                self.bytes[slot.group.flow] += length * self.flows.item_bytes[column]
        if lengths:
            self.note_holder(worker, [slot.group for slot in slots])
        if spans:
            for slot, span in zip(slots, spans, strict=True):
                slot.spans, slot.spans_of = span, stage
                if slot.has_kept or min(span[::2]) != lease.version:  # else it counted with this version before
                    self._note_versions((slot,))
        for after in self.flows.after[stage]:
            for slot in {slot.group.id: slot for slot in slots}.values() if after.whole_groups else slots:
                self.enqueue_if_ready(slot, after)

    def release(self, slot: Slot, stage: str) -> None:
        """End a lease without a result; the slot is ready again if its needs are still met."""
        self._end_lease(slot, stage)
        self.enqueue_if_ready(slot, self.stages[stage])

    def undo(self, slot: Slot, stage: str) -> dict[WorkerId, set[str]]:
        """Undo ``stage`` and all stages that depend on it for a slot; returns the removed tensor columns by holder."""
        undone = self.flows.undone_with(stage)
        dead: dict[WorkerId, set[str]] = {}
        for other in slot.group.slots:
            for name in self.flows.undone_for_group(undone) if other is not slot else ():
                self._unmark(other, name)
                for column in self.stages[name].makes:
                    other.forget(column)  # an inline column, which has no holders
        for name in undone:
            self._unmark(slot, name)
            for column in self.stages[name].makes:
                holding = slot.forget(column)
                if holding is not None:
                    self.bytes[slot.group.flow] -= holding.length * self.flows.item_bytes[column]
                    for worker in holding.holders:
                        dead.setdefault(worker, set()).add(column)
        if slot.spans_of in undone:
            slot.spans, slot.spans_of = (), ""
            self._note_versions((slot,))
        for name in undone:
            self.enqueue_if_ready(slot, self.stages[name])
        return dead

    def _unmark(self, slot: Slot, stage: str) -> None:
        """End the lease of the slot for this stage, take it out of the queue, and mark the stage as not done."""
        self._end_lease(slot, stage)
        self._dequeue(slot, stage)
        if slot.done & self._bits[stage]:
            slot.done -= self._bits[stage]
            self.undone[stage] += 1
            if slot.group.is_exact and self.stages[stage].generates:
                self.exact.generated(slot.group.at_most, -1)

    def remove(self, slot: Slot) -> None:
        """Remove a slot; its group continues without it."""
        self._take_off(slot)
        self._weigh_off(slot.group.flow, slot.tensors)
        self.rows[slot.group.flow] -= 1
        self._work.add_offers()
        slot.group.slots.remove(slot)
        self._note_versions((slot,))
        for name in self.ready_groups:
            if slot.group.slots:
                self.enqueue_if_ready(slot.group.slots[0], self.stages[name])

    def close(self, groups: Iterable[Group]) -> None:
        """Remove groups that are trained, scored or dropped."""
        self._work.add_offers()
        flow, bits, rows, live = "", 0, 0, self.slots
        ready_groups = [ready for ready in self.ready_groups.values() if ready]
        has_exact = bool(self.exact.live)
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
                    if has_exact and group.is_exact:
                        self.exact.remove(group.at_most, to_generate=False)
                else:
                    self._take_off(slot)
            if has_exact and group.is_exact:
                self.exact_groups.discard(group)
            if group.tensors:
                self._weigh_off(flow, group.tensors)
            for worker in group.holders if group.holders else ():
                self._forget_holder(worker, group)
            for ready in ready_groups:
                ready.discard(group.id)
            del self.groups[group.id]
            group.slots.clear()  # break the reference cycle, so that memory is freed without the garbage collector
        if flow:
            self.rows[flow] -= rows

    def _forget_holder(self, worker: WorkerId, group: Group) -> None:
        held = self.held[worker]
        del held[group.id]
        if not held:
            del self.held[worker]

    def _is_to_generate(self, slot: Slot) -> bool:
        return not all(slot.done & self._bits[stage] for stage in self.flows.generating)

    def _take_off(self, slot: Slot) -> None:
        if slot.group.is_exact:
            self.exact.remove(slot.group.at_most, to_generate=self._is_to_generate(slot))
        for stage in self.flows.of(slot.group.flow):
            self._end_lease(slot, stage.name)
            self._dequeue(slot, stage.name)
            if not slot.done & self._bits[stage.name]:
                self.undone[stage.name] -= 1
                self._work.add_stage(stage.name)
        del self.slots[slot.id]

    # ---- helpers

    def _count_done(self, stage: str, worker: WorkerId, slots: Sequence[Slot]) -> None:
        """Update the counters for a stage that is done; its worker now owns the columns that the stage needed."""
        self.undone[stage] -= len(slots)
        if not self.undone[stage]:
            self._work.add_stage(stage)
        if self.exact.live and self.stages[stage].generates:
            for slot in slots:
                if slot.group.is_exact:
                    self.exact.generated(slot.group.at_most)
        for column in self.flows.fetched[stage]:
            for slot in slots:
                needed = slot.holding(column)
                if needed is not None and worker in needed.copies:
                    del needed.copies[worker]
                    needed.owners.add(worker)

    @staticmethod
    def _set_inline(slots: Sequence[Slot], columns: Mapping[str, Sequence[float]]) -> None:
        for column, values in columns.items():
            for slot, value in zip(slots, values, strict=True):
                slot.inline = {**slot.inline, column: value} if slot.inline else {column: value}

    def _close(self, lease: Lease) -> None:
        del self.leases[lease.id]
        workers = self.working[lease.stage]
        del workers[lease.worker][lease.id]
        if not workers[lease.worker]:
            del workers[lease.worker]

    def _end_lease(self, slot: Slot, stage: str) -> None:
        lease = slot.leases.pop(stage, None)
        if lease is not None:
            del lease.slots[slot.id]
            if not lease.slots:
                self._close(lease)
            if lease.version is not None:
                self._note_versions((slot,))

    def _note_versions(self, slots: Iterable[Slot]) -> None:
        if self.ready_groups:  # a stream has no train stage and no staleness
            for slot in slots:
                self.regenerated[slot.group.id] = slot.group

    def aged(self) -> list[Group]:
        """Live groups whose oldest version may have changed since the last call."""
        aged = [group for group in self.regenerated.values() if group.id in self.groups]
        self.regenerated.clear()
        return aged

    def _dequeue(self, slot: Slot, stage: str) -> None:
        if stage in self.ready:
            self.ready[stage].discard(slot)
        else:
            self.ready_groups[stage].discard(slot.group.id)

    def _weigh_off(self, flow: str, tensors: Mapping[str, ColumnLocation]) -> None:
        for column, holding in tensors.items():
            self.bytes[flow] -= holding.length * self.flows.item_bytes[column]

    def enqueue_if_ready(self, slot: Slot, stage: Stage) -> None:
        """Queue the slot (or its group) for a stage if it is ready for it."""
        group = slot.group
        if stage.flow not in ("", group.flow):
            return
        if all(self.is_ready(member, stage) for member in (group.slots if stage.whole_groups else (slot,))):
            self._enqueue(stage, (group,), (slot,))

    def is_ready(self, slot: Slot, stage: Stage) -> bool:
        """Whether the stage is neither done nor leased for this slot, and all columns that it needs exist."""
        started = slot.done & self._bits[stage.name] or stage.name in slot.leases
        return not started and all(map(slot.has, stage.needs))
