"""Guards at the end of a step: which rules fire on its metrics, and the actions of these rules.

All decisions depend on the recorded events alone, so a replay warns, holds and stops at the same steps.
"""

from dataclasses import replace

from flowrt.controller.events import AppendRestartLog, Command, LogEvent, PreemptRun, StepClosed
from flowrt.controller.policies.guards import Firing, count_violations
from flowrt.controller.state.controller_restart import HELD_UNTIL, VIOLATIONS, CounterSet
from flowrt.controller.state.state import Environment, State
from flowrt.errors import EXIT_GUARD

LOG_INTERVAL_STEPS = 50
"""A rule that fires in every step is logged once in this number of steps."""


def guard(state: State, env: Environment, closed: StepClosed) -> tuple[StepClosed, list[Command]]:
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
    guards.count(counts)
    guards.note_values(rules, metrics)
    guards.note_firing(firings)
    commands: list[Command] = [
        AppendRestartLog(CounterSet(f"{VIOLATIONS}{index}", count))
        for index, (count, earlier) in enumerate(zip(counts, before, strict=True))
        if count != earlier
    ]
    fired: dict[str, int] = {}
    for firing in firings:
        metric = firing.rule.metric
        fired[metric] = max(fired.get(metric, 0), firing.violations)
        commands += _log(state, firing, closed.step)
        match firing.rule.action:
            case "hold":
                if guards.hold(until := closed.step + 1 + firing.rule.hold_steps):
                    commands.append(AppendRestartLog(CounterSet(HELD_UNTIL, until)))
            case "stop" if not state.window.over:  # else the run is complete
                guards.stop(PreemptRun(str(firing), EXIT_GUARD))
    return replace(closed, fired=tuple(fired.items())), commands


def _log(state: State, firing: Firing, step: int) -> list[Command]:
    """The command that logs a firing; none if the rule was logged less than `LOG_INTERVAL_STEPS` steps ago."""
    last = state.guards.logged[firing.index]
    if last is not None and step - last < LOG_INTERVAL_STEPS:
        return []
    held = f"; the staleness bound is 0 for {firing.rule.hold_steps} steps" if firing.rule.action == "hold" else ""
    text = f"{firing}{held}"
    state.guards.note_logged(firing.index, step, text)
    return [LogEvent("guard", step, text)]
