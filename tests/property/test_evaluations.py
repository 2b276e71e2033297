"""Evaluations of one version in whole simulated runs: every sample is of that version, and no run deadlocks."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Command, Event, MessageReceived, Send
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_LIMIT
from tests.effort import examples
from tests.property import test_core
from tests.property.test_core import scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_sound
from tests.simulation.scenario import Scenario

RUNS = settings(test_core.RUNS, max_examples=examples(30))
REFRESH: tuple[WeightSyncPolicy, ...] = (DelayedUpdate(), Rolling(1), EveryN(2), Divergence(1e9, 3))


@st.composite
def evaluations(draw: st.DrawFn, /, **fixed: Any) -> Scenario:
    refresh, bound = draw(st.sampled_from(REFRESH)), draw(st.sampled_from([0, 1, 4]))
    return draw(scenarios(exact_evals=4, refresh=refresh, bound=bound, **fixed))


def assert_evaluated(cluster: SimulatedCluster) -> None:
    """Each evaluation has all its samples, only by its version, or is reported as lost."""
    opened: dict[int, int] = {}  # the version of each offer, by its first group: it may be accepted twice
    offers: dict[int, int] = {}
    for one in cluster.log:
        if isinstance(one, MessageReceived) and isinstance(one.message, m.Offer) and one.message.at_most != NO_LIMIT:
            offers[one.message.request] = one.message.at_most
        if isinstance(one, Send) and isinstance(one.message, m.OfferAccepted) and one.message.request in offers:
            opened.update({one.message.first: offers[one.message.request]} if one.message.first >= 0 else {})
    for version, rows in cluster.shared.evaluated.items():
        assert all(set(row.spans[::2]) == {version} for row in rows)
    done = {version: len({row.slot for row in rows}) for version, rows in cluster.shared.evaluated.items()}
    for version, count in Counter(opened.values()).items():
        assert done.get(version, 0) == 3 * count or version in cluster.shared.lost, f"{version}: {done} of {opened}"
    newest = cluster.core.state.models.policy.newest
    assert not [one for one in cluster.workers["source0"].offers.values() if one.at_most <= newest]
    exact = cluster.core.state.table.exact
    assert (exact.live, exact.to_generate) == ({}, {})
    assert cluster.core.state.models.policy.pin is None


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
@given(evaluations(kills=2, broken_lanes=2, expiries=1, losses=1, withdrawals=2))
def test_evaluations_survive_faults(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(evaluations(crashes=2, kills=1))
def test_evaluations_survive_crashes_of_the_controller(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert_evaluated(cluster)
