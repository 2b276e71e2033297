"""Guards: the rule compared with a plain definition, and whole simulated runs that a guard holds on policy."""

import dataclasses
import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import AppendRestartLog, Command, Event, LogEvent, StepClosed
from flowrt.controller.policies.guards import Firing, GuardRule, count_violations
from flowrt.controller.state.controller_restart import VIOLATIONS, CounterSet
from flowrt.controller.state.guards import Guards
from tests.effort import examples
from tests.property.test_core import RUNS, scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_sound
from tests.simulation.scenario import Scenario

METRICS = ("kl", "nll")
VALUES = st.one_of(st.floats(-2, 2), st.sampled_from([math.nan, math.inf, -math.inf, 1.0, -1.0]))
LINES = st.lists(st.dictionaries(st.sampled_from(METRICS), VALUES), max_size=12)
ENDS = st.sampled_from([-1.0, 0.0, 1.0])


@st.composite
def rules(draw: st.DrawFn) -> GuardRule:
    metric, limit, steps = draw(st.sampled_from(METRICS)), draw(ENDS), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return GuardRule(metric, above=limit, steps=steps)
    return GuardRule(metric, below=limit, steps=steps)


def violates(rule: GuardRule, line: dict[str, float]) -> bool:
    """An independent definition of a violation."""
    if rule.metric not in line:
        return False
    value = line[rule.metric]
    if rule.above is not None:
        return not -math.inf < value <= rule.above
    assert rule.below is not None
    return not rule.below <= value < math.inf


@given(st.lists(rules(), max_size=4), LINES)
def test_a_rule_fires_after_enough_consecutive_violations(
    drawn: list[GuardRule], lines: list[dict[str, float]]
) -> None:
    counts = [0] * len(drawn)
    for number, line in enumerate(lines):
        counts, firings = count_violations(drawn, counts, line)
        due = [
            index
            for index, rule in enumerate(drawn)
            if number + 1 >= rule.steps
            and all(violates(rule, line) for line in lines[number + 1 - rule.steps : number + 1])
        ]
        assert [firing.index for firing in firings] == due
        for firing in firings:
            assert firing.rule is drawn[firing.index]
            assert firing.violations == counts[firing.index] >= firing.rule.steps
            assert math.isnan(line[firing.rule.metric]) or firing.value == line[firing.rule.metric]


@given(st.sampled_from([0.5, 2.0]), st.integers(2, 4), st.booleans(), st.lists(VALUES, max_size=12))
def test_a_relative_limit_is_a_multiple_of_the_median_of_recent_values(
    factor: float, window: int, is_above: bool, values: list[float]
) -> None:
    rule = GuardRule("kl", median_of=window, above=factor if is_above else None, below=None if is_above else factor)
    guards = Guards([0], [None])
    for number, value in enumerate(values):
        counts, firings = count_violations([rule], guards.violations, {"kl": value}, guards.recent)
        before = sorted([value for value in values[:number] if math.isfinite(value)][-window:])
        due = not math.isfinite(value)
        if not due and len(before) == window:
            middle = (before[(window - 1) // 2] + before[window // 2]) / 2
            due = middle > 0 and (value > factor * middle if is_above else value < factor * middle)
        assert bool(firings) == due
        guards.violations = counts
        guards.note_values([rule], {"kl": value})


@given(st.lists(rules(), max_size=4), LINES, st.integers(0, 12))
def test_a_restart_resets_only_the_violation_counts(
    drawn: list[GuardRule], lines: list[dict[str, float]], at: int
) -> None:
    """A restart causes no additional firing, and has no effect once enough steps have passed."""
    restarted = fired(drawn, lines[:at]) + fired(drawn, lines[at:])
    for number, (actual, whole) in enumerate(zip(restarted, fired(drawn, lines), strict=True)):
        assert set(actual) <= set(whole)
        late = [index for index in whole if number - at + 1 >= drawn[index].steps or number < at]
        assert set(late) <= set(actual)


def fired(drawn: Sequence[GuardRule], lines: Sequence[dict[str, float]]) -> list[list[int]]:
    """The rules that fire in each step."""
    counts, by_step = [0] * len(drawn), []
    for line in lines:
        counts, firings = count_violations(drawn, counts, line)
        by_step.append([firing.index for firing in firings])
    return by_step


def test_a_firing_names_the_rule_and_the_value() -> None:
    firing = Firing(0, GuardRule("kl", above=0.5, steps=3, action="stop"), 0.75, 4)
    assert str(firing) == (
        "guard kl above 0.5 for 3 steps (stop): kl is 0.75, outside its limit for 4 consecutive steps"
    )


# ---- whole runs


@st.composite
def held_scenarios(draw: st.DrawFn, /, **faults: int) -> Scenario:
    steps, hold_steps = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    guard = GuardRule("staleness_max", above=0, steps=steps, action="hold", hold_steps=hold_steps)
    return draw(scenarios(guards=(guard,), steps=6, **faults))


def assert_held(closed: Sequence[StepClosed], rule: GuardRule) -> None:
    """No sample is stale in the steps after one in which the rule has fired."""
    until = 0
    for step in closed:
        if step.step < until:
            assert set(step.lags) <= {0}, f"step {step.step} is stale, and is held until step {until}"
        if step.fired:
            until = step.step + 1 + rule.hold_steps


@settings(RUNS, max_examples=examples(60))
@given(held_scenarios())
def test_a_held_run_is_on_policy_and_completes(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    [rule] = scenario.guards
    assert_held(cluster.steps, rule)
    stale = [{"staleness_max": float(max(step.lags))} for step in cluster.steps]
    assert [bool(step.fired) for step in cluster.steps] == [bool(indices) for indices in fired(scenario.guards, stale)]


@settings(RUNS, max_examples=examples(60))
@given(held_scenarios(kills=1, broken_lanes=1, crashes=2))
def test_a_hold_survives_a_controller_crash(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_held(cluster.steps, scenario.guards[0])


@RUNS
@given(scenarios(kills=1))
def test_a_guard_that_only_warns_changes_nothing_but_the_statistics(scenario: Scenario) -> None:
    plain = SimulatedCluster(scenario).run()
    warned = SimulatedCluster(
        dataclasses.replace(scenario, guards=(GuardRule("staleness_max", below=1000.0, action="warn"),))
    ).run()
    assert all(step.fired == (("staleness_max", number + 1),) for number, step in enumerate(warned.steps))
    event_log = [
        dataclasses.replace(command, fired=()) if isinstance(command, StepClosed) else command for command in warned.log
    ]
    assert [command for command in event_log if not is_of_guards(command)] == plain.log


def is_of_guards(entry: Event | Command) -> bool:
    """Whether this is the log of a firing, or a count of violations."""
    match entry:
        case LogEvent(kind):
            return kind == "guard"
        case AppendRestartLog(CounterSet(name)):
            return name.startswith(VIOLATIONS)
    return False
