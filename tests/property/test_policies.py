"""Every policy in whole simulated runs: identity settings produce equal logs, the others satisfy the invariants."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.events import Send
from flowrt.controller.policies.batching import FixedTokens, GroupCount, TokenBudget
from flowrt.controller.policies.dispatch.length_aware import DecodeCost, LengthAware
from flowrt.controller.policies.dispatch.priority import Priority
from flowrt.controller.policies.rank_balancing import Balanced
from flowrt.controller.policies.weight_sync import Divergence, EveryN, Rolling
from flowrt.controller.settings import OnLostSample
from flowrt.controller.state.slots import Slot
from flowrt.protocol import messages as m
from flowrt.protocol.messages import KEPT_TOKENS
from tests.property.test_core import RUNS, scenarios
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.run_invariants import assert_sound
from tests.simulation.scenario import Scenario

COST = DecodeCost(0.01, 0.001)


def zero_urgency(slot: Slot) -> float:
    return 0.0


def by_member(slot: Slot) -> float:
    return float(slot.member + slot.group.prompt % 3)


IDENTITIES: dict[str, dict[str, Any]] = {
    "priority": {"dispatch": Priority(zero_urgency, 1.0)},
    "tail lanes": {"dispatch": LengthAware(COST, 8, fraction=0)},
    "balanced": {"rank_balancing": Balanced(1)},
    "rolling": {"weight_sync": Rolling(1000)},
    "every n": {"weight_sync": EveryN(1)},
    "divergence": {"weight_sync": Divergence(-1.0, 1000)},
}
POLICIES: dict[str, dict[str, Any]] = {
    "priority": {"dispatch": Priority(by_member, 0.5)},
    "tail lanes": {"dispatch": LengthAware(COST, 4, fraction=0.5)},
    "balanced": {"rank_balancing": Balanced(2), "ranks": 2},
    "cut": {"tokens_per_step": FixedTokens(12)},
    "both": {"tokens_per_step": FixedTokens(9), "rank_balancing": Balanced(3), "ranks": 3},
    "rolling": {"weight_sync": Rolling(1)},
    "every n": {"weight_sync": EveryN(3)},
    "divergence": {"weight_sync": Divergence(0.1, 100)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IDENTITIES)
@given(scenario=scenarios(kills=1))
@RUNS
def test_identity_settings_produce_the_same_event_log(name: str, scenario: Scenario) -> None:
    plain = SimulatedCluster(scenario).run()
    other = SimulatedCluster(dataclasses.replace(scenario, **IDENTITIES[name])).run()
    assert other.log == plain.log


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
@RUNS
def test_every_policy_satisfies_the_invariants(name: str, data: st.DataObject) -> None:
    scenario = data.draw(scenarios(kills=1, broken_lanes=1, **POLICIES[name]))
    assert_sound(SimulatedCluster(scenario).run())


@pytest.mark.slow
@given(scenario=scenarios(on_lost_sample=OnLostSample.DROP_GROUP, kills=8, steps=6, **POLICIES["both"]))
@RUNS
def test_a_planned_step_completes_without_a_dropped_group(scenario: Scenario) -> None:
    SimulatedCluster(scenario).run()


def test_a_place_that_becomes_free_after_replanning_is_filled() -> None:
    """Found by the property above: a taken group was dropped, and every rank was notified that the step is done."""
    cut = FixedTokens(9)
    faults: dict[str, Any] = {
        "on_lost_sample": OnLostSample.DROP_GROUP,
        "kills": 8,
        "rank_balancing": Balanced(ranks=3),
        "tokens_per_step": cut,
        "fetch_speed": 0.05,
    }
    size: dict[str, Any] = {
        "steps": 6,
        "groups_per_step": 4,
        "members": 1,
        "ranks": 3,
        "capacity": 3,
        "bound": 2,
        "strict_issue_order": False,
    }
    rest: dict[str, Any] = {
        "batcher": TokenBudget(1),
        "rollouts": 2,
        "rewards": 1,
        "references": 0,
        "evals": 0,
        "publish_every": 1,
    }
    more: dict[str, Any] = {"attempts": 8, "prompts_at_once": 1, "checkpoint_every": 0, "speeds": ()}
    SimulatedCluster(Scenario(seed=268435457, **faults, **size, **rest, **more)).run()


@given(scenario=scenarios(tokens_per_step=FixedTokens(10**9), strict_issue_order=True))
@RUNS
def test_a_budget_beyond_all_tokens_cuts_nothing(scenario: Scenario) -> None:
    # Both wait for the whole step; the batches differ only in the column of kept tokens, which contains all.
    scenario = dataclasses.replace(scenario, batcher=GroupCount(scenario.groups_per_step), ranks=1)
    uncut = dataclasses.replace(scenario, tokens_per_step=None)
    cut, plain = SimulatedCluster(scenario).run(), SimulatedCluster(uncut).run()
    assert [(step, row) for step, row in cut.trained] == [(step, row) for step, row in plain.trained]
    for command in cut.log:
        if isinstance(command, Send) and isinstance(command.message, m.Grant) and command.worker == "trainer0":
            kept = {values.column: values.values for values in command.message.inline}.get(KEPT_TOKENS, ())
            assert list(kept) == [sum(span[1::2]) for span in command.message.spans]


@given(scenario=scenarios(tokens_per_step=FixedTokens(7), members=3, groups_per_step=3))
@RUNS
def test_a_cut_step_trains_its_budget_or_all_tokens(scenario: Scenario) -> None:
    cluster = SimulatedCluster(scenario).run()
    kept: dict[int, float] = {}
    for command in cluster.log:
        if isinstance(command, Send) and isinstance(command.message, m.Grant) and command.worker.startswith("trainer"):
            columns = {values.column: values.values for values in command.message.inline}
            kept |= dict(zip(command.message.slots, columns.get(KEPT_TOKENS, ()), strict=True))
    for step in range(scenario.steps):
        rows = [row for at, row in cluster.trained if at == step]
        generated = sum(sum(row.spans[1::2]) for row in rows)
        assert sum(kept[row.slot] for row in rows) == min(7, generated)


@given(scenario=scenarios(weight_sync=EveryN(50), bound=0, steps=4))
@RUNS
def test_a_refresh_that_is_never_due_does_not_stop_the_run(scenario: Scenario) -> None:
    # At bound 0 no worker may start on old weights: admission forces the fetch that the policy would delay.
    assert_sound(SimulatedCluster(scenario).run())
