"""A controller that crashes at any moment and comes back with what it had written down: nothing is lost by it."""

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Keep, Tick
from flowrt.controller.settings import LostMember
from flowrt.controller.walk import Made
from flowrt.testing.scenario import Scenario
from flowrt.testing.sim import Cluster
from tests.property.test_core import RUNS, assert_sound, scenarios


@RUNS
@given(scenarios(), st.integers(1, 3))
def test_nothing_is_lost_and_nothing_is_trained_twice(scenario: Scenario, crashes: int) -> None:
    cluster = Cluster(dataclasses.replace(scenario, crashes=crashes)).run()
    assert_sound(cluster)
    assert dict(cluster.core.samples.retreat.dropped) == {}


@settings(RUNS, max_examples=60)
@given(scenarios(kills=2, broken_lanes=1, withdrawals=2, evals=3), st.integers(1, 2))
def test_with_all_other_misfortunes(scenario: Scenario, crashes: int) -> None:
    assert_sound(Cluster(dataclasses.replace(scenario, crashes=crashes)).run())


@RUNS
@given(scenarios(members=3, prompts_at_once=1), st.sampled_from(LostMember))
def test_under_every_policy_for_lost_members(scenario: Scenario, policy: LostMember) -> None:
    assert_sound(Cluster(dataclasses.replace(scenario, crashes=2, losses=1, lost_member=policy, attempts=3)).run())


@RUNS
@given(scenarios(), st.integers(1, 3))
def test_what_was_generated_is_not_generated_again(scenario: Scenario, crashes: int) -> None:
    cluster = Cluster(dataclasses.replace(scenario, crashes=crashes)).run()
    made = [event.entry for event in cluster.log if isinstance(event, Keep) and isinstance(event.entry, Made)]
    times = Counter(slot for one in made if one.stage == "rollout" for slot in one.slots)
    assert set(times.values()) == {1}
    assert {row.slot for _, row in cluster.trained} <= set(times)


def test_a_worker_that_does_not_come_back_is_waited_for_a_while_only() -> None:
    cluster = Cluster(Scenario(seed=3, steps=2))
    while not cluster.steps:
        cluster.step()
    cluster.crash()
    lost = cluster.workers["rollout0"]
    lost.alive = False
    lost.outbox.clear()
    for worker in cluster.workers.values():
        while worker.outbox:
            cluster.handle(worker.outbox.popleft())
    assert cluster.core.regroup.waits_for() == ["rollout0"]
    cluster.clock.advance(cluster.core.settings.regroup_s + 0.1)
    cluster.handle(Tick())
    assert cluster.core.regroup.waits_for() == []
    assert_sound(cluster.run())
