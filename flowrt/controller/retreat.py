"""What happens to a slot when work is lost: leases given back, columns made again, samples too old dropped."""

from collections import defaultdict

from flowrt.controller.admission import Admission
from flowrt.controller.board import Board
from flowrt.controller.events import Command, Record, Send
from flowrt.controller.settings import Dataflow
from flowrt.controller.slots import Group, Lease, Slot
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.transfers import Lanes
from flowrt.ids import WorkerId
from flowrt.wire.messages import Abandon, Free


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
        """Leases come back; if a peer's tensors never came, the worker does not hold them after all."""
        for lease_id in message.leases:
            lease = self._board.find_lease(lease_id, worker)
            if lease is not None:
                self.give_back(lease)
                if message.peer:
                    self._forget_copies(self._board.slots[lease.slot], lease.stage, worker)
        if message.peer:
            self._lanes.abandon(worker, WorkerId(message.peer))

    def give_back(self, lease: Lease) -> None:
        """End a lease without a result; for a stage of whole groups, those of the whole group."""
        group = self._board.slots[lease.slot].group
        if self._board.stages[lease.stage].whole_groups:
            for slot in group.slots:
                if lease.stage in slot.leases:
                    self._board.release(slot.leases[lease.stage])
            self._window.put_back(group)
            self._record(group, "in_flight", "lease given back")
        else:
            self._board.release(lease)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: its leases come back, columns that only it held are made again."""
        self._lanes.abandon(worker)
        for lease in [lease for lease in self._board.leases.values() if lease.worker == worker]:
            if lease.id in self._board.leases:
                self.give_back(lease)
        for slot in list(self._board.slots.values()):
            for column in self._board.lose_copies(slot.tensors, worker):
                stage = self._board.maker_of(column)
                if stage is not None and stage in slot.done:
                    self._undo(slot, stage)
        for group in self._board.groups.values():
            self._board.lose_copies(group.tensors, worker)

    def _forget_copies(self, slot: Slot, stage: str, worker: WorkerId) -> None:
        for column in self._board.stages[stage].needs:
            holding = slot.tensors.get(column) or slot.group.tensors.get(column)
            if holding is not None and worker not in holding.owners:
                holding.holders.discard(worker)

    def _undo(self, slot: Slot, stage: str) -> None:
        if slot.group.id in self._window.taken and self._flow.train_stage in slot.leases:
            self.give_back(slot.leases[self._flow.train_stage])
        for worker, columns in self._board.undo(slot, stage).items():
            self._out.append(Send(worker, Free(tuple(sorted(columns)), (slot.id,), ())))

    def _record(self, group: Group, state: str, reason: str) -> None:
        self._out.append(Record(group.prompt, group.epoch, state, self._window.step, reason))
