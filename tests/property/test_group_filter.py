"""The group filter and the curriculum in whole simulated runs, with every fault, restarts and resumes."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.policies.batching import FixedTokens
from flowrt.controller.policies.curriculum import EveryPrompt, SolveRate
from flowrt.controller.policies.group_filter import (
    DECISION,
    AllOf,
    GroupFilter,
    KeepAll,
    RewardBand,
    UserFunction,
    ZeroVariance,
)
from flowrt.controller.policies.rank_balancing import Balanced
from flowrt.controller.settings import OnLostSample
from tests.effort import examples
from tests.property.test_core import RUNS, max_live_prompts, scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.preempted_runs import run_with_preemptions
from tests.simulation.resumed_runs import run_with_crashes
from tests.simulation.run_invariants import assert_filtered, assert_sound
from tests.simulation.scenario import PROMPTS_PER_EPOCH, Scenario

KINDS: tuple[GroupFilter, ...] = (
    ZeroVariance(),
    RewardBand(0.1, 0.9),
    AllOf((ZeroVariance(), RewardBand(0.0, 0.7))),
    UserFunction(),
    AllOf((ZeroVariance(), UserFunction())),
)
FILTERS = st.sampled_from(KINDS)
SOLVE_RATES = st.sampled_from([0.0, 0.3, 0.5, 1.0])
CURRICULA = st.sampled_from([EveryPrompt(), SolveRate(history=2, floor=0.3, seed=1), SolveRate(history=1, floor=0.1)])
FAULTS: dict[str, Any] = {"kills": 2, "broken_lanes": 1, "expiries": 1, "withdrawals": 2, "losses": 1}


@st.composite
def filtered_scenarios(draw: st.DrawFn, /, **fixed: Any) -> Scenario:
    group_filter: GroupFilter = draw(FILTERS)
    drawn: dict[str, Any] = {
        "group_filter": group_filter,
        "filters": 1 + draw(st.booleans()) if DECISION in group_filter.needs else 0,
        "filter_tries": draw(st.sampled_from([1, 3, 12])),  # more take too many actions if all prompts are solved
        "solve_rate": draw(SOLVE_RATES),
        "curriculum": draw(CURRICULA),
    }
    return draw(scenarios(**drawn | fixed))


IDENTITIES: dict[str, dict[str, Any]] = {
    "band of all rewards": {"group_filter": RewardBand(0.0, 1.0)},
    "empty conjunction": {"group_filter": AllOf(())},
    "no tries": {"group_filter": ZeroVariance(), "filter_tries": 0, "solve_rate": 0.5},
    "curriculum with floor 1": {"curriculum": SolveRate(history=3, floor=1.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IDENTITIES)
@given(scenario=scenarios(kills=1))
@RUNS
def test_identity_settings_produce_the_same_event_log(name: str, scenario: Scenario) -> None:
    identity = IDENTITIES[name]
    scenario = dataclasses.replace(scenario, solve_rate=identity.get("solve_rate"))
    plain = SimulatedCluster(scenario).run()
    other = SimulatedCluster(dataclasses.replace(scenario, **identity)).run()
    assert without_counts(other.log) == without_counts(plain.log)


def without_counts(log: list[Any]) -> list[Any]:
    """The event log without the statistics of the filter."""
    return [dataclasses.replace(command, counts=()) if hasattr(command, "counts") else command for command in log]


@pytest.mark.slow
@settings(RUNS, max_examples=examples(60))
@given(filtered_scenarios())
def test_every_step_is_complete_and_satisfies_the_filter(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_filtered(cluster)


@pytest.mark.slow
@settings(RUNS, max_examples=examples(80))
@given(filtered_scenarios(**FAULTS), st.sampled_from(OnLostSample), st.integers(1, 2))
def test_every_step_satisfies_the_filter_under_every_fault(
    scenario: Scenario, policy: OnLostSample, at_once: int
) -> None:
    at_once = min(at_once, max_live_prompts(scenario))
    changed = dataclasses.replace(scenario, on_lost_sample=policy, attempts=3, prompts_at_once=at_once)
    cluster = SimulatedCluster(changed).run()
    assert_sound(cluster)
    assert_filtered(cluster)


@settings(RUNS, max_examples=examples(40))
@given(
    filtered_scenarios(
        group_filter=UserFunction(), filters=2, solve_rate=None, members=3, steps=5, rollouts=3, groups_per_step=2
    ),
    st.sampled_from([FAULTS | {"kills": 8}, {"kills": 8, "crashes": 2}]),
    st.sampled_from(OnLostSample),
)
def test_a_regenerated_sample_causes_a_new_decision_on_its_group(
    scenario: Scenario, faults: dict[str, Any], policy: OnLostSample
) -> None:
    """The decision of a filter function depends on all rewards of a group; `assert_filtered` compares it."""
    cluster = SimulatedCluster(dataclasses.replace(scenario, on_lost_sample=policy, attempts=3, **faults)).run()
    assert_sound(cluster)
    assert_filtered(cluster)


@settings(RUNS, max_examples=examples(60))
@given(filtered_scenarios(kills=1, withdrawals=2), st.integers(1, 3))
def test_a_restarted_controller_keeps_filtered_groups_and_counts(scenario: Scenario, crashes: int) -> None:
    cluster = SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run()
    assert_sound(cluster)
    assert_filtered(cluster)


@settings(RUNS, max_examples=examples(40))
@given(filtered_scenarios(kills=1, repeats=6), st.integers(1, 3))
def test_repeated_messages_around_controller_restarts_change_nothing(scenario: Scenario, crashes: int) -> None:
    cluster = SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run()
    assert_sound(cluster)
    assert_filtered(cluster)


PLANNED: list[dict[str, Any]] = [{"tokens_per_step": FixedTokens(9)}, {"rank_balancing": Balanced(2), "ranks": 2}]


@pytest.mark.parametrize("planned", PLANNED, ids=["cut", "balanced"])
@given(data=st.data())
@RUNS
def test_steps_that_are_planned_as_a_whole_satisfy_the_filter(planned: dict[str, Any], data: st.DataObject) -> None:
    cluster = SimulatedCluster(data.draw(filtered_scenarios(kills=1, **planned))).run()
    assert_sound(cluster)
    assert_filtered(cluster)


@settings(RUNS, max_examples=examples(40))
@given(
    filtered_scenarios(checkpoint_every=1, ranks=1, on_lost_sample=OnLostSample.REGENERATE),
    st.lists(st.integers(1, 400), min_size=1, max_size=3),
)
def test_an_interrupted_run_loses_nothing_and_trains_nothing_twice(scenario: Scenario, crashes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runs = run_with_crashes(scenario, crashes, Path(directory) / "ledger.sqlite")
        try:
            assert_resumed(runs, scenario)
        finally:
            runs.ledger.close()


@settings(RUNS, max_examples=examples(30))
@given(filtered_scenarios(checkpoint_every=1), st.lists(st.integers(0, 300), min_size=1, max_size=2))
def test_a_preempted_run_loses_nothing(scenario: Scenario, after: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runs = run_with_preemptions(scenario, after, Path(directory) / "ledger.sqlite")
        try:
            assert_resumed(runs, scenario)
        finally:
            runs.ledger.close()


def assert_resumed(runs: Any, scenario: Scenario) -> None:
    account = runs.ledger.account(live=[])
    assert (account.lost, account.trained_twice) == (0, 0)
    assert account.states.get("trained") == scenario.steps * scenario.groups_per_step
    trained = {(row.epoch, row.prompt): step for step, row in runs.trained()}
    assert len(trained) == scenario.steps * scenario.groups_per_step
    # All prompts up to the last one that was opened are trained, or dropped with a reason.
    known = runs.ledger._db.execute("SELECT epoch, prompt, state, reason FROM prompts").fetchall()
    states = {(epoch, prompt): (state, reason) for epoch, prompt, state, reason in known if state != "unread"}
    last = max(epoch * PROMPTS_PER_EPOCH + prompt for epoch, prompt in states)
    assert set(states) == {divmod(number, PROMPTS_PER_EPOCH) for number in range(last + 1)}
    assert {state for state, _ in states.values()} <= {"trained", "dropped"}
    assert all(reason for state, reason in states.values() if state == "dropped")


# ---- determinism: at bound 0 and in order of issue, nothing depends on timing


def outcomes(cluster: SimulatedCluster) -> dict[tuple[int, int], tuple[str, int]]:
    """The final state and step of each prompt."""
    ends = {
        (record.epoch, record.prompt): (record.state, record.step)
        for record in cluster.records
        if record.state != "ready"
    }
    return {pair: end for pair, end in ends.items() if end[0] in ("trained", "dropped")}


@pytest.mark.slow
@settings(RUNS, max_examples=examples(60))
@given(
    filtered_scenarios(bound=0, strict_issue_order=True, steps=5, members=2),
    st.integers(0, 2**32),
    st.sampled_from([{}, {"kills": 2}, {"crashes": 2}]),
)
def test_strict_issue_order_at_bound_0_makes_selection_independent_of_timing(
    scenario: Scenario, seed: int, faults: dict[str, Any]
) -> None:
    plain = SimulatedCluster(scenario).run()
    other = dataclasses.replace(scenario, seed=seed, rollouts=3, capacity=2, rewards=2, **faults)
    assert outcomes(SimulatedCluster(other).run()) == outcomes(plain)


@pytest.mark.slow
@settings(RUNS, max_examples=examples(40))
@given(
    filtered_scenarios(bound=0, strict_issue_order=True, steps=5, members=2, ranks=1, checkpoint_every=1),
    st.lists(st.integers(100, 500), min_size=1, max_size=2),
)
def test_a_resumed_run_has_the_same_outcomes(scenario: Scenario, crashes: list[int]) -> None:
    plain = outcomes(SimulatedCluster(scenario).run())
    with tempfile.TemporaryDirectory() as directory:
        runs = run_with_crashes(scenario, crashes, Path(directory) / "ledger.sqlite")
        runs.ledger.flush()
        query = "SELECT epoch, prompt, state, step FROM prompts WHERE state != 'unread'"
        resumed = {(epoch, prompt): (state, step) for epoch, prompt, state, step in runs.ledger._db.execute(query)}
        runs.ledger.close()
    assert resumed == plain


# ---- effects on a run


def test_solved_prompts_cannot_stop_a_run() -> None:
    cluster = SimulatedCluster(Scenario(group_filter=ZeroVariance(), filter_tries=3, solve_rate=1.0)).run()
    assert_sound(cluster)
    assert [dict(closed.counts)["filtered_groups"] for closed in cluster.steps] == [3] * 4
    assert [dict(closed.counts)["refused_groups_trained"] for closed in cluster.steps] == [2] * 4
    assert dict(cluster.core.state.dropped) == {"filtered: equal rewards": 12}


def test_without_a_filter_the_statistics_count_groups_without_variance() -> None:
    cluster = SimulatedCluster(Scenario(solve_rate=1.0)).run()
    assert [dict(closed.counts)["zero_variance_groups"] for closed in cluster.steps] == [2] * 4
    assert not {name for closed in cluster.steps for name, _ in closed.counts} & {"filtered_groups", "skipped_prompts"}
    assert {type(KeepAll()), *map(type, [cluster.core.env.policies.group_filter])} == {KeepAll}


def test_a_curriculum_skips_solved_prompts_and_no_new_ones() -> None:
    curriculum = SolveRate(history=1, floor=0.1)
    cluster = SimulatedCluster(Scenario(solve_rate=1.0, curriculum=curriculum, steps=8)).run()
    assert_sound(cluster)
    skipped = [record for record in cluster.records if record.reason == "skipped by the curriculum"]
    assert len(skipped) > 16
    assert sum(dict(closed.counts)["skipped_prompts"] for closed in cluster.steps) == len(skipped)
    assert min(prompt.epoch for prompt in skipped) >= 1
