"""What each refresh policy promises, in whole simulated runs with misfortunes."""

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


class Watched(SimulatedCluster):
    """Looks at every fetch that the policy alone can have wanted: admission would not have hurried it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.by_choice = 0

    def handle(self, event: Event) -> list[Command]:
        staged = {worker: receiver.staged for worker, receiver in self.core.state.models.policy.receivers.items()}
        commands = super().handle(event)
        weights, gated = self.core.state.models.policy, self.core.state.models.outdated
        told = [one.worker for one in commands if isinstance(one, Send) and isinstance(one.message, m.ReceiveWeights)]
        # What it has staged may have been heard with this very event, as for a worker that has just come.
        age = {worker: weights.latest - max(staged.get(worker, 0), weights.receivers[worker].staged) for worker in told}
        chosen = {worker: age[worker] for worker in told if worker not in gated}
        self.by_choice += len(chosen)
        look(self.scenario.refresh, weights, chosen, {worker for worker in told if worker in gated})
        return commands


def look(policy: WeightSyncPolicy, weights: VersionTable, chosen: dict[WorkerId, int], hurried: set[WorkerId]) -> None:
    match policy:
        case EveryN(versions):
            assert all(age >= versions for age in chosen.values()), f"{chosen} versions behind, and fetch"
        case Rolling(at_once, max_behind):
            in_turn = [worker for worker, age in chosen.items() if age <= max_behind]
            moving = [
                worker
                for worker, receiver in weights.receivers.items()
                if worker not in hurried and (worker in weights.fetching or receiver.applied < receiver.staged)
            ]
            assert not in_turn or len(moving) <= at_once, f"{in_turn} fetch in their turn, and {moving} move at once"


@given(data=st.data(), at_once=st.integers(1, 3), max_behind=st.integers(0, 2))
@RUNS
def test_no_more_move_at_a_time_than_a_rolling_refresh_allows(
    data: st.DataObject, at_once: int, max_behind: int
) -> None:
    policy = Rolling(at_once, max_behind)
    scenario = data.draw(scenarios(refresh=policy, rollouts=4, kills=1, broken_lanes=2, steps=5))
    assert_sound(Watched(scenario).run())


@given(data=st.data(), versions=st.integers(1, 4))
@RUNS
def test_nobody_fetches_before_it_is_so_many_versions_behind(data: st.DataObject, versions: int) -> None:
    scenario = data.draw(scenarios(refresh=EveryN(versions), rollouts=3, kills=1, broken_lanes=2, steps=6))
    assert_sound(Watched(scenario).run())


@pytest.mark.slow
def test_the_policy_and_not_admission_decides_in_some_of_these_runs() -> None:
    for policy in (Rolling(1), EveryN(2)):
        watched = [
            Watched(Scenario(seed=seed, refresh=policy, rollouts=4, bound=2, steps=6)).run() for seed in range(4)
        ]
        assert sum(one.by_choice for one in watched if isinstance(one, Watched)) > 10


@given(data=st.data(), versions=st.integers(1, 4))
@RUNS
def test_a_divergence_that_is_never_too_large_is_a_refresh_every_so_many_versions(
    data: st.DataObject, versions: int
) -> None:
    scenario = data.draw(scenarios(refresh=EveryN(versions), kills=1, broken_lanes=1))
    every = SimulatedCluster(scenario).run()
    other = SimulatedCluster(replace(scenario, refresh=Divergence(float("inf"), versions))).run()
    assert other.log == every.log
