"""The walk of a sample: offers become groups, pulls become grants, commits move slots on, steps train them."""

from collections.abc import Callable
from functools import partial

from flowrt.controller.board import Board
from flowrt.controller.committing import Committing
from flowrt.controller.dispatch import Puller, Start
from flowrt.controller.events import Command, Send
from flowrt.controller.grants import closed, grant
from flowrt.controller.opening import Opening
from flowrt.controller.retreat import Retreat
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.sizes import Sizes
from flowrt.controller.slots import Slot
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.training import Training
from flowrt.controller.transfers import Lanes
from flowrt.controller.versions import ModelVersions
from flowrt.controller.waits import FULL, Parked, WaitingRoom
from flowrt.ids import WorkerId
from flowrt.wire.messages import Commit, Message, Offer, Pull, Refused

SUSPENDED = "no step is begun any more, what is trained is to be saved"


class Samples:
    """Owns the board, the training window and the waiting room; appends its commands to ``out``."""

    def __init__(
        self,
        settings: Settings,
        flow: Dataflow,
        policies: Policies,
        weights: ModelVersions,
        lanes: Lanes,
        out: list[Command],
    ) -> None:
        self._settings = settings
        self._flow = flow
        self._policies = policies
        self._weights = weights
        self._out = out
        self.board = Board(flow.columns, flow.stages, policies.dispatch.queue)
        start = settings.position.step
        self.window = TrainingWindow(settings.groups_per_step, settings.steps, settings.in_order, start)
        self.room = WaitingRoom(self.board.stages)
        self.lanes = lanes
        self.gated: dict[WorkerId, None] = {}  # who may not start on what is ready: its weights are too old
        self.leaving: set[WorkerId] = set()  # they get nothing new
        self.paused = False  # what can wait is parked: the controller has come back, and learns what there is
        self.train_flow, self.train_stage = flow.train_flow, flow.train_stage
        self.retreat = Retreat(self.board, self.window, self.lanes, policies.admission, settings, flow, out)
        self._sizes = Sizes(flow.columns, flow.token_columns)
        self.training = Training(self.board, self.window, self.retreat, lanes, self._sizes, flow, policies, out)
        self.opening = Opening(self.board, self.window, self.retreat, settings, flow, policies, out)
        self.generating = [stage.name for stage in flow.stages if stage.generates]
        self.committing = Committing(self.board, self.retreat, weights, flow, out)

    # ---- requests

    def offer(self, worker: WorkerId, message: Offer, now: float) -> None:
        self.room.check_new(worker, message.request)
        recalled = self.committing.recalled
        if recalled is not None and self.opening.confirm(worker, message, recalled):
            return
        fault = FULL if self.room.is_full(worker) else self.opening.fault(message)
        if fault:
            self._send(worker, Refused(message.request, fault))
            return
        parked, first = Parked(worker, message, now), not self.room.has_offers
        self.room.offerers[worker] = None
        if first and not self.paused and self.opening.open(parked):
            return
        self.room.park_offer(parked)
        if not (first or self.paused):
            self.room.serve_offers(self.opening.open)

    def pull(self, worker: WorkerId, message: Pull, now: float) -> None:
        self.room.check_new(worker, message.request, message.stage)
        training = message.stage == self._flow.train_stage
        parked = Parked(worker, message, now)
        if message.stage not in self.board.stages:
            reason = f"there is no stage {message.stage[:80]!r} in this dataflow"
            self._send(worker, Refused(message.request, reason))
        elif training and self.training.is_past(message):
            reason = f"step {message.step} is closed, step {self.window.step} is in training"
            self._send(worker, Refused(message.request, reason))
        elif training and self.training.is_beyond(message):
            self._send(worker, Refused(message.request, SUSPENDED))
        elif worker in self.leaving:
            self._send(worker, Refused(message.request, f"{worker} is leaving the run"))
        elif self.room.is_full(worker):
            self._send(worker, Refused(message.request, FULL))
        elif not training and message.slots < 1:
            self._send(worker, Refused(message.request, f"a pull of {message.slots} slots of {message.stage}"))
        elif message.done and (fault := self.committing.done_fault(message)):
            self._send(worker, Refused(message.request, fault))
        else:
            if message.done:
                parked.refused = self.committing.finish(worker, message)
            if self._serve(parked, now):
                return
            # Those that were parked before could not be served by what is there, or they would not be parked.
            self.room.park_pull(parked)

    def leave(self, worker: WorkerId) -> None:
        """From now on this worker gets nothing new; what it waits for, it waits for in vain."""
        self.leaving.add(worker)
        self.gated.pop(worker, None)
        for parked in self.room.of(worker):
            if isinstance(parked.request, Pull):
                self.room.take_out(worker, parked.request.request)
                self._send(worker, Refused(parked.request.request, f"{worker} is leaving the run"))

    def turn_away(self) -> None:
        """Whoever waits for a step that is not begun any more waits in vain."""
        for parked in list(self.room.all()):
            pull = parked.request
            if isinstance(pull, Pull) and pull.stage == self.train_stage and self.training.is_beyond(pull):
                self.room.take_out(parked.worker, pull.request)
                self._send(parked.worker, Refused(pull.request, SUSPENDED))

    def withdraw(self, worker: WorkerId, request: int, now: float) -> None:
        """The worker does not want to wait any longer; if the answer is on its way, this changes nothing."""
        parked = self.room.take_out(worker, request)
        if parked is not None:
            self.board.freed |= isinstance(parked.request, Offer)  # those behind it may have room enough
            reason = f"withdrawn after {now - parked.since_s:.1f} s of waiting for {self.why(parked)}"
            if parked.refused:
                reason += f"; the leases {parked.refused}, said to be done, had ended before"
            self._send(worker, Refused(request, reason))

    def _serve(self, parked: Parked[Pull], now: float) -> bool:
        if self.paused:
            return False
        if parked.request.stage == self._flow.train_stage:
            return self.training.serve(parked)
        return self._serve_slots(parked, now)

    def _serve_slots(self, parked: Parked[Pull], now: float) -> bool:
        pull, worker, board = parked.request, parked.worker, self.board
        stage, generates = pull.stage, board.stages[pull.stage].generates
        version = self._weights.applied_version(worker)
        held_bytes = partial(self._sizes.held_bytes, columns=board.flows.fetched[stage], worker=worker)
        puller = Puller(worker, pull.slots, self._may_start(worker, version) if generates else None, held_bytes)
        chosen = board.ready[stage].take(puller)
        if generates:
            self._gate(worker, not chosen and len(board.ready[stage]) > 0)
        if not chosen:
            over = self.opening.is_over(stage)
            if over:
                self._send(worker, closed(pull, parked.refused))
            return over
        # What takes longer than a lease would else be begun again for ever.
        overdue = chosen[0].overdue if len(chosen) == 1 else max([slot.overdue for slot in chosen])
        lease = board.lease(stage, chosen, worker, now + self._settings.lease_s * 2**overdue, version)
        lease.longer = overdue > 0
        self._out.extend(grant(board, self.lanes, pull, chosen, lease, refused=parked.refused))
        return True

    def _may_start(self, worker: WorkerId, version: int) -> Callable[[Slot], Start]:
        late = self._weights.is_late(worker)

        def may_start(slot: Slot) -> Start:
            if late:
                return Start.NOT_YET
            if version < slot.group.at_least:
                return Start.ELSEWHERE
            if slot.group.flow != self._flow.train_flow:
                return Start.NOW
            ready = self._policies.admission.may_start(self.window.expected_step(slot.group), version)
            return Start.NOW if ready else Start.NOT_YET

        return may_start

    def _gate(self, worker: WorkerId, shut: bool) -> None:
        if shut:
            self._weights.changed = self._weights.changed or worker not in self.gated
            self.gated[worker] = None
        else:
            self.gated.pop(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: what it asked for, worked on or held alone."""
        self.leaving.discard(worker)
        self.gated.pop(worker, None)
        self.room.forget(worker)
        self.board.freed = True  # its parked offers are gone: those behind them may have room enough
        self.retreat.forget(worker)
        self.training.forget(worker)

    def commit(self, worker: WorkerId, message: Commit, now: float) -> None:
        if self.committing.commit(worker, message).generates:
            self.look_again(worker, now)  # a dispatch policy may have waited for it to have room

    def go_on(self, why: str) -> None:
        """All who will come have come: what nobody has is made again, and everybody is served."""
        self.paused = self.retreat.patient = False
        self.committing.recalled = None
        self.retreat.look_over()
        for group in self.board.groups.values():
            if group.flow == self.train_flow and group.id not in self.window.taken:
                ready = group.id in self.board.ready_groups[self.train_stage]
                self.retreat.record(group, "ready" if ready else "in_flight", why)
        self.board.changed.update(self.board.stages)
        self.board.freed = self.window.changed = True

    # ---- after every event

    def settle(self, now: float) -> None:
        """Answer whatever can be answered now, looking only where something has changed."""
        board, window = self.board, self.window
        if self.paused:
            return
        while board.changed or window.changed or board.freed:
            if window.changed:
                board.changed.update(self.generating)
                if self._flow.train_stage:
                    board.changed.add(self._flow.train_stage)
            if window.changed or board.freed:
                window.changed = board.freed = False
                self.room.serve_offers(self.opening.open)
            # In the order of the dataflow: a run must not depend on how a set is ordered.
            changed = [name for name in board.stages if name in board.changed]
            board.changed.clear()
            for name in changed:
                if self.room.has_pulls(name):
                    self._serve_stage(name, now)

    def _serve_stage(self, stage: str, now: float) -> None:
        queue, weights = self.board.ready.get(stage), self._weights
        over, generates = self.opening.is_over(stage), stage in self.generating
        refused = -1  # the newest version for which the queue had nothing that may start

        def serve(parked: Parked[Pull]) -> bool:
            nonlocal refused
            version = weights.applied_version(parked.worker)
            if version <= refused:
                if generates and parked.worker not in self.gated:
                    self._gate(parked.worker, shut=True)  # it is hurried to newer weights like the one before it
                return False
            served = self._serve(parked, now)
            if not served and queue is not None and queue.is_impartial and not weights.is_late(parked.worker):
                refused = version
            return served

        def more() -> bool:
            return queue is None or over or (len(queue) > 0 and refused < weights.newest)

        self.room.serve_pulls(stage, serve, more)

    def look_again(self, worker: WorkerId, now: float) -> None:
        """Something about this worker has changed (its weights, its room): what it waits for may be open to it now."""
        for parked in self.room.of(worker):
            pull = parked.request
            if isinstance(pull, Pull) and pull.stage in self.generating and self._serve(Parked(worker, pull, now), now):
                self.room.take_out(worker, pull.request)

    def waiting(self) -> list[tuple[WorkerId, str, float]]:
        """Who waits, for what, since when."""
        return [(parked.worker, self.why(parked), parked.since_s) for parked in self.room.all()]

    def why(self, parked: Parked[Pull] | Parked[Offer]) -> str:
        """What a parked request waits for."""
        request = parked.request
        if isinstance(request, Offer):
            return self.opening.obstacle(request) or "the offers before it"
        if request.stage == self._flow.train_stage:
            return self.window.why(request.step, len(self.board.ready_groups[request.stage]))
        count = len(self.board.ready[request.stage])
        if not count:
            return f"slots ready for {request.stage}"
        version, weights = self._weights.applied_version(parked.worker), self._weights
        why = f"newer weights: {count} slots ready for {request.stage}, but version {version} would be too old"
        if version >= weights.latest < weights.newest:
            why += f", and version {weights.newest} is gone with who published it: the next one has to be published"
        return why

    def _send(self, worker: WorkerId, message: Message) -> None:
        self._out.append(Send(worker, message))
