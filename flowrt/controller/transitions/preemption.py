"""Preemption: a run that has to end (a time limit, a signal) saves what it has trained, to be resumed later.

The controller decides after which step the trainers leave, so all ranks leave after the same step: each completes the
step, saves, and reports that its role is completed. Any failure in between ends the run as it would without preemption.
A controller that is restarted in between carries on.
"""

from flowrt.controller.events import AppendRestartLog, Command, PreemptRun, Send
from flowrt.controller.state.membership import Member
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import pulls
from flowrt.errors import EXIT_FAILED
from flowrt.ids import WorkerId
from flowrt.protocol.messages import Drain


def preempt(state: State, env: Environment, order: PreemptRun, now: float) -> list[Command]:
    """Begin preemption; `advance` carries it out."""
    state.preemption.order = order  # a second one does not move the deadline: schedulers signal each process of a job
    state.preemption.set_deadline(now + env.settings.preemption_save_timeout_s)
    return [AppendRestartLog(state.preemption.entry())]


def terminated(state: State, env: Environment, trainer: WorkerId, now: float) -> list[Command]:
    """Preempt the run because a trainer was terminated; no effect if preemption was ordered before."""
    if state.preemption.is_ordered:
        return []
    return preempt(state, env, PreemptRun(f"{trainer} was terminated (SIGTERM)", EXIT_FAILED), now)


def advance(state: State, env: Environment, now: float) -> list[Command]:
    """Order the trainers to leave; end the run when all have saved, or after the preemption save timeout.

    No effect unless preemption was ordered.
    """
    preemption = state.preemption
    order = preemption.order
    if order is None:
        return []
    if preemption.steps is None:
        return _stop_trainers(state, env, order)
    unsaved = _unsaved(state, env)
    if not unsaved:
        preemption.is_saved = True
        return state.end(f"{order.reason}; saved after {preemption.steps} steps", order.code)
    timeout_s = env.settings.preemption_save_timeout_s
    until_s = preemption.set_deadline(now + timeout_s)
    if now < until_s or any(now < member.advanced_s + timeout_s for member in unsaved):
        return []
    waits = "; ".join(f"{member.id} has not saved" for member in unsaved)
    return state.end(
        f"no progress of it for {timeout_s:.0f} s (checkpoint.preemption_save_timeout_s): {waits}",
        order.code,
    )


def _stop_trainers(state: State, env: Environment, order: PreemptRun) -> list[Command]:
    steps = state.window.stop() + 1
    state.preemption.steps = steps
    trainers = _unsaved(state, env)
    if steps <= order.kept or not trainers:
        # The run ends at once if the steps are saved already, or no trainer is connected that could save them.
        state.preemption.is_saved = True
        return state.end(order.reason, order.code)
    drains: list[Command] = [Send(trainer.id, Drain(0, trainer.id)) for trainer in trainers]
    return [AppendRestartLog(state.preemption.entry()), *drains, *pulls.reject_beyond_end(state, env)]


def _unsaved(state: State, env: Environment) -> list[Member]:
    """Workers that save a checkpoint, and have not completed their role."""
    return [member for member in state.membership.of_roles(env.settings.checkpointing_roles) if not member.finished]
