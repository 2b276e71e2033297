"""The end of a step: its statistics, what the guards do with them, and the checkpoint that follows.

All decisions depend on the recorded events alone, so a replay warns, holds and stops at the same steps.
"""

from dataclasses import replace

from flowrt.controller.events import AppendRestartLog, Command, LogEvent, Persist, PreemptRun, StepClosed
from flowrt.controller.policies.guards import Firing, count_violations
from flowrt.controller.state.controller_restart import (
    FILTERED,
    HELD_UNTIL,
    SKIPPED,
    STEP,
    VIOLATIONS,
    CounterSet,
    Deferrable,
)
from flowrt.controller.state.counters import validate_names
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import failed_transfers, rollback, step_metrics, step_selection
from flowrt.errors import EXIT_GUARD, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol.messages import CheckpointWritten, StepCompleted

LOG_INTERVAL_STEPS = 50
"""A rule that fires in every step is logged once in this number of steps."""


def trainer_message(state: State, env: Environment, worker: WorkerId, message: Deferrable, now: float) -> list[Command]:
    """Close the step after the optimiser has stepped, or make the ledger durable after a checkpoint was written.

    During recovery the message is deferred. Raises RemoteProtocolError if the worker is no trainer, or the message does
    not fit the step in training.
    """
    what = f"says {type(message).__name__}"
    trainers, stage = env.settings.checkpointing_roles, env.flow.train_stage
    fault = state.membership.role_fault(worker, trainers, what)
    has_pulled = worker in state.requests.pullers.get(stage, {})
    if not fault and not (trainers or has_pulled or worker in state.recovery.returned):
        fault = f"{worker} {what}, but has never pulled {stage!r}"
    if fault:
        raise RemoteProtocolError(fault)
    if state.recovery.is_active:
        state.recovery.deferred.append((worker, message))
        return []
    return apply_deferrable(state, env, worker, message)


def apply_deferrable(state: State, env: Environment, worker: WorkerId, message: Deferrable) -> list[Command]:
    """Handle a message of a trainer outside recovery. Raises RemoteProtocolError if it does not fit the step."""
    if isinstance(message, CheckpointWritten):
        return _publish_checkpoint(state, worker, message)
    if worker in state.recovery.returned and message.step < state.window.step:
        return []  # an earlier controller has recorded the end of this step
    return close_step(state, env, worker, message)


def close_step(state: State, env: Environment, worker: WorkerId, message: StepCompleted) -> list[Command]:
    """Close the step in training: all taken groups are trained.

    Raises RemoteProtocolError if another step is in training, it lacks groups, or a metric has an invalid name.
    """
    window = state.window
    if message.step != window.step or window.places != 0 or window.over:
        raise RemoteProtocolError(
            f"{worker} ended step {message.step}, but step {window.step} is in training with {window.places} "
            "places open"
        )
    if fault := validate_names(message.metrics, {}):
        raise RemoteProtocolError(f"{worker} ended step {message.step}, and {fault}")
    filtered, skipped = window.filtered, window.skipped
    trained = window.close()
    if state.lanes.failed:
        for slot in [slot for group in trained for slot in group.slots]:
            failed_transfers.note_arrived(
                state, slot.leases[env.flow.train_stage].worker, env.flow.train_stage, (slot,)
            )
    state.table.end_training(env.flow.train_stage, trained)
    commands: list[Command] = []
    for group in trained:
        reward = rollback.note_outcome(state, group, message.step)
        commands += rollback.record(state, env, group, "trained", step=message.step, reward=reward)
    state.history.close_step()
    closed, guarded = apply_guards(state, env, step_metrics.step_closed(env, message, trained, filtered, skipped))
    commands.append(closed)
    commands += guarded
    commands.append(AppendRestartLog(CounterSet(STEP, window.step)))
    if filtered:
        commands.append(AppendRestartLog(CounterSet(FILTERED, 0)))
    if skipped:
        commands.append(AppendRestartLog(CounterSet(SKIPPED, 0)))
    commands += rollback.close(state, env, trained)
    step_selection.decide_again(state, env, filtered)
    return commands + rollback.drop_over_age(state, env)


# ---- guards


def apply_guards(state: State, env: Environment, closed: StepClosed) -> tuple[StepClosed, list[Command]]:
    """Apply the guards to a step that was closed just now; a rule with action stop requests preemption of the run.

    Returns:
        The statistics of the step with the guards that fired, and the commands that log and record the firings.
    """
    rules, guards = env.policies.guards, state.guards
    if not rules:
        return closed, []
    metrics = closed.measured()
    counts, firings = count_violations(rules, guards.violations, metrics, guards.recent)
    before = guards.violations
    guards.violations = counts
    guards.note_values(rules, metrics)
    guards.firing = [str(firing) for firing in firings]
    commands: list[Command] = [
        AppendRestartLog(CounterSet(f"{VIOLATIONS}{index}", count))
        for index, (count, earlier) in enumerate(zip(counts, before, strict=True))
        if count != earlier
    ]
    fired: dict[str, int] = {}
    for firing in firings:
        metric = firing.rule.metric
        fired[metric] = max(fired.get(metric, 0), firing.violations)
        commands += _log_firing(state, firing, closed.step)
        match firing.rule.action:
            case "hold":
                if guards.hold(until := closed.step + 1 + firing.rule.hold_steps):
                    commands.append(AppendRestartLog(CounterSet(HELD_UNTIL, until)))
            case "stop" if not state.window.over:  # else the run is complete
                guards.order = guards.order or PreemptRun(str(firing), EXIT_GUARD)
    return replace(closed, fired=tuple(fired.items())), commands


def _log_firing(state: State, firing: Firing, step: int) -> list[Command]:
    """The command that logs a firing; none if the rule was logged less than `LOG_INTERVAL_STEPS` steps ago."""
    last = state.guards.logged[firing.index]
    if last is not None and step - last < LOG_INTERVAL_STEPS:
        return []
    held = f"; the staleness bound is 0 for {firing.rule.hold_steps} steps" if firing.rule.action == "hold" else ""
    text = f"{firing}{held}"
    state.guards.note_logged(firing.index, step, text)
    return [LogEvent("guard", step, text)]


# ---- checkpoints


def _publish_checkpoint(state: State, worker: WorkerId, message: CheckpointWritten) -> list[Command]:
    """The commands that sync the ledger to disk and then answer the trainer."""
    if message.step != state.window.step:
        raise RemoteProtocolError(
            f"{worker} saved its state after {message.step} steps, but {state.window.step} are closed"
        )
    text = f"{worker} has saved its state after {message.step} steps"
    return [LogEvent("checkpoint", message.step, text, worker), Persist(worker, message.request)]
