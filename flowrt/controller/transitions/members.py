"""Members: workers that join, report, complete their roles, leave or are lost; and their rendezvous keys.

The work of a lost worker goes to `flowrt.controller.transitions.rollback`.
"""

from collections.abc import Mapping

from flowrt.controller.events import AppendRestartLog, Command, Dismiss, EventKind, LogEvent, Send, WorkerConnected
from flowrt.controller.state.controller_restart import JOINED, VACANT, CounterSet, DrainEnded, WorkerJoined, WorkerLeft
from flowrt.controller.state.membership import Member
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import rollback
from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, RemoteProtocolError
from flowrt.ids import OBSERVER, WorkerId
from flowrt.protocol import messages as m

MAX_REASON_CHARS = 4000
"""Maximum length of a reason that a worker gives."""
MAX_EXIT_CODE = 255
KEY_OVERHEAD_BYTES = 100
NOTICES: Mapping[str, EventKind] = {"exporter": "exporter", "warning": "warning"}
"""Kinds of events that an observer may write."""


def connected(state: State, env: Environment, event: WorkerConnected, now: float) -> list[Command]:
    """Add a worker that was admitted. A trainer gets the results of evaluations that were reported before."""
    worker = event.worker
    is_restarted = state.membership.has_departed(worker) and not event.term
    is_first, was_vacant = event.role not in state.membership.joined_roles, state.membership.is_vacant(event.role)
    ends_drain = state.membership.join(worker, event.role, event.host, now, rejoins=event.term > 0)
    state.lanes.join(worker, event.lanes)
    state.recovery.join(worker, event.term)
    if event.term:
        state.models.rest(worker)  # what it holds is known from its inventory only
    ended = [] if event.term else rollback.end_evaluations(state, env, worker)
    if event.role == OBSERVER:
        return []
    state.progress_s = now
    how = "has been restarted" if is_restarted else "has rejoined" if event.term else "has joined"
    text = f"{worker} ({event.role} on host {event.host!r}) {how}"
    fields = (("role", event.role), ("host", event.host))
    joined = LogEvent("restarted" if is_restarted else "joined", state.window.step, text, worker, fields)
    commands: list[Command] = [AppendRestartLog(WorkerJoined(worker, event.role))]
    if is_first:
        commands.append(AppendRestartLog(CounterSet(JOINED + event.role, 1)))
    if was_vacant:
        commands.append(AppendRestartLog(CounterSet(VACANT + event.role, 0)))
    if ends_drain:
        commands.append(AppendRestartLog(DrainEnded(worker)))
    commands.append(joined)
    if event.term:
        commands += _resume_orders(state, env, worker, event.role)
    results = state.results if event.role in env.settings.checkpointing_roles else ()
    return commands + ended + [Send(worker, message) for message in results]


def _resume_orders(state: State, env: Environment, worker: WorkerId, role: str) -> list[Command]:
    """Repeat an order to leave that an earlier controller gave to a worker that rejoins.

    The order comes before the answers to the requests that the worker repeats: it explains why they are rejected.
    """
    restored = state.recovery.restored
    if restored is not None and any(owner == worker for owner, _ in restored.offers):
        state.requests.offerers[worker] = None
    is_preempted = state.preemption.steps is not None and role in env.settings.checkpointing_roles
    return [Send(worker, m.Drain(0, worker))] if is_preempted or state.membership.is_leaving(worker) else []


def disconnected(
    state: State, env: Environment, worker: WorkerId, reason: str, now: float, code: int = EXIT_FAILED
) -> list[Command]:
    """Remove a worker that left (empty ``reason``) or was lost; other workers get its work.

    The loss of a worker of a critical role ends the run, with exit code ``code``. After the end of the run there are no
    commands.
    """
    member = state.membership.leave(worker)
    if member is None or state.ended is not None:  # after the end all workers leave
        return []
    commands: list[Command] = []
    if member.role != OBSERVER:
        commands += [
            AppendRestartLog(WorkerLeft(worker)),
            LogEvent("gone", state.window.step, _gone(member, reason), worker),
        ]
    if member.is_leaving and worker not in state.membership.drained:
        commands.append(AppendRestartLog(DrainEnded(worker)))
    commands += _forget(state, env, worker, in_order=member.is_leaving)
    roles = env.settings
    if member.is_leaving or (not reason and member.finished):
        if member.role in roles.replaceable_roles and not member.finished:
            why = f"{worker} was told to leave, and has left"
            commands += rollback.note_vacancy(state, member.role, why, now)
        return commands
    state.window.lose_source(worker)
    why = f"{worker}: {reason or 'left before its part was complete; see its log'} (on host {member.host!r})"
    if member.role in roles.critical_roles:
        commands += state.end(why, code)
    elif member.role in roles.replaceable_roles:
        commands += rollback.note_vacancy(state, member.role, why, now)
    return commands


def _gone(member: Member, reason: str) -> str:
    """How a worker has left, as a sentence."""
    if reason:
        why = f"is gone: {reason}"
    elif member.finished:
        why = "has completed its part and left"
    elif member.is_leaving:
        why = "has left in order"
    else:
        why = "left before its part was complete; see its log"
    return f"{member.id} ({member.role} on host {member.host!r}) {why}"


def _forget(state: State, env: Environment, worker: WorkerId, *, in_order: bool) -> list[Command]:
    """Remove a worker from all tables, with its requests, its leases, and the tensors that only it held."""
    state.key_limits.forget(worker)
    state.recovery.unconfirmed.discard(worker)
    state.requests.forget(worker)
    state.work.add_offers()  # its parked offers are gone: later ones may fit
    if state.lanes.failed:  # those with links that are cut have work again if it was the last other one
        state.work.add_stages(state.table.stages)
    commands = rollback.forget_worker(state, env, worker, in_order=in_order)
    state.plan.forget(worker)
    state.models.forget(worker)
    return commands


def dismiss(state: State, env: Environment, worker: WorkerId, reason: str, now: float) -> list[Command]:
    """Dismiss a worker; the state changes as if the worker had crashed."""
    return [Dismiss(worker, reason), *disconnected(state, env, worker, reason, now)]


def dismiss_silent(state: State, env: Environment, now: float) -> list[Command]:
    """Dismiss the workers that were not heard from for the worker timeout."""
    commands: list[Command] = []
    for member in state.membership.silent(now):
        commands += dismiss(state, env, member.id, f"not heard of for {now - member.seen_s:.0f} s; see its log", now)
    return commands


# ---- messages


def leave(state: State, env: Environment, worker: WorkerId, message: m.Leave, now: float) -> list[Command]:
    """Remove a worker that leaves because of an error, or with its role completed or drained."""
    code = EXIT_BAD_INPUT if message.code == EXIT_BAD_INPUT else EXIT_FAILED
    return disconnected(state, env, worker, message.error[:MAX_REASON_CHARS], now, code)


def role_completed(
    state: State, env: Environment, worker: WorkerId, message: m.RoleCompleted, now: float
) -> list[Command]:
    """Mark the role of a worker as completed."""
    state.membership.finish(worker)
    return []


def heartbeat(state: State, env: Environment, worker: WorkerId, message: m.Heartbeat, now: float) -> list[Command]:
    """Answer a sign of life with the controller's time, from which the sender finds the offset of its own clock.

    Work that advances is progress of the run, and extends the leases of the sender (`rollback.expire_leases`).
    """
    if message.advances:
        state.membership.note_advance(worker, now)
        state.progress_s = now
    return [Send(worker, m.Heartbeat(message.sent_s, message.reported_s, now))]


def report(state: State, env: Environment, worker: WorkerId, message: m.Report, now: float) -> list[Command]:
    """Store the waits that a worker reports; the server records the rest of the report."""
    state.membership.report(worker, message.waits, now)
    return []


def stop(state: State, env: Environment, worker: WorkerId, message: m.Stop, now: float) -> list[Command]:
    """End the run by order of an observer.

    Raises RemoteProtocolError if the sender is no observer or the exit code is not from 1 to `MAX_EXIT_CODE`.
    """
    fault = state.membership.role_fault(worker, (OBSERVER,), "ends the run")
    if not fault and not EXIT_OK < message.code <= MAX_EXIT_CODE:
        fault = f"{worker} cancels the run with exit code {message.code}; use 1 to {MAX_EXIT_CODE}"
    if fault:
        raise RemoteProtocolError(fault)
    return state.end(message.reason[:MAX_REASON_CHARS], message.code)


def notice(state: State, env: Environment, worker: WorkerId, message: m.Notice, now: float) -> list[Command]:
    """Write an observer's event to the event log. Raises RemoteProtocolError for another sender or an unknown kind."""
    fault = state.membership.role_fault(worker, (OBSERVER,), "writes an event")
    if not fault and message.kind not in NOTICES:
        fault = f"{worker} writes an event of kind {message.kind!r:.80}; there is {' and '.join(NOTICES)}"
    if fault:
        raise RemoteProtocolError(fault)
    return [LogEvent(NOTICES[message.kind], state.window.step, message.text[:MAX_REASON_CHARS])]


def retire_lane(state: State, env: Environment, worker: WorkerId, message: m.RetireLane, now: float) -> list[Command]:
    """Tell both ends of an idle lane to close it; nothing if a turn is on its way to the worker that asks.

    Raises RemoteProtocolError for a lane of other workers.
    """
    turn = message.turn
    if worker not in (turn.sender, turn.receiver):
        raise RemoteProtocolError(f"{worker} retires a lane from {turn.sender!r:.80} to {turn.receiver!r:.80}")
    ends = sorted({WorkerId(turn.sender), WorkerId(turn.receiver)}) if state.lanes.retire(turn) else []
    return [Send(end, m.RetireLane(turn)) for end in ends]


def rendezvous_key(
    state: State, env: Environment, worker: WorkerId, message: m.RendezvousKey, now: float
) -> list[Command]:
    """Forward a rendezvous key; drop it if the peer is not connected or all workers together exceed their rate limit.

    Raises RemoteProtocolError when the worker exceeds its own rate limit.
    """
    size = len(message.value) + len(message.key) + len(message.lane) + KEY_OVERHEAD_BYTES
    state.key_limits.check(worker, size, now)
    if message.peer not in state.membership or not state.key_limits.take(size, now):
        return []
    return [Send(WorkerId(message.peer), m.RendezvousKey(worker, message.lane, message.key, message.value))]
