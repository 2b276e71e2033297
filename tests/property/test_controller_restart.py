"""A controller that crashes at any moment and restarts from its durable state: nothing is lost."""

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import AppendRestartLog, Tick
from flowrt.controller.settings import OnLostSample
from flowrt.controller.state.controller_restart import StageCommitted
from tests.effort import examples
from tests.property.test_core import RUNS, scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_sound
from tests.simulation.scenario import Scenario


@RUNS
@given(scenarios(), st.integers(1, 3))
def test_a_controller_crash_loses_nothing_and_trains_nothing_twice(scenario: Scenario, crashes: int) -> None:
    cluster = SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run()
    assert_sound(cluster)
    assert dict(cluster.core.state.dropped) == {}


@settings(RUNS, max_examples=examples(60))
@given(scenarios(kills=2, broken_lanes=1, withdrawals=2, evals=3), st.integers(1, 2))
def test_a_controller_crash_with_other_faults_loses_nothing(scenario: Scenario, crashes: int) -> None:
    assert_sound(SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run())


@settings(RUNS, max_examples=examples(60))
@given(scenarios(withdrawals=2), st.integers(1, 3), st.integers(0, 2))
def test_nothing_is_lost_while_the_controller_does_not_run(scenario: Scenario, stalls: int, crashes: int) -> None:
    assert_sound(SimulatedCluster(dataclasses.replace(scenario, stalls=stalls, crashes=crashes)).run())


@settings(RUNS, max_examples=examples(60))
@given(scenarios(rollouts=3, terminations=2), st.integers(0, 2))
def test_workers_that_ask_to_leave_leave_under_any_controller(scenario: Scenario, crashes: int) -> None:
    assert_sound(SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run())


@settings(RUNS, max_examples=examples(60))
@given(scenarios(rollouts=3, drains=2), st.integers(0, 2))
def test_workers_that_an_operator_drains_leave_under_any_controller(scenario: Scenario, crashes: int) -> None:
    assert_sound(SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run())


@RUNS
@given(scenarios(members=3, prompts_at_once=1), st.sampled_from(OnLostSample))
def test_a_controller_crash_loses_nothing_under_every_lost_sample_policy(
    scenario: Scenario, policy: OnLostSample
) -> None:
    assert_sound(
        SimulatedCluster(dataclasses.replace(scenario, crashes=2, losses=1, on_lost_sample=policy, attempts=3)).run()
    )


@RUNS
@given(scenarios(), st.integers(1, 3))
def test_a_controller_crash_regenerates_no_sample(scenario: Scenario, crashes: int) -> None:
    cluster = SimulatedCluster(dataclasses.replace(scenario, crashes=crashes)).run()
    commits = [
        event.entry
        for event in cluster.log
        if isinstance(event, AppendRestartLog) and isinstance(event.entry, StageCommitted)
    ]
    times = Counter(slot for commit in commits if commit.stage == "rollout" for slot in commit.slots)
    assert set(times.values()) == {1}
    assert {row.slot for _, row in cluster.trained} <= set(times)


@settings(RUNS, max_examples=examples(60))
@given(scenarios(crashes=2, late_inventories=2, longest=1, kills=1))
def test_an_inventory_that_comes_late_makes_no_stale_column_current(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


def test_a_worker_that_does_not_rejoin_is_awaited_until_the_rejoin_timeout() -> None:
    cluster = SimulatedCluster(Scenario(seed=3, steps=2))
    while not cluster.steps:
        cluster.step()
    cluster.crash()
    lost = cluster.workers["rollout0"]
    lost.alive = False
    lost.outbox.clear()
    for worker in cluster.workers.values():
        while worker.outbox:
            cluster.handle(worker.outbox.popleft())
    assert sorted(cluster.core.state.recovery.awaited) == ["rollout0"]
    cluster.clock.advance(cluster.core.settings.rejoin_timeout_s + 0.1)
    cluster.handle(Tick())
    assert sorted(cluster.core.state.recovery.awaited) == []
    assert_sound(cluster.run())
