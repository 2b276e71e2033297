"""The mind of the controller: ``handle(event, now)`` returns commands. Pure, synchronous, replayable.

It only routes: slots move in `board`, steps close in `steps`, samples walk in `samples`, versions in `versions`.
"""

import dataclasses

from flowrt.controller.events import Command, Dismiss, End, Event, Gone, Joined, Said, Send
from flowrt.controller.knots import WaitGraph
from flowrt.controller.models import Models
from flowrt.controller.roster import Roster
from flowrt.controller.samples import Samples
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.transfers import Lanes
from flowrt.controller.versions import ModelVersions
from flowrt.controller.waitgraph import wait_graph
from flowrt.errors import EXIT_FAILED, EXIT_OK, EXIT_STALLED, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire import messages as m
from flowrt.wire.records import Position

SOURCE = "source"
"""The role of those that are told which prompts a resumed run is done with."""
MOST_SENTENCES = 12
"""Of the wait-for graph in the reason of a stall; the log has all of it."""
MAX_SIGNAL_BYTES = 4096


class Core:
    """All state of a run."""

    def __init__(self, settings: Settings, flow: Dataflow, policies: Policies) -> None:
        self.settings = settings
        self._policies = policies
        self._flow = flow
        self._out: list[Command] = []
        self.roster = Roster(settings.silence_s)
        lanes = Lanes(settings.lanes)
        self.models = Models((settings.model, *settings.more_models), policies.refresh, lanes, self._out)
        self.samples = Samples(settings, flow, policies, self.models.policy, lanes, self._out)
        self.ended: End | None = None
        self._progress_s: float | None = None

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event, return what has to be done about it, in order.

        Raises RemoteProtocolError when a worker said something illegal; the state is then unchanged.
        """
        self._out.clear()
        if self._progress_s is None:
            self._progress_s = now
        match event:
            case Said(worker, message):
                self._said(worker, message, now)
            case Joined(worker, role, host, lanes):
                self.roster.join(worker, role, host, now)
                self.samples.lanes.join(worker, lanes)
                self._progress_s = now  # a cluster that comes together is not stuck
            case Gone(worker, reason):
                self._gone(worker, reason)
            case _:
                self._tick(now)
        if self.ended is None:
            self.samples.settle(now)
            self.models.move(self.samples.gated, now)
            if self.roster.changed:
                self._finish_if_complete()
        return list(self._out)

    def _said(self, worker: WorkerId, message: m.Message, now: float) -> None:
        if not self.roster.heard(worker, now):
            raise RemoteProtocolError(f"{worker} speaks but is not in; it must say hello first")
        # Nearly all that is said is one of these.
        samples = self.samples
        if isinstance(message, m.Pull):
            samples.pull(worker, message, now)
            if message.done:
                self._progress_s = now
        elif isinstance(message, m.Commit):
            samples.commit(worker, message, now)
            self._progress_s = now
        elif isinstance(message, m.Offer):
            samples.offer(worker, message, now)
        elif isinstance(message, m.Heartbeat):
            self._out.append(Send(worker, message))
        elif isinstance(message, m.Report):
            self.roster.told(worker, message.waits, now)  # the rest is the journal's business
        elif isinstance(message, m.Withdraw):
            samples.withdraw(worker, message.request, now)
        else:
            self._said_rarely(worker, message, now)
            # A version that fails to arrive again and again must not keep a run alive in which nothing else happens.
            if not isinstance(message, m.FetchFailed | m.Signal):
                self._progress_s = now

    def _said_rarely(self, worker: WorkerId, message: m.Message, now: float) -> None:
        match message:
            case m.Exhausted():
                self.samples.opening.exhaust(worker, message.flow)
            case m.Abandon():
                self.samples.retreat.abandon(worker, message)
            case m.Undelivered():
                self.samples.retreat.undelivered(worker, message.incoming)
            case m.StepDone():
                self.samples.training.step_done(worker, message)
            case m.Saved():
                self.samples.training.saved(worker, message)
            case m.Signal():
                self._pass_on(worker, message)
            case m.Finished():
                self.roster.finish(worker)
            case m.Stop():
                self._end(message.reason, message.code)
            case m.Bye():
                self._gone(worker, message.error)
            case m.Publish() | m.Staged() | m.FetchFailed() | m.Applied():
                self.models.hear(worker, message)
                if isinstance(message, m.Applied):
                    self.samples.look_again(worker, now)
            case _:
                raise RemoteProtocolError(f"{worker} sent {type(message).__name__}, which only the controller says")

    def _pass_on(self, worker: WorkerId, signal: m.Signal) -> None:
        if len(signal.value) > MAX_SIGNAL_BYTES:
            raise RemoteProtocolError(
                f"{worker} sent a signal of {len(signal.value)} bytes; signals are for rendezvous keys, "
                f"at most {MAX_SIGNAL_BYTES} bytes"
            )
        if signal.peer in self.roster:
            self._out.append(Send(WorkerId(signal.peer), m.Signal(worker, signal.lane, signal.key, signal.value)))

    def _gone(self, worker: WorkerId, reason: str) -> None:
        member = self.roster.leave(worker)
        if member is None:
            return
        if self.ended is not None:
            return  # leaving is what everybody was asked to do: nothing is dropped for it
        self.samples.forget(worker)
        self.models.forget(worker)
        if member.role in self.settings.vital_roles and (reason or not member.finished):
            self._end(f"{worker}: {reason or 'left before its part was complete; see its log'}", EXIT_FAILED)

    def _tick(self, now: float) -> None:
        for member in self.roster.silent(now):
            reason = f"not heard of for {now - member.heard_s:.0f} s; see its log"
            self._out.append(Dismiss(member.id, reason))
            self._gone(member.id, reason)
        self.samples.retreat.expire_leases(now)
        idle_s = now - (now if self._progress_s is None else self._progress_s)
        if idle_s > self.settings.stall_s:
            waits = "; ".join(self.wait_graph(now).sentences(MOST_SENTENCES))
            self._end(f"no progress for {idle_s:.0f} s: {waits or 'no worker waits for anything'}", EXIT_STALLED)

    def _finish_if_complete(self) -> None:
        self.roster.changed = False
        members = [member for member in self.roster.members() if member.role in self.settings.finishers]
        if (
            self.settings.finishers
            and {member.role for member in members if member.finished} == set(self.settings.finishers)
            and all(member.finished for member in members)
        ):
            self._end("the run is complete", EXIT_OK)

    def _end(self, reason: str, code: int) -> None:
        if self.ended is None:
            self.ended = End(reason, code)
            self._out.append(self.ended)

    def wait_graph(self, now: float, wait_s: float = float("inf")) -> WaitGraph:
        """Who waits for whom at this moment."""
        return wait_graph(self._flow, self.samples, self.models, self.roster, now, wait_s)

    def check(self) -> None:
        """Assert every invariant of the state; for tests and simulations."""
        board, window = self.samples.board, self.samples.window
        for slot in board.slots.values():
            assert slot.group.id in board.groups
            for name, lease in slot.leases.items():
                assert board.leases[lease.id] is lease
                assert slot.id in lease.slots
                assert not board.is_done(slot, name), f"slot {slot.id} is leased for {name}, which is done"
                assert lease.worker in self.roster, f"slot {slot.id} is leased to {lease.worker}, who is gone"
            for name, stage in board.stages.items():
                made = [column for column in stage.makes if column in slot.tensors or column in slot.inline]
                assert not made or board.is_done(slot, name), f"slot {slot.id} has {made} although {name} is not done"
            for holding in slot.tensors.values():
                assert holding.holders, f"slot {slot.id} has a column that nobody holds"
        for flow, rows in board.rows.items():
            assert rows == sum(len(group.slots) for group in board.groups.values() if group.flow == flow)
        if not self.train_stage:
            return
        live = {group.id for group in board.groups.values() if group.flow == board.stages[self.train_stage].flow}
        assert live == set(window.taken) | set(window.waiting)
        assert not set(window.taken) & set(window.waiting)
        assert len(window.taken) <= window.groups_per_step
        for group in window.taken.values():
            assert all(self.train_stage in slot.leases for slot in group.slots)

    def position_for(self, role: str) -> Position:
        """Where the run goes on, as far as a worker of this role has to know."""
        position = self.settings.position
        return position if role == SOURCE else dataclasses.replace(position, passed=())

    @property
    def weights(self) -> ModelVersions:
        """The versions of the policy."""
        return self.models.policy

    @property
    def train_stage(self) -> str:
        return self._flow.train_stage
