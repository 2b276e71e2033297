"""Guarantees of each weight sync policy in whole simulated runs with faults."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Command, Event, Send
from flowrt.controller.policies.weight_sync import Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.controller.state.weights import VersionTable
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.effort import examples
from tests.property import test_core
from tests.property.test_core import scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_sound
from tests.simulation.scenario import Scenario

RUNS = settings(test_core.RUNS, max_examples=examples(15))


class FetchCheckingCluster(SimulatedCluster):
    """Checks every fetch that only the policy can have caused, as admission would not have forced it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.by_policy = 0

    def handle(self, event: Event) -> list[Command]:
        staged = {worker: receiver.staged for worker, receiver in self.core.state.models.policy.receivers.items()}
        commands = super().handle(event)
        weights, outdated = self.core.state.models.policy, self.core.state.models.outdated
        fetching = [
            command.worker
            for command in commands
            if isinstance(command, Send) and isinstance(command.message, m.ReceiveWeights)
        ]
        # The staged version may come with this event, as for a worker that has just joined.
        age = {
            worker: weights.latest - max(staged.get(worker, 0), weights.receivers[worker].staged) for worker in fetching
        }
        chosen = {worker: age[worker] for worker in fetching if worker not in outdated}
        self.by_policy += len(chosen)
        check_fetches(self.scenario.weight_sync, weights, chosen, {worker for worker in fetching if worker in outdated})
        return commands


def check_fetches(
    policy: WeightSyncPolicy, weights: VersionTable, chosen: dict[WorkerId, int], forced: set[WorkerId]
) -> None:
    match policy:
        case EveryN(interval):
            assert all(age >= interval for age in chosen.values()), f"{chosen} versions behind, and fetching"
        case Rolling(max_concurrent, max_behind):
            in_turn = [worker for worker, age in chosen.items() if age <= max_behind]
            moving = [
                worker
                for worker, receiver in weights.receivers.items()
                if worker not in forced and (worker in weights.fetching or receiver.applied < receiver.staged)
            ]
            assert not in_turn or len(moving) <= max_concurrent, f"{in_turn} fetch in turn, and {moving} update at once"


@given(data=st.data(), max_concurrent=st.integers(1, 3), max_behind=st.integers(0, 2))
@RUNS
def test_a_rolling_refresh_limits_the_workers_that_update_at_once(
    data: st.DataObject, max_concurrent: int, max_behind: int
) -> None:
    policy = Rolling(max_concurrent, max_behind)
    scenario = data.draw(scenarios(weight_sync=policy, rollouts=4, kills=1, broken_lanes=2, steps=5))
    assert_sound(FetchCheckingCluster(scenario).run())


@given(data=st.data(), interval=st.integers(1, 4))
@RUNS
def test_no_worker_fetches_before_it_is_n_versions_behind(data: st.DataObject, interval: int) -> None:
    scenario = data.draw(scenarios(weight_sync=EveryN(interval), rollouts=3, kills=1, broken_lanes=2, steps=6))
    assert_sound(FetchCheckingCluster(scenario).run())


@pytest.mark.slow
def test_some_fetches_are_caused_by_the_policy_and_not_by_admission() -> None:
    for policy in (Rolling(1), EveryN(2)):
        watched = [
            FetchCheckingCluster(Scenario(seed=seed, weight_sync=policy, rollouts=4, bound=2, steps=6)).run()
            for seed in range(4)
        ]
        assert sum(cluster.by_policy for cluster in watched if isinstance(cluster, FetchCheckingCluster)) > 10


@given(data=st.data(), interval=st.integers(1, 4))
@RUNS
def test_an_infinite_divergence_limit_equals_a_refresh_every_n_versions(data: st.DataObject, interval: int) -> None:
    scenario = data.draw(scenarios(weight_sync=EveryN(interval), kills=1, broken_lanes=1))
    every = SimulatedCluster(scenario).run()
    other = SimulatedCluster(replace(scenario, weight_sync=Divergence(float("inf"), interval))).run()
    assert other.log == every.log
