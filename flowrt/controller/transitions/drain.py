"""Drain: a worker that is told to leave gets no new work, and leaves once no work is lost with it."""

from flowrt.controller.events import AppendRestartLog, Command, LogEvent, Send
from flowrt.controller.state.controller_restart import WorkerDrained
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import preemption, pulls, rollback
from flowrt.errors import EXIT_OK, RemoteProtocolError
from flowrt.ids import OBSERVER, WorkerId
from flowrt.protocol.messages import Drain, Rejected, Stop

MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 4000
RELEASED = "it has left in order: nothing here needs it any more"


def drain(state: State, env: Environment, worker: WorkerId, message: Drain, now: float) -> list[Command]:
    """Order a worker to drain, or reject the order. A drain is ordered by an observer or by the worker itself.

    A worker's own order is never rejected; the order of a trainer, without which the run cannot continue, preempts the
    run. A replaceable role whose last worker drains is vacant from then on.

    Raises RemoteProtocolError if a process that is no observer orders another worker to drain.
    """
    role = state.membership.role(worker)
    if worker != message.worker:
        if role != OBSERVER:
            raise RemoteProtocolError(f"{worker} wants {message.worker!r} to leave; only an observer may")
        return _drain_other(state, env, worker, message)
    if role in env.settings.checkpointing_roles:
        return preemption.terminated(state, env, worker, now)
    commands: list[Command] = []
    if not state.membership.is_leaving(worker):
        commands = _begin(state, message, by_operator=False)
        if role in env.settings.replaceable_roles and not state.membership.is_finished(worker):
            commands += rollback.note_vacancy(state, role, f"{worker} was terminated, and leaves in order", now)
    return commands


def _drain_other(state: State, env: Environment, observer: WorkerId, message: Drain) -> list[Command]:
    worker = WorkerId(message.worker)
    if fault := _fault(state, env, worker):
        return [Send(observer, Rejected(message.request, fault[:MAX_REASON_CHARS]))]
    return [] if state.membership.is_leaving(worker) else _begin(state, message, by_operator=True)


def _begin(state: State, message: Drain, by_operator: bool) -> list[Command]:
    worker = WorkerId(message.worker)
    state.membership.drain(worker, by_operator)
    state.models.policy.clear_outdated(worker)
    text = f"{worker} is to leave without losing a sample{', as an operator ordered' if by_operator else ''}"
    ordered = LogEvent("drained", state.window.step, text, worker)
    kept = AppendRestartLog(WorkerDrained(worker, by_operator))
    return [kept, Send(worker, message), ordered, *pulls.reject_pulls(state, worker, f"{worker} is leaving the run")]


def _fault(state: State, env: Environment, worker: WorkerId) -> str:
    """Why an operator may not drain this worker; empty if it may."""
    member, settings = state.membership.find(worker), env.settings
    if member is None:
        names = ", ".join(sorted(other.id for other in state.membership.members() if other.role != OBSERVER))
        return f"there is no worker {worker[:MAX_NAME_CHARS]!r} in this run; there are {names}"
    role = member.role
    if role in settings.critical_roles or role in settings.completing_roles:
        return f"{worker} cannot leave before the run ends: the work of a {role} cannot be passed on"
    others = [other for other in state.membership.of_roles((role,)) if not other.is_leaving]
    if role in settings.replaceable_roles and len(others) < 2:
        return f"{worker} is the only {role} worker; start another one first (flowrt worker {role})"
    return ""


def release(state: State) -> list[Command]:
    """Stop each draining worker that has no lease and no tensor that only it holds, or that blocks the run.

    None is stopped during recovery, when it is not known yet what workers hold.
    """
    if state.recovery.is_active:
        return []
    commands: list[Command] = []
    for worker in state.membership.draining():
        if not rollback.is_needed(state, worker) or _is_blocking(state, worker):
            state.membership.release(worker)
            commands.append(Send(worker, Stop(RELEASED, EXIT_OK)))
    return commands


def _is_blocking(state: State, worker: WorkerId) -> bool:
    """Whether a draining worker has no lease, and slots are ready for its vacant role.

    Trainers would wait for samples that need the role, and the draining worker for the trainers. It is released
    instead, and a replacement makes the tensors again that only the released worker held.
    """
    if not state.membership.is_vacant(state.membership.role(worker)) or state.table.has_lease(worker):
        return False
    pullers = state.requests.pullers
    return any(worker in pullers[stage] and len(queue) for stage, queue in state.table.ready.items())
