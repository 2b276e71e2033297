"""What happens to a slot when work is lost: leases given back, columns made again, samples too old dropped."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from flowrt.controller.admission import Admission
from flowrt.controller.board import Board
from flowrt.controller.events import Command, Keep, Record, Send
from flowrt.controller.settings import Dataflow, LostMember, Settings
from flowrt.controller.slots import Group, Slot
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.tally import LONGEST, Tally
from flowrt.controller.transfers import Lanes, check_receiver, find_holding, lose_copies
from flowrt.controller.walk import Left, Unmade
from flowrt.errors import RemoteProtocolError
from flowrt.ids import LeaseId, SlotId, WorkerId
from flowrt.wire.messages import Abandon, Free, Signal
from flowrt.wire.records import GONE, Incoming

ALONE = 2
"""A group whose policy is to train the rest needs so many: a lone sample has nothing to be compared with."""


class Retreat:
    """The ways back; every one of them leaves the slot ready for the stage that has to run again."""

    def __init__(
        self,
        board: Board,
        window: TrainingWindow,
        lanes: Lanes,
        admission: Admission,
        settings: Settings,
        flow: Dataflow,
        out: list[Command],
    ) -> None:
        self._board = board
        self._window = window
        self._lanes = lanes
        self._admission = admission
        self._settings = settings
        self._flow = flow
        self._out = out
        self._makers = {column: stage.name for stage in flow.stages for column in stage.makes}
        self.dropped = Tally()
        self.patient = False  # whoever has what nobody owns may come back: it is not lost yet

    # ---- samples that are no use any more

    def expired(self, slot: Slot) -> bool:
        """The sample is older than the bound allows in the step that is in training."""
        oldest = slot.oldest_version()
        if oldest is None or slot.group.flow != self._flow.train_flow:
            return False
        return not self._admission.may_train(self._window.step, oldest)

    def drop_expired(self) -> None:
        """Lose every finished sample that no step can train any more."""
        for group_id in list(self._window.waiting):
            group = self._board.groups[group_id]
            for slot in list(group.slots):
                if slot.id in self._board.slots and self.expired(slot):
                    self.lose(slot, "over-age")

    def lose(self, slot: Slot, reason: str, failed: bool = False) -> None:
        """This sample cannot be used; the run's policy says what becomes of its group.

        ``failed``: somebody tried to make it and could not, which is not repeated for ever.
        """
        group = slot.group
        self._give_back_group(group)
        if slot.id not in self._board.slots:
            return  # giving it back has shown that it is lost, and dealt with it
        self.dropped.count(reason)
        slot.attempt += 1
        policy = self._settings.lost_member
        if policy is LostMember.REST and len(group.slots) > ALONE:
            for worker in {worker for holding in slot.tensors.values() for worker in holding.holders}:
                self._out.append(Send(worker, Free((), (slot.id,), ())))
            self._keep(Left((), (slot.id,)))
            self._board.remove(slot)
            self._look_again(group)
        elif policy is not LostMember.REFILL or (failed and slot.attempt >= self._settings.attempts):
            self._give_up(group, f"{reason}; that was attempt {slot.attempt} at sample {slot.member}")
        else:
            self.record(group, "dropped", reason)
            if slot.spans_of:
                self._undo(slot, slot.spans_of)
            else:
                self._keep(Unmade(slot.id, "", slot.attempt))
            self.record(group, "in_flight", "offered again")

    def _look_again(self, group: Group) -> None:
        """A group without one of its members may be ready to train, or done."""
        if group.flow == self._flow.train_flow:
            if group.id in self._board.ready_groups[self._flow.train_stage]:
                self.record(group, "ready", "without a lost sample")
        elif self._board.flows.complete([group]):
            self.close([group])

    # ---- leases that end without a result

    def abandon(self, worker: WorkerId, message: Abandon) -> None:
        """The worker gives leases back, or says that it cannot make these samples."""
        if len(message.slots) != len(message.leases):
            raise RemoteProtocolError(
                f"{worker} gave back {len(message.slots)} slots of {len(message.leases)} leases; there is one for each"
            )
        for slot_id, lease_id in zip(message.slots, message.leases, strict=True):
            lease = self._board.find_lease(lease_id, worker)
            slot = lease.slots.get(SlotId(slot_id)) if lease is not None else None
            if lease is None or slot is None:
                continue
            self.give_back(slot, lease.stage)
            if message.lost:
                self.lose(slot, f"{lease.stage} failed: {message.reason[:LONGEST]}", failed=True)

    def expire_leases(self, now: float) -> None:
        """Give back what was not done by its deadline; what is begun again gets twice the time that it had."""
        expired = []
        # In order of their deadlines: each lasts equally long, but for those of trainers, which have none.
        for lease in self._board.leases.values():
            if lease.deadline_s <= now:
                expired.append(lease)
            elif not (lease.longer or math.isinf(lease.deadline_s)):
                break
        for lease in expired:
            for slot in lease.slots.values():
                slot.overdue += 1
            self._give_back_all(lease.id)

    def _give_back_all(self, lease_id: LeaseId) -> None:
        while (lease := self._board.leases.get(lease_id)) is not None:
            self.give_back(next(iter(lease.slots.values())), lease.stage)

    def give_back(self, slot: Slot, stage: str) -> None:
        """End a lease on a slot without a result; for a stage of whole groups, those of the whole group."""
        if self._board.stages[stage].whole_groups:
            self._give_back_group(slot.group)
        else:
            self._board.release(slot, stage)

    def _give_back_group(self, group: Group) -> None:
        stage = self._flow.train_stage
        if group.id not in self._window.taken:
            return
        for slot in group.slots:
            if stage in slot.leases:
                self._board.release(slot, stage)
        self._window.put_back(group)
        self.record(group, "ready", "lease given back")
        for slot in list(group.slots):
            if slot.id in self._board.slots:
                self._make_again(slot)
        self._drop_sourceless(group)

    # ---- tensors that are not where they should be

    def undelivered(self, worker: WorkerId, incoming: Incoming, reason: str) -> None:
        """What this turn was to bring never came: the worker does not hold it after all."""
        unknown = [part.column for part in incoming.parts if part.column not in self._board.columns]
        if unknown:
            raise RemoteProtocolError(f"{worker} did not receive columns {unknown[:3]}, which do not exist")
        check_receiver(worker, incoming.turn)
        self._lanes.abandon(incoming.turn)
        self._lanes.note("samples", worker, reason)
        for part in incoming.parts:
            for item in part.ids:
                holding = find_holding(self._board, part.column, item)
                if holding is not None and holding.sent.get(worker) == incoming.turn:
                    del holding.sent[worker]
                slot = self._board.slots.get(SlotId(item))
                if slot is not None and self._board.columns[part.column].scope == "slot":
                    self._make_again(slot)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: its leases come back, columns that only it held are made again."""
        for peer in self._lanes.forget(worker):
            self._out.append(Send(peer, Signal(worker, "", GONE, b"")))
        for lease in [lease for lease in self._board.leases.values() if lease.worker == worker]:
            self._give_back_all(lease.id)
        for slot in list(self._board.slots.values()):
            if slot.tensors and slot.id in self._board.slots:
                lose_copies(slot.tensors, worker)
                self._make_again(slot)
        for group in list(self._board.groups.values()):
            lose_copies(group.tensors, worker)
            self._drop_sourceless(group)

    def look_over(self) -> None:
        """What nobody owns is made again, wherever it is."""
        for slot in list(self._board.slots.values()):
            if slot.tensors and slot.id in self._board.slots:
                self._make_again(slot)
        for group in list(self._board.groups.values()):
            self._drop_sourceless(group)

    def needs(self, worker: WorkerId) -> bool:
        """Whether something would be lost if this worker left now: what it works on, and what nobody else has."""
        if any(lease.worker == worker for lease in self._board.leases.values()):
            return True
        slots = (slot.tensors for slot in self._board.slots.values())
        groups = (group.tensors for group in self._board.groups.values())
        alone = {worker}
        return any(holding.owners == alone for tensors in (*slots, *groups) for holding in tensors.values())

    def _drop_sourceless(self, group: Group) -> None:
        """Nobody can send this prompt any more, unless a trainer may just be receiving it."""
        owned = self.patient or all(one.owners for one in group.tensors.values())
        if not owned and group.id in self._board.groups and group.id not in self._window.taken:
            self.dropped.count("its source left")
            self._give_up(group, "its source left", "unread")

    def _make_again(self, slot: Slot) -> None:
        """Undo the stages whose tensors nobody owns any more, unless a trainer may just be receiving them."""
        if self.patient:
            return
        training = slot.leases.get(self._flow.train_stage)
        for column, holding in list(slot.tensors.items()):
            stage = self._makers.get(column)
            if slot.id not in self._board.slots:
                return  # what was done about another column has dealt with it
            if holding.owners or (training is not None and training.worker in holding.sent):
                continue
            if stage is None or not self._board.is_done(slot, stage):
                continue
            if stage == slot.spans_of and self._settings.lost_member is not LostMember.REFILL:
                self.lose(slot, "its holder left")
                return
            self._undo(slot, stage)

    def _give_up(self, group: Group, reason: str, state: str = "dropped") -> None:
        """The prompt leaves the run untrained; one that is ``unread`` again may be offered again."""
        if group.flow == self._flow.train_flow:
            self._give_back_group(group)
            if group.id not in self._board.groups:
                return  # giving it back has already shown that it is lost
            self.record(group, state, reason)
            self._window.leave(group)
        self.close([group])

    def close(self, groups: Sequence[Group]) -> None:
        """These leave the board, and whoever has something of them drops it."""
        if self._flow.train_stage:
            self._keep(Left(tuple([group.id for group in groups]), ()))
        for worker, free in frees(groups).items():
            self._out.append(Send(worker, free))
        self._board.close(groups)

    def _keep(self, entry: Unmade | Left) -> None:
        if self._flow.train_stage:
            self._out.append(Keep(entry))

    def _undo(self, slot: Slot, stage: str) -> None:
        train = self._flow.train_stage
        if slot.group.id in self._window.taken and train in slot.leases:
            self._give_back_group(slot.group)
            if slot.id not in self._board.slots:
                return  # giving it back has shown that it is lost, and dealt with it
        if train and slot.group.id in self._board.ready_groups[train]:
            self.record(slot.group, "in_flight", f"{stage} runs again")
        self._keep(Unmade(slot.id, stage, slot.attempt))
        for worker, columns in self._board.undo(slot, stage).items():
            self._out.append(Send(worker, Free(tuple(sorted(columns)), (slot.id,), ())))

    def record(self, group: Group, state: str, reason: str = "", step: int | None = None) -> None:
        """For the ledger: the prompt is in this state now. Only those to train on are in it."""
        if group.flow != self._flow.train_flow:
            return
        step = self._window.step if step is None else step
        self._out.append(Record(group.prompt, group.epoch, state, step, reason))


def frees(groups: Iterable[Group]) -> dict[WorkerId, Free]:
    """What each worker that has something of these groups has to drop."""
    of: dict[WorkerId, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for group in groups:
        if group.tensors:
            for worker in {worker for holding in group.tensors.values() for worker in holding.holders}:
                of[worker][1].append(group.id)
        for slot in group.slots:
            if not slot.tensors:
                continue
            for worker in {worker for holding in slot.tensors.values() for worker in holding.holders}:
                of[worker][0].append(slot.id)
    return {worker: Free((), tuple(slots), tuple(ids)) for worker, (slots, ids) in of.items()}
