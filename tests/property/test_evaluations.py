"""Evaluations of one version in whole simulated runs: every sample is of that version, and no run deadlocks."""

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Command, Event
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.controller.settings import OnLostSample
from tests.effort import examples
from tests.property import test_core
from tests.property.test_core import scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_evaluated, assert_sound
from tests.simulation.scenario import Scenario

RUNS = settings(test_core.RUNS, max_examples=examples(30))
WEIGHT_SYNC: tuple[WeightSyncPolicy, ...] = (DelayedUpdate(), Rolling(1), EveryN(2), Divergence(1e9, 3))


@st.composite
def evaluations(draw: st.DrawFn, /, **fixed: Any) -> Scenario:
    policy, bound = draw(st.sampled_from(WEIGHT_SYNC)), draw(st.sampled_from([0, 1, 4]))
    return draw(scenarios(exact_evals=4, weight_sync=policy, bound=bound, **fixed))


class PinnedWorkerKiller(SimulatedCluster):
    """Kills the pinned worker, or all rollout workers, up to ``times`` times while a worker is pinned."""

    def __init__(self, scenario: Scenario, times: int, *, all_rollouts: bool) -> None:
        super().__init__(scenario)
        self.times = times
        self.all_rollouts = all_rollouts

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        pin = self.core.state.models.policy.pin
        if self.times and pin is not None and self.core.ended is None and self.rng.random() < 0.2:
            self.times -= 1
            for worker in self.workers.values():
                if worker.alive and (worker.id == pin.worker or (self.all_rollouts and worker.role == "rollout")):
                    self.faults.kill(worker)
        return commands


@RUNS
@given(evaluations())
def test_every_sample_is_of_the_evaluated_version(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(evaluations(swaps_at_once=True))
def test_samples_of_two_versions_are_regenerated(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(evaluations(steps=5), st.integers(1, 3), st.booleans())
def test_the_death_of_the_pinned_or_all_rollout_workers_blocks_no_run(
    scenario: Scenario, times: int, all_rollouts: bool
) -> None:
    cluster = PinnedWorkerKiller(scenario, times, all_rollouts=all_rollouts).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(evaluations(kills=2, broken_lanes=2, expiries=1, losses=1, withdrawals=2), st.sampled_from(OnLostSample))
def test_evaluations_survive_faults(scenario: Scenario, policy: OnLostSample) -> None:
    """Whatever becomes of lost samples in training, those of an evaluation are made again."""
    cluster = SimulatedCluster(dataclasses.replace(scenario, on_lost_sample=policy)).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(evaluations(kills=1, losses=4, attempts=1), st.sampled_from(OnLostSample))
def test_the_source_is_notified_of_evaluated_prompts_that_no_worker_can_answer(
    scenario: Scenario, policy: OnLostSample
) -> None:
    cluster = SimulatedCluster(dataclasses.replace(scenario, on_lost_sample=policy)).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(evaluations(crashes=2, kills=1))
def test_evaluations_survive_crashes_of_the_controller(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_evaluated(cluster)
