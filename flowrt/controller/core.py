"""The mind of the controller: ``handle(event, now)`` returns commands. Pure, synchronous, replayable.

It only routes: slots move in `board`, steps close in `steps`, samples walk in `samples`, versions in `versions`.
"""

from flowrt.controller.audit import audit
from flowrt.controller.departures import Departures
from flowrt.controller.events import Alive, Command, Dismiss, End, Event, Gone, Joined, Keep, Said, Send, Suspend
from flowrt.controller.knots import WaitGraph
from flowrt.controller.models import Models
from flowrt.controller.regroup import Regroup
from flowrt.controller.roster import Roster
from flowrt.controller.samples import Samples
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.suspension import Suspension
from flowrt.controller.transfers import Lanes
from flowrt.controller.versions import ModelVersions
from flowrt.controller.waitgraph import OBSERVER, wait_graph
from flowrt.controller.walk import Came, Remains, Went
from flowrt.errors import EXIT_FAILED, EXIT_OK, EXIT_STALLED, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire import messages as m

SOURCE = "source"
"""The role of those that are told which prompts a resumed run is done with."""
MOST_SENTENCES = 12
LONGEST_WORDS = 4000
"""Of a worker's own about why it, or the run, has ended."""
"""Of the wait-for graph in the reason of a stall; the log has all of it."""
TERM_BITS = 40
"""Each controller of a run numbers from its own place on: what it gave is never taken for what another gave."""


class Core:
    """All state of a run."""

    def __init__(
        self, settings: Settings, flow: Dataflow, policies: Policies, term: int = 1, remains: Remains | None = None
    ) -> None:
        """``term`` says how often the run has had a controller; ``remains`` are those of one that crashed."""
        self.settings = settings
        self._policies = policies
        self._flow = flow
        self._out: list[Command] = []
        self.roster = Roster(settings.silence_s)
        first = (term - 1) << TERM_BITS
        lanes = Lanes(settings.lanes, first)
        self.models = Models((settings.model, *settings.more_models), policies.refresh, lanes, self._out)
        self.samples = Samples(settings, flow, policies, self.models.policy, lanes, self._out)
        self.samples.board.begin_at(first)
        self.regroup = Regroup(self.roster, self.samples, self.models, settings, self._out, remains, self._end)
        self.departures = Departures(self.roster, self.samples, settings, self._out)
        self.suspension = Suspension(self.roster, self.samples, settings, self._out, self._end)
        self.ended: End | None = None
        self._progress_s: float | None = None

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event, return what has to be done about it, in order.

        Raises RemoteProtocolError when a worker said something illegal; the state is then unchanged.
        """
        self._out.clear()
        if self._progress_s is None:
            self._progress_s = now
        if type(event) is Said:  # nearly all of them
            self._said(event.worker, event.message, now)
        else:
            self._happened(event, now)
        if self.ended is None and self.samples.paused and self.regroup.close(now):
            self._hear_deferred(now)
        if self.ended is None and not self.samples.paused:
            self.samples.settle(now)
            self.models.move(self.samples.gated, now)
            if self.roster.changed:
                self._finish_if_complete()
            if self.suspension.is_asked:
                self.suspension.look(now)
        return list(self._out)

    def _happened(self, event: Event, now: float) -> None:
        match event:
            case Joined(worker, role, host, lanes, term):
                self.roster.join(worker, role, host, now)
                self.samples.lanes.join(worker, lanes)
                self.regroup.joined(worker, term)
                if role != OBSERVER:
                    self._out.append(Keep(Came(worker, role)))
                self._progress_s = now  # a cluster that comes together is not stuck
            case Gone(worker, reason):
                self._gone(worker, reason, now)
            case Alive(worker, at_s):
                self.roster.heard(worker, at_s)
            case Suspend():
                self.suspension.ask(event, now)
            case _:
                self._tick(now)

    def _hear_deferred(self, now: float) -> None:
        """Each by itself: what one has no right to say must not take along what the others have said."""
        for worker, message in self.regroup.deferred():
            try:
                self._said_rarely(worker, message, now)
            except RemoteProtocolError as error:
                self._end(f"{worker}: {error}", EXIT_FAILED)

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
            # What fails again and again must not keep a run alive in which nothing else happens.
            if not isinstance(message, m.FetchFailed | m.Undelivered | m.Abandon | m.Signal):
                self._progress_s = now

    def _said_rarely(self, worker: WorkerId, message: m.Message, now: float) -> None:
        match message:
            case m.Exhausted():
                self.samples.opening.exhaust(worker, message.flow)
            case m.Abandon():
                self.samples.retreat.abandon(worker, message)
            case m.Undelivered():
                self.samples.retreat.undelivered(worker, message.incoming, message.reason)
            case m.StepDone() | m.Saved() if self.regroup.is_open:
                self.regroup.defer(worker, message)
            case m.StepDone():
                if not self.regroup.is_repeated(worker, message):
                    self.samples.training.step_done(worker, message)
            case m.Saved():
                self.samples.training.saved(worker, message)
            case m.Renew():
                self.regroup.renew(worker, message, now)
            case m.Holds():
                self.regroup.holds(worker, message)
            case m.Signal():
                self._pass_on(worker, message)
            case m.Drain():
                if worker != message.worker and self.roster.role(worker) != OBSERVER:
                    raise RemoteProtocolError(f"{worker} wants {message.worker!r} to leave; only an observer may")
                if worker == message.worker and self.roster.role(worker) in self.settings.savers:
                    self.suspension.lose(worker, now)
                else:
                    self.departures.drain(worker, message)
            case m.Finished():
                self.roster.finish(worker)
            case m.Stop():
                self._end(message.reason[:LONGEST_WORDS], message.code)
            case m.Bye():
                self._gone(worker, message.error[:LONGEST_WORDS], now)
            case m.Publish() | m.Staged() | m.FetchFailed() | m.Applied():
                self.models.hear(worker, message)
                if isinstance(message, m.Applied):
                    self.samples.look_again(worker, now)
                elif isinstance(message, m.Publish):
                    # Before, newer weights would have helped nobody: who waits for them has not been looked for.
                    self.samples.board.changed.update(self.samples.generating)
            case _:
                raise RemoteProtocolError(f"{worker} sent {type(message).__name__}, which only the controller says")

    def _pass_on(self, worker: WorkerId, signal: m.Signal) -> None:
        if signal.peer in self.roster:
            self._out.append(Send(WorkerId(signal.peer), m.Signal(worker, signal.lane, signal.key, signal.value)))

    def _gone(self, worker: WorkerId, reason: str, now: float) -> None:
        member = self.roster.leave(worker)
        if member is None:
            return
        if self.ended is not None:
            return  # leaving is what everybody was asked to do: nothing is dropped for it
        if member.role != OBSERVER:
            self._out.append(Keep(Went(worker)))
        self.samples.forget(worker)
        self.models.forget(worker)
        self.departures.forget(worker)
        if member.let_go or (not reason and member.finished):
            return
        self.samples.opening.failed(worker)
        why = f"{worker}: {reason or 'left before its part was complete; see its log'} (on host {member.host!r})"
        if member.role in self.settings.vital_roles:
            self._end(why, EXIT_FAILED)
        elif member.role in self.settings.needed_roles:
            self.roster.miss(member.role, why, now)

    def _tick(self, now: float) -> None:
        for member in self.roster.silent(now):
            reason = f"not heard of for {now - member.heard_s:.0f} s; see its log"
            self._out.append(Dismiss(member.id, reason))
            self._gone(member.id, reason, now)
        if missed := self.roster.empty(now, self.settings.absence_s):
            self._end(missed, EXIT_FAILED)
        self.samples.retreat.expire_leases(now)
        self.departures.look()
        idle_s = now - (now if self._progress_s is None else self._progress_s)
        if idle_s > self.settings.stall_s:
            waits = "; ".join(self.wait_graph(now).sentences(MOST_SENTENCES))
            trouble = (
                f"; the last transfer that failed: {self.samples.lanes.trouble}" if self.samples.lanes.trouble else ""
            )
            why = f"{waits or 'no worker waits for anything'}{trouble}"
            self._end(f"no progress for {idle_s:.0f} s: {why}", EXIT_STALLED)

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
            self.ended = End(*self.suspension.last_word(reason, code))
            self._out.append(self.ended)

    def wait_graph(self, now: float, wait_s: float = float("inf")) -> WaitGraph:
        """Who waits for whom at this moment."""
        return wait_graph(self._flow, self.samples, self.models, self.roster, now, wait_s)

    def check(self) -> None:
        """Assert every invariant of the state; for tests and simulations."""
        over = self.ended is not None
        audit(self.samples, self.models, self.roster, self.train_stage, self._policies.admission, over=over)

    @property
    def renewable(self) -> tuple[str, ...]:
        """Stages whose leases outlive the controller: tokens are dear, and what is trained is in a gradient already."""
        return tuple(name for name, one in self.samples.board.stages.items() if one.generates or one.whole_groups)

    @property
    def weights(self) -> ModelVersions:
        """The versions of the policy."""
        return self.models.policy

    @property
    def train_stage(self) -> str:
        return self._flow.train_stage
