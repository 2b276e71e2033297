"""Commits: what was made becomes visible, what came too late is refused, and what follows is found out."""

from collections.abc import Iterable, Sequence

from flowrt.controller.board import Board
from flowrt.controller.commits import Makes, by_lease, commit_fault, finished, made, pick
from flowrt.controller.events import Command, Keep, Send
from flowrt.controller.retreat import Retreat
from flowrt.controller.settings import Dataflow
from flowrt.controller.slots import Group, Slot
from flowrt.controller.versions import ModelVersions
from flowrt.controller.walk import Recollection
from flowrt.errors import RemoteProtocolError
from flowrt.ids import SlotId, WorkerId
from flowrt.wire.messages import Commit, Committed, Pull
from flowrt.wire.records import Stage


class Committing:
    """Takes what workers have made; ``recalled`` is what was made before, while a controller that came back asks."""

    def __init__(
        self, board: Board, retreat: Retreat, weights: ModelVersions, flow: Dataflow, out: list[Command]
    ) -> None:
        self._board = board
        self._retreat = retreat
        self._weights = weights
        self._flow = flow
        self._out = out
        self.recalled: Recollection | None = None
        self._makes = {stage.name: Makes.of(stage, board.columns) for stage in flow.stages}

    def done_fault(self, pull: Pull) -> str:
        stage = self._board.stages[pull.stage]
        if pull.done and (stage.makes or stage.whole_groups):
            return f"stage {stage.name} is not done by a pull: commit what it makes, or end its step"
        return ""

    def finish(self, worker: WorkerId, pull: Pull) -> tuple[int, ...]:
        """The work on these leases is done; returns those that had ended before."""
        late = []
        for lease_id in pull.done:
            lease = self._board.find_lease(lease_id, worker)
            if lease is None or lease.stage != pull.stage:
                late.append(lease_id)
            else:
                slots = self._board.finish(lease)
                if self._flow.train_stage:
                    self._out.append(Keep(finished(worker, lease, slots)))
                self._moved_on(dict.fromkeys([slot.group for slot in slots]))
        return tuple(late)

    def commit(self, worker: WorkerId, message: Commit) -> Stage:
        """Returns the stage that it was of. Raises RemoteProtocolError for what no worker may say."""
        stage = self._board.stages.get(message.stage)
        if stage is None:
            raise RemoteProtocolError(f"{worker} commits stage {message.stage!r}, which is not in this dataflow")
        if fault := commit_fault(message, stage, self._makes[stage.name], self._weights.newest):
            raise RemoteProtocolError(f"commit of stage {stage.name!r} by {worker}: {fault}")
        refused: list[int] = []
        reasons: set[str] = set()
        touched: dict[int, Group] = {}
        for lease, rows in by_lease(self._board, worker, message, stage):
            if lease is None:
                late, why = self._late(worker, message, stage, rows)
                refused += late
                reasons |= why
                continue
            slots = [lease.slots[SlotId(message.slots[row])] for row in rows]
            lengths = {part.column: pick(part.lengths, rows) for part in message.parts}
            inline = {one.column: pick(one.values, rows) for one in message.inline}
            spans = pick(message.spans, rows) if message.spans else ()
            self._board.commit(lease, slots, lengths, inline, spans)
            if self._flow.train_stage:
                self._out.append(Keep(made(worker, message, rows)))
            for slot in slots:
                if stage.generates and not self._made(slot, stage):
                    refused.append(slot.id)
                    reasons.add("older than the staleness bound")
                else:
                    touched[slot.group.id] = slot.group
        self._out.append(Send(worker, Committed(message.request, tuple(refused), "; ".join(sorted(reasons)))))
        self._moved_on(touched.values())
        return stage

    def _late(self, worker: WorkerId, message: Commit, stage: Stage, rows: Sequence[int]) -> tuple[list[int], set[str]]:
        """Rows without a lease: those to refuse, and why. A commit whose answer was lost is only confirmed."""
        late: list[int] = []
        reasons: set[str] = set()
        for row in rows:
            slot_id, lease_id = SlotId(message.slots[row]), message.leases[row]
            slot = self._board.slots.get(slot_id)
            known = self.recalled is not None and self.recalled.commits.get((stage.name, slot_id)) == lease_id
            if slot is not None and known:
                for part in message.parts:
                    slot.tensors[part.column].owners.add(worker)
                continue
            late.append(slot_id)
            old = lease_id < self._board.first_lease
            reasons.add(
                f"the lease on stage {stage.name} "
                + ("was given by a controller that is gone, and was not renewed" if old else "had ended")
            )
        return late, reasons

    def _made(self, slot: Slot, stage: Stage) -> bool:
        """A sample was generated; False when it is too old already, and lost."""
        self._board.ready[stage.name].made(slot, sum(slot.spans[1::2]))
        if self._retreat.expired(slot):
            self._retreat.lose(slot, "over-age")
            return False
        return True

    def _moved_on(self, groups: Iterable[Group]) -> None:
        streamed = []
        for group in groups:
            if group.flow != self._flow.train_flow:
                streamed.append(group)
            elif group.id in self._board.ready_groups[self._flow.train_stage]:
                self._retreat.record(group, "ready")
        if complete := self._board.flows.complete(streamed):
            self._retreat.close(complete)
