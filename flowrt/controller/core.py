"""The controller's state machine: `Core.handle` applies one event and returns the commands to execute.

The main loop of a run::

    server    for event in messages, workers that join or leave, and a tick each 0.5 s:   # Server._receive, _tick
                  commands = core.handle(event, now)                                      # Server._handle
                  for command in commands: send it, write it to the files of the run, or end the run
    handle    HANDLERS[type(message)](state, env, worker, message, now)                   # a file of transitions/
              while the worklist is due:                                                  # pulls.serve_worklist
                  decide which of the ready groups are kept                               # step_selection.decide
                  serve the parked pulls and offers that may be served now                # pulls, offers
              order the fetches of weights that are due                                   # weight_sync.order_fetches
              end the run if its roles are complete, or if it is preempted and saved

- No I/O, clock or randomness: the recorded events are the whole history of a run, and replaying them gives the same
  commands.
- Each kind of message has one handler, listed in `HANDLERS`: a function of the state, the environment and the message.
- A handler that refuses a message raises RemoteProtocolError and has changed nothing.
- Requests that an event may unblock are reported to the worklist, and tried before `handle` returns.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from flowrt.controller.attribution.wait_log import OF_ALL, OF_ONE, WaitLog
from flowrt.controller.diagnostics.invariants import audit
from flowrt.controller.diagnostics.wait_graph import WaitGraph, unserved, wait_graph
from flowrt.controller.events import (
    Command,
    ControllerStalled,
    EndRun,
    Event,
    KernelAlive,
    MessageReceived,
    PreemptRun,
    Shutdown,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.settings import Dataflow, Policies, Settings, check_filter
from flowrt.controller.state.controller_restart import RecoveredState
from flowrt.controller.state.kept_samples import KeptSample
from flowrt.controller.state.reward_history import Outcome
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import (
    commits,
    drain,
    evaluations,
    failed_transfers,
    members,
    offers,
    preemption,
    pulls,
    rejoin,
    rollback,
    step_end,
    weight_sync,
)
from flowrt.errors import EXIT_FAILED, EXIT_OK, EXIT_STALLED, VIOLATION, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m

CHANGES_WAITS = OF_ONE | OF_ALL
"""Messages that may change the cause of a wait; each of them counts as progress."""
MAX_STALL_LINES = 12
"""Maximum number of lines of the wait-for graph in the reason of a stall; the log has more of them."""

Handler = Callable[[State, Environment, WorkerId, Any, float], list[Command]]
HANDLERS: dict[type[m.Message], Handler] = {
    m.Pull: pulls.pull,
    m.Commit: commits.commit,
    m.Offer: offers.offer,
    m.CancelRequest: pulls.cancel_request,
    m.EndOfData: offers.end_of_data,
    m.ReleaseLease: rollback.release_lease,
    m.TransferFailed: failed_transfers.transfer_failed,
    m.StepCompleted: step_end.trainer_message,
    m.CheckpointWritten: step_end.trainer_message,
    m.Publish: weight_sync.publish,
    m.WeightsStaged: weight_sync.weights_staged,
    m.WeightsArriving: weight_sync.weights_arriving,
    m.WeightsActivated: weight_sync.weights_activated,
    m.FetchFailed: weight_sync.fetch_failed,
    m.Evaluated: evaluations.evaluated,
    m.RenewLease: rejoin.renew_lease,
    m.Inventory: rejoin.inventory,
    m.Drain: drain.drain,
    m.RoleCompleted: members.role_completed,
    m.Leave: members.leave,
    m.Stop: members.stop,
    m.Heartbeat: members.heartbeat,
    m.Report: members.report,
    m.RendezvousKey: members.rendezvous_key,
    m.RetireLane: members.retire_lane,
    m.Notice: members.notice,
}
"""Every message that a worker may send, and the transition that handles it."""
NO_PROGRESS: frozenset[type[m.Message]] = frozenset(
    (
        *(m.Pull, m.Offer, m.Heartbeat, m.Report, m.CancelRequest),
        *(m.FetchFailed, m.TransferFailed, m.ReleaseLease, m.RendezvousKey, m.RetireLane, m.Notice),
    )
)
"""Messages that do not count as progress of the run; a pull that reports completed leases (``done``) does."""


class Core:
    """The state machine of one run."""

    def __init__(
        self,
        settings: Settings,
        flow: Dataflow,
        policies: Policies,
        term: int = 1,
        recovered: RecoveredState | None = None,
        outcomes: Iterable[Outcome] = (),
        kept: Iterable[KeptSample] = (),
    ) -> None:
        """Raises ConfigError for a group filter that reads a column which the train stage does not need.

        Args:
            settings: sizes, roles and timeouts.
            flow: columns and stages.
            policies: one policy for each decision.
            term: the number of this controller of the run, from 1.
            recovered: the state of an earlier controller that crashed, from its restart log; None without one.
            outcomes: mean rewards of groups under earlier controllers, for the curriculum.
            kept: samples of earlier starts of the run that journals have.
        """
        check_filter(flow, policies)
        self.env = Environment(settings, flow, policies)
        self.state = State.of(self.env, term)
        self.state.kept.add(kept)
        if recovered is not None:
            rejoin.recover(self.state, self.env, recovered)
        self.state.history.restore(outcomes, self.state.window.step)
        self.waits = WaitLog()
        """Why workers wait, and have waited. Output of the core, like its commands: no decision depends on it."""
        self._event_s = 0.0  # time of the latest event

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event; returns the commands to execute, in order.

        A worker that violates the protocol is dismissed, and its work is lost as if it had crashed.
        """
        try:
            return self.transition(event, now)
        except RemoteProtocolError as violation:
            if not isinstance(event, MessageReceived):
                raise
            return self._dismiss(event.worker, violation, now) + self._follow_up(now)

    def transition(self, event: Event, now: float) -> list[Command]:
        """As `handle`, but raises RemoteProtocolError for a protocol violation; the state is then unchanged."""
        state, waits = self.state, self.waits
        if state.progress_s is None:
            state.progress_s = now
        if now >= waits.check_s:  # the effects of earlier events, before this event is applied
            waits.classify(state, self.env, now, self._event_s)
        self._event_s = now
        if type(event) is MessageReceived:  # most events
            commands = self._receive(event.worker, event.message, now)
        else:
            commands = self._apply(event, now)
        if following := self._follow_up(now):
            commands += following
        if state.requests.changed:
            waits.after_event(state, self.env, now)
        return commands

    def _receive(self, worker: WorkerId, message: m.Message, now: float) -> list[Command]:
        state, kind = self.state, type(message)
        if not state.membership.note_alive(worker, now):
            raise RemoteProtocolError(f"{worker} speaks but is not in; it must say hello first")
        handler = HANDLERS.get(kind)
        if handler is None:
            raise RemoteProtocolError(f"{worker} sent {kind.__name__}, which only the controller says")
        commands = handler(state, self.env, worker, message, now)
        if isinstance(message, m.Pull):
            if message.done:
                state.progress_s = now
        elif kind not in NO_PROGRESS:
            state.progress_s = now
            if kind in CHANGES_WAITS:
                self.waits.note_message(worker, kind, now)
        return commands

    def _apply(self, event: Event, now: float) -> list[Command]:
        state, env = self.state, self.env
        match event:
            case WorkerConnected():
                return members.connected(state, env, event, now)
            case WorkerDisconnected(worker, reason):
                return members.disconnected(state, env, worker, reason, now)
            case KernelAlive(worker, at_s):
                state.membership.note_alive(worker, at_s)
                return []
            case ControllerStalled(seconds):
                state.extend_deadlines(seconds)
                return []
            case PreemptRun():
                return preemption.preempt(state, env, event, now)
            case Shutdown(reason, code, even_if_complete):
                if even_if_complete and state.ended is not None and state.ended.code == EXIT_OK:
                    state.ended = None  # so that it can end for another reason
                return state.end(reason, code)
            case _:
                return self._tick(now)

    def _follow_up(self, now: float) -> list[Command]:
        """Serve parked requests, order fetches and end the run, as far as the event permits."""
        state, env = self.state, self.env
        if state.ended is not None:
            return []
        commands: list[Command] = []
        if state.recovery.is_active:
            commands += self._end_recovery_if_over(now)
            if state.ended is not None or state.recovery.is_active:
                return commands
        if state.guards.order is not None:
            order = state.guards.take_order()
            if order is not None and not state.preemption.is_ordered:
                commands += preemption.preempt(state, env, order, now)
        work, exact = state.work, state.table.exact
        while True:
            if work.is_due:
                commands += pulls.serve_worklist(state, env, now)
            if not (exact.live or exact.is_changed) and state.models.policy.pin is None:  # nearly always
                break
            commands += evaluations.update_pin(state, env)
            if not work.is_due:
                break
        commands += weight_sync.order_fetches(state, env, now)
        if work.take_members():
            commands += self._end_if_complete()
        if state.preemption.is_ordered:
            commands += preemption.advance(state, env, now)
        return commands

    def _end_recovery_if_over(self, now: float) -> list[Command]:
        if not self.state.recovery.is_over(now, self.env.settings.rejoin_timeout_s):
            return []
        return rejoin.end_recovery(self.state, self.env, now) + self._handle_deferred(now)

    def _handle_deferred(self, now: float) -> list[Command]:
        """Handle deferred messages one by one, so that a violation by one worker affects no other."""
        commands: list[Command] = []
        for worker, message in self.state.recovery.take_deferred():
            try:
                commands += step_end.apply_deferrable(self.state, self.env, worker, message)
            except RemoteProtocolError as violation:
                commands += self._dismiss(worker, violation, now)
        return commands

    def _dismiss(self, worker: WorkerId, violation: RemoteProtocolError, now: float) -> list[Command]:
        """Dismiss a worker that violated the protocol."""
        if self.state.ended is not None:
            return []  # every worker has been told to leave already
        reason = f"{VIOLATION}: {violation}"[: members.MAX_REASON_CHARS]
        return members.dismiss(self.state, self.env, worker, reason, now)

    # ---- ends of the run

    def _end_if_complete(self) -> list[Command]:
        roles, membership = self.env.settings.completing_roles, self.state.membership
        if not roles or not all(membership.has_role(role) for role in roles):
            return []
        if not all(member.finished for member in membership.of_roles(roles)):
            return []
        return self.state.end("the run is complete", EXIT_OK)

    def _tick(self, now: float) -> list[Command]:
        """Check the deadlines."""
        state, env = self.state, self.env
        commands = members.dismiss_silent(state, env, now)
        vacancy = state.membership.vacancy_fault(now, env.settings.role_vacancy_timeout_s)
        if vacancy and not state.preemption.is_ordered:  # a run that is being preempted needs no new workers
            commands += state.end(vacancy, EXIT_FAILED)
        failed_transfers.mend(state, now)
        commands += rollback.expire_leases(state, env, now)
        commands += drain.release(state)
        return commands + self._end_if_stalled(now)

    def _end_if_stalled(self, now: float) -> list[Command]:
        state, settings = self.state, self.env.settings
        idle_s = now - (now if state.progress_s is None else state.progress_s)
        if absent := self._never_joined():
            if idle_s <= max(settings.no_progress_timeout_s, settings.connect_timeout_s):
                return []
            reason = (
                f"no worker of these roles has joined within {idle_s:.0f} s: {', '.join(absent)}; start one of each "
                "(flowrt worker ROLE), and see the logs of those that were started"
            )
        elif idle_s > settings.no_progress_timeout_s:
            waits = "; ".join(self.wait_graph(now).sentences(MAX_STALL_LINES)) or "no worker waits for anything"
            failure = state.lanes.last_failure
            reason = f"no progress for {idle_s:.0f} s: {waits}"
            reason += f"; the last transfer that failed: {failure}" if failure else ""
        else:
            return []
        return state.end(reason, EXIT_STALLED)

    def _never_joined(self) -> list[str]:
        """Roles that the run needs and that have never had a worker."""
        settings = self.env.settings
        needed = (*settings.replaceable_roles, *settings.critical_roles, *settings.completing_roles)
        return [role for role in dict.fromkeys(needed) if role not in self.state.membership.joined_roles]

    # ---- queries

    def wait_graph(self, now: float, request_timeout_s: float = float("inf"), first: Collection[str] = ()) -> WaitGraph:
        """The wait-for graph at ``now``; see `flowrt.controller.diagnostics.wait_graph.wait_graph`."""
        return wait_graph(self.state, self.env, now, request_timeout_s, first)

    def waiting(self) -> list[tuple[WorkerId, str, float]]:
        """(worker, what it waits for, since when in seconds of the clock of `handle`) of each parked request."""
        return pulls.waiting(self.state, self.env)

    def deadlock(self, now: float, returned: Collection[str], quiet_s: float) -> str:
        """Why the run can make no further progress unless a worker joins; empty if it can, or has ended.

        Args:
            now: seconds on the clock of `handle`.
            returned: workers that will send no further request.
            quiet_s: seconds without progress before which the result is empty.
        """
        state = self.state
        if state.ended is not None or state.progress_s is None or now - state.progress_s < quiet_s:
            return ""
        graph = self.wait_graph(now)
        if not graph.is_deadlocked(returned):
            return ""
        waits = "; ".join(graph.sentences(MAX_STALL_LINES))
        if stages := unserved(state):
            return f"samples are ready for {', '.join(stages)}, and no worker pulls them: {waits}"
        unfinished = [
            member.id
            for member in state.membership.of_roles(self.env.settings.completing_roles)
            if member.id in returned and not member.finished
        ]
        if unfinished:
            return (
                f"the run is complete when {', '.join(unfinished)} has called session.finished(), and did not: {waits}"
            )
        return f"every worker waits for another one: {waits}"

    def check(self) -> None:
        """Raises AssertionError if an invariant of the state does not hold; for tests, simulations and replays."""
        audit(self.state, self.env)

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.env.settings

    @property
    def ended(self) -> EndRun | None:
        """How the run ended; None until then."""
        return self.state.ended

    @property
    def renewable(self) -> tuple[str, ...]:
        """Stages whose leases can be renewed after a restart of the controller: generation, because it is expensive,
        and training, because the samples are part of a gradient already.
        """
        flow = self.env.flow
        return tuple(stage.name for stage in flow.stages if stage.generates or stage.name == flow.train_stage)
