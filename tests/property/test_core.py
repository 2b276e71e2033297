"""The controller core under random interleavings: whole simulated runs with skew, faults and protocol violations.

Every run asserts `Core.check` after each event, and in the workers that what they are ordered to use, send or receive
exists (see tests/simulation). A failure is reproduced by its scenario: `SimulatedCluster(Scenario(...)).run()`.
"""

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Command, Event, MessageReceived
from flowrt.controller.policies.batching import GroupCount, TokenBudget
from flowrt.controller.settings import OnLostSample
from flowrt.protocol import messages as m
from flowrt.protocol.journals import journals_of
from tests.effort import examples
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_evaluated, assert_sound
from tests.simulation.scenario import Scenario

# Not shrunk: a smaller scenario produces unrelated events, and searching for one takes minutes.
RUNS = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@st.composite
def scenarios(draw: st.DrawFn, /, **fixed: Any) -> Scenario:
    bound = fixed.pop("bound", None)
    bound = draw(st.integers(0, 3)) if bound is None else bound
    batcher = st.sampled_from([TokenBudget(1), TokenBudget(25), TokenBudget(60), TokenBudget(10**6), GroupCount(2)])
    drawn: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**32)),
        "bound": bound,
        "strict_issue_order": draw(st.booleans()),
        "steps": draw(st.integers(1, 5)),
        "groups_per_step": draw(st.integers(1, 4)),
        "members": draw(st.integers(1, 3)),
        "batcher": draw(batcher),
        "rollouts": draw(st.integers(1, 4)),
        "rewards": draw(st.integers(1, 2)),
        "references": draw(st.integers(0, 2)),
        "ranks": draw(st.integers(1, 3)),
        "capacity": draw(st.integers(1, 4)),
        "speeds": draw(st.sampled_from([(), (("rollout0", 0.01),), (("rollout0", 0.1), ("reward0", 0.05))])),
        "fetch_speed": draw(st.sampled_from([1.0, 0.05])),
        "journals": draw(st.sampled_from(["", journals_of(1)])),
    }
    return Scenario(**drawn | fixed)


# ---- runs without faults


@RUNS
@given(scenarios())
def test_every_run_completes_and_satisfies_the_invariants(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@pytest.mark.slow
@settings(RUNS, max_examples=examples(60))
@given(scenarios(steps=6, strict_issue_order=False, groups_per_step=2))
def test_nothing_is_dropped_without_faults(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert dict(cluster.core.state.dropped) == {}
    assert not [record for record in cluster.records if record.state == "dropped"]


def test_slow_samples_are_not_displaced_over_several_steps() -> None:
    # At bound 3 places reserved in the next step are not enough: groups can be displaced over two or three steps.
    slow = (("rollout0", 0.005), ("rollout1", 0.05))
    scenario = Scenario(seed=242, bound=3, steps=12, members=1, rollouts=3, references=0, capacity=2, speeds=slow)
    assert dict(SimulatedCluster(scenario).run().core.state.dropped) == {}


@RUNS
@given(scenarios(strict_issue_order=True))
def test_strict_issue_order_trains_groups_in_issue_order(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    by_step = [sorted({row.group for at, row in cluster.trained if at == step}) for step in range(scenario.steps)]
    groups = [group for step in by_step for group in step]
    assert groups == sorted(groups)
    if scenario.bound == 0:
        assert [(record.epoch, record.prompt) for record in cluster.records if record.state == "leased"] == sorted(
            cluster.state
        )


@RUNS
@given(scenarios(evals=4))
def test_every_evaluation_is_scored_during_training(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    offers = {
        e.message.request: e.message
        for e in cluster.log
        if isinstance(e, MessageReceived) and isinstance(e.message, m.Offer)
    }
    offered = Counter(offer.flow for offer in offers.values())
    scored = [
        event.message
        for event in cluster.log
        if isinstance(event, MessageReceived)
        and isinstance(event.message, m.Commit)
        and event.message.stage == "evaluate"
    ]
    assert sum(len(commit.slots) for commit in scored) == offered["eval"]


@RUNS
@given(st.data(), st.integers(1, 3))
def test_skipped_versions_block_no_worker(data: st.DataObject, bound: int) -> None:
    scenario = data.draw(scenarios(bound=bound, publish_every=data.draw(st.integers(1, bound + 1)), fetch_speed=0.05))
    assert_sound(SimulatedCluster(scenario).run())


@RUNS
@given(scenarios(fetch_speed=0.01, bound=3, steps=6))
def test_receivers_end_at_the_latest_version(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert {w.staged for w in cluster.workers.values() if w.role == "rollout"} == {scenario.steps}
    for worker in cluster.workers.values():
        assert worker.weights <= {scenario.steps}, f"{worker.id} keeps old versions {worker.weights}"


# ---- runs with faults


@RUNS
@given(scenarios(kills=3))
def test_killed_workers_lose_nothing(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@RUNS
@given(scenarios(exact_evals=2, kills=1), st.integers(1, 2), st.integers(0, 3), st.integers(0, 2))
def test_sources_that_die_or_offer_the_same_prompts_train_nothing_twice(
    scenario: Scenario, sources: int, kills: int, crashes: int
) -> None:
    changed = dataclasses.replace(scenario, sources=sources, source_kills=kills, crashes=crashes)
    cluster = SimulatedCluster(changed).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


@RUNS
@given(scenarios(broken_lanes=3))
def test_broken_lanes_lose_nothing(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@RUNS
@given(scenarios(expiries=2))
def test_expired_leases_lose_nothing(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@RUNS
@given(scenarios(kills=2, broken_lanes=2, evals=3))
def test_combined_faults_lose_nothing(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@RUNS
@given(scenarios(violations=3, kills=1, evals=3))
def test_protocol_violations_lose_nothing(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@RUNS
@given(scenarios(kills=2))
def test_the_ledger_always_has_the_current_state_of_every_prompt(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario)
    plain_handle = cluster.handle

    def handle(event: Event) -> list[Command]:
        commands = plain_handle(event)
        state = cluster.core.state
        for group in state.table.groups.values():
            if group.flow == "train":
                ready = "ready" if group.id in state.table.ready_groups["train"] else "in_flight"
                actual = "leased" if group.id in state.window.taken else ready
                assert cluster.state[group.epoch, group.prompt] == actual, f"group {group.id} after {event}"
        return commands

    cluster.handle = handle  # type: ignore[method-assign]
    cluster.run()


@RUNS
@given(scenarios(repeats=6, kills=1, expiries=1, withdrawals=2, losses=1, checkpoint_every=1))
def test_repeated_and_late_messages_change_nothing(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


# ---- lost members, offers of several prompts, withdrawn pulls


@RUNS
@given(scenarios(prompts_at_once=2), st.integers(2, 3))
def test_runs_with_offers_of_several_prompts_lose_nothing(scenario: Scenario, at_once: int) -> None:
    cluster = SimulatedCluster(
        dataclasses.replace(scenario, prompts_at_once=min(at_once, max_live_prompts(scenario)))
    ).run()
    assert_sound(cluster)


def max_live_prompts(scenario: Scenario) -> int:
    """Number of prompts that admission allows to be live at once."""
    return (scenario.bound + 1) * scenario.groups_per_step


@RUNS
@given(scenarios(withdrawals=6))
def test_withdrawn_pulls_lose_nothing(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    assert_sound(cluster)
    assert dict(cluster.core.state.dropped) == {}


@settings(RUNS, max_examples=examples(60))
@given(scenarios(losses=4), st.sampled_from(OnLostSample), st.sampled_from([1, 2, 8]))
def test_lost_samples_follow_the_policy(scenario: Scenario, policy: OnLostSample, attempts: int) -> None:
    cluster = SimulatedCluster(dataclasses.replace(scenario, on_lost_sample=policy, attempts=attempts)).run()
    assert_sound(cluster)
    if policy is OnLostSample.REGENERATE and attempts > scenario.losses:
        assert "dropped" not in cluster.state.values()


@settings(RUNS, max_examples=examples(80))
@given(
    scenarios(losses=2, kills=2, broken_lanes=1, expiries=1, withdrawals=3, members=4),
    st.sampled_from(OnLostSample),
    st.sampled_from([1, 3]),
    st.integers(1, 3),
)
def test_combined_faults_lose_nothing_under_every_lost_sample_policy(
    scenario: Scenario, policy: OnLostSample, attempts: int, at_once: int
) -> None:
    at_once = min(at_once, max_live_prompts(scenario))
    changed = dataclasses.replace(scenario, on_lost_sample=policy, attempts=attempts, prompts_at_once=at_once)
    assert_sound(SimulatedCluster(changed).run())
