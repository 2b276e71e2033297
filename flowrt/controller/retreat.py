"""What happens to a slot when work is lost: leases given back, columns made again, samples too old dropped."""

from collections import defaultdict
from collections.abc import Iterable

from flowrt.controller.admission import Admission
from flowrt.controller.board import Board
from flowrt.controller.events import Command, Record, Send
from flowrt.controller.settings import Dataflow
from flowrt.controller.slots import Group, Lease, Slot
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.transfers import Lanes
from flowrt.ids import SlotId, WorkerId
from flowrt.wire.messages import Abandon, Free
from flowrt.wire.records import Incoming


class Retreat:
    """The ways back; every one of them leaves the slot ready for the stage that has to run again."""

    def __init__(
        self,
        board: Board,
        window: TrainingWindow,
        lanes: Lanes,
        admission: Admission,
        flow: Dataflow,
        out: list[Command],
    ) -> None:
        self._board = board
        self._window = window
        self._lanes = lanes
        self._admission = admission
        self._flow = flow
        self._out = out
        self.dropped: dict[str, int] = defaultdict(int)

    def expired(self, slot: Slot) -> bool:
        """The sample is older than the bound allows in the step that is in training."""
        oldest = slot.oldest_version()
        if oldest is None or slot.group.flow != self._flow.train_flow:
            return False
        return not self._admission.may_train(self._window.step, oldest)

    def drop(self, slot: Slot, reason: str) -> None:
        """Forget what was generated for this slot and offer its prompt again."""
        self.dropped[reason] += 1
        self._record(slot.group, "dropped", reason)
        slot.attempt += 1
        self._undo(slot, slot.spans_of)
        self._record(slot.group, "in_flight", "offered again")

    def drop_expired(self) -> None:
        """Drop every finished sample that no step can train any more."""
        for group_id in list(self._window.waiting):
            for slot in self._board.groups[group_id].slots:
                if self.expired(slot):
                    self.drop(slot, "over-age")

    def abandon(self, worker: WorkerId, message: Abandon) -> None:
        """The worker gives leases back."""
        for lease_id in message.leases:
            lease = self._board.find_lease(lease_id, worker)
            if lease is not None:
                self.give_back(lease)

    def undelivered(self, worker: WorkerId, incoming: Incoming) -> None:
        """What this turn was to bring never came: the worker does not hold it after all."""
        self._lanes.abandon(incoming.turn)
        for part in incoming.parts:
            for item in part.ids:
                holding = self._board.find_holding(part.column, item)
                if holding is not None and holding.sent.get(worker) == incoming.turn:
                    del holding.sent[worker]
                slot = self._board.slots.get(SlotId(item))
                if slot is not None and self._board.columns[part.column].scope == "slot":
                    self._make_again(slot)

    def give_back(self, lease: Lease) -> None:
        """End a lease without a result; for a stage of whole groups, those of the whole group."""
        group = self._board.slots[lease.slot].group
        if self._board.stages[lease.stage].whole_groups:
            for slot in group.slots:
                if lease.stage in slot.leases:
                    self._board.release(slot.leases[lease.stage])
            self._window.put_back(group)
            self._record(group, "ready", "lease given back")
            for slot in group.slots:
                self._make_again(slot)
        else:
            self._board.release(lease)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: its leases come back, columns that only it held are made again."""
        self._lanes.forget(worker)
        for lease in [lease for lease in self._board.leases.values() if lease.worker == worker]:
            if lease.id in self._board.leases:
                self.give_back(lease)
        for slot in list(self._board.slots.values()):
            self._board.lose_copies(slot.tensors, worker)
            self._make_again(slot)
        for group in list(self._board.groups.values()):
            self._board.lose_copies(group.tensors, worker)
            if group.id not in self._window.taken and not all(one.owners for one in group.tensors.values()):
                self._give_up(group)

    def _make_again(self, slot: Slot) -> None:
        """Undo the stages whose tensors nobody owns any more, unless a trainer may just be receiving them."""
        training = slot.leases.get(self._flow.train_stage)
        for column, holding in list(slot.tensors.items()):
            stage = self._board.maker_of(column)
            if holding.owners or (training is not None and training.worker in holding.sent):
                continue
            if stage is not None and stage in slot.done:
                self._undo(slot, stage)

    def _give_up(self, group: Group) -> None:
        """Its prompt has left with whoever offered it."""
        reason = "its source left"
        self.dropped[reason] += 1
        if group.flow == self._flow.train_flow:
            self._record(group, "dropped", reason)
            self._window.leave(group)
        for worker, free in frees([group]).items():
            self._out.append(Send(worker, free))
        self._board.close(group)

    def _undo(self, slot: Slot, stage: str) -> None:
        if slot.group.id in self._window.taken and self._flow.train_stage in slot.leases:
            self.give_back(slot.leases[self._flow.train_stage])
        if slot.group.id in self._board.ready[self._flow.train_stage]:
            self._record(slot.group, "in_flight", f"{stage} runs again")
        for worker, columns in self._board.undo(slot, stage).items():
            self._out.append(Send(worker, Free(tuple(sorted(columns)), (slot.id,), ())))

    def _record(self, group: Group, state: str, reason: str) -> None:
        self._out.append(Record(group.prompt, group.epoch, state, self._window.step, reason))


def frees(groups: Iterable[Group]) -> dict[WorkerId, Free]:
    """What each worker that has something of these groups has to drop."""
    of: dict[WorkerId, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for group in groups:
        for worker in {worker for holding in group.tensors.values() for worker in holding.holders}:
            of[worker][1].append(group.id)
        for slot in group.slots:
            for worker in {worker for holding in slot.tensors.values() for worker in holding.holders}:
                of[worker][0].append(slot.id)
    return {worker: Free((), tuple(slots), tuple(ids)) for worker, (slots, ids) in of.items()}
