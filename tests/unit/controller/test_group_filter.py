"""Group filters and the curriculum by themselves, and the share of groups that a filter drops at a known solve rate."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.core import Core
from flowrt.controller.events import AppendLedger
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import GroupCount
from flowrt.controller.policies.curriculum import EveryPrompt, SolveRate
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.group_filter import (
    DECISION,
    ENDED,
    HUNG,
    KEPT,
    RAISED,
    REFUSED,
    WRONG,
    AllOf,
    GroupFilter,
    KeepAll,
    RewardBand,
    UserFunction,
    ZeroVariance,
    mean_reward,
)
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.settings import Policies, Settings
from flowrt.controller.state.reward_history import Outcome, RewardHistory
from flowrt.controller.state.samples import Group, new_groups
from flowrt.controller.storage.ledger import Ledger
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.errors import ConfigError
from flowrt.simulation.cluster import FLOW, ClusterPlan, ClusterSimulation


def group(rewards: Sequence[float]) -> Group:
    [made], slots = new_groups("train", (7,), 0, len(rewards), 0, 0, 0)
    for slot, reward in zip(slots, rewards, strict=True):
        slot.inline = {"reward": reward}
    return made


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        (KEPT, ""),
        (REFUSED, "the filter function"),
        (RAISED, "the filter function raised an exception"),
        (HUNG, "the filter function did not return in time"),
        (ENDED, "the filter function ended its process"),
        (WRONG, "the filter function did not return True or False"),
        (7.5, "an unknown decision of the filter function"),
    ],
)
def test_a_decision_of_a_filter_function_is_a_constant_reason(decision: float, why: str) -> None:
    one = group([0.0, 1.0])
    for slot in one.slots:
        slot.inline = {**slot.inline, DECISION: decision}
    assert UserFunction().refusal(one) == why
    assert AllOf((ZeroVariance(), UserFunction())).refusal(one) == why


@pytest.mark.parametrize(
    ("group_filter", "rewards", "why"),
    [
        (KeepAll(), [1.0, 1.0], ""),
        (ZeroVariance(), [1.0, 1.0], "equal rewards"),
        (ZeroVariance(), [0.0, 0.0, 0.0], "equal rewards"),
        (ZeroVariance(), [0.5], "equal rewards"),
        (ZeroVariance(), [0.0, 1e-9], ""),
        (RewardBand(0.2, 0.8), [0.0, 0.4], ""),
        (RewardBand(0.2, 0.8), [0.0, 0.3], "mean reward below 0.2"),
        (RewardBand(0.2, 0.8), [1.0, 0.7], "mean reward above 0.8"),
        (RewardBand(0.5, 0.5), [0.0, 1.0], ""),
        (AllOf((ZeroVariance(), RewardBand(0.0, 0.8))), [1.0, 1.0], "equal rewards"),
        (AllOf((ZeroVariance(), RewardBand(0.0, 0.8))), [1.0, 0.9], "mean reward above 0.8"),
        (AllOf((ZeroVariance(), RewardBand(0.0, 0.8))), [1.0, 0.0], ""),
    ],
)
def test_a_filter_refuses_what_it_says(group_filter: GroupFilter, rewards: list[float], why: str) -> None:
    assert group_filter.refusal(group(rewards)) == why


def test_a_group_without_a_reward_has_no_mean() -> None:
    some = group([1.0, 0.0])
    some.slots[0].inline = {}
    assert mean_reward(some) is None
    assert mean_reward(group([1.0, 0.0])) == 0.5


def test_a_filter_of_a_column_that_does_not_exist_is_refused() -> None:
    policies = Policies(StrictLag(1), Fifo(), GroupCount(1), DelayedUpdate(), group_filter=ZeroVariance())
    with pytest.raises(ConfigError, match="ZeroVariance reads column 'reward', which is no inline column"):
        Core(Settings(), FLOW, policies)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (math.nan, 1.0)])
def test_an_empty_band_is_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="no mean reward is between"):
        RewardBand(low, high)


# ---- the share of dropped groups


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "members"), [(0.5, 4), (0.8, 4), (0.1, 8)])
def test_the_dropped_share_is_that_of_equal_rewards(rate: float, members: int) -> None:
    """All rewards of a group are equal with probability p^n + (1 - p)^n; within 3 sigma of a binomial."""
    plan = ClusterPlan(
        workers=4,
        rows=32,
        groups_per_step=16,
        members=members,
        steps=60,
        lengths=Lengths(LogNormal(100, 0.5, 500), seed=1),
        decode=GenerationCost(base_s=0.01, per_row_s=0.0005),
        train=TrainCost(token_s=1e-5),
        solve_rate=rate,
        group_filter=ZeroVariance(),
        filter_tries=10_000,
    )
    simulation = ClusterSimulation(plan)
    simulation.run()
    counts = [dict(closed.counts) for _, closed in simulation.steps]
    assert [closed.groups for _, closed in simulation.steps] == [16] * 60
    assert [one["zero_variance_groups"] for one in counts] == [0] * 60
    dropped = sum(one["filtered_groups"] for one in counts)
    assert simulation.core.state.dropped == {"filtered: equal rewards": dropped}
    opened = 60 * 16 + dropped
    share = rate**members + (1 - rate) ** members
    assert abs(dropped - opened * share) < 3 * math.sqrt(opened * share * (1 - share))


# ---- the curriculum


def test_uniform_skips_nothing_and_keeps_no_history() -> None:
    assert EveryPrompt().history == 0
    assert not EveryPrompt().skips(1, 5, [])


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 2**63 - 1))
def test_a_prompt_that_was_never_trained_is_always_sampled(prompt: int, epoch: int, seed: int) -> None:
    assert not SolveRate(history=2, floor=0.01, seed=seed).skips(prompt, epoch, [])


@pytest.mark.parametrize(
    ("rewards", "probability"),
    [([0.0], 0.2), ([1.0], 0.2), ([0.0, 1.0], 1.0), ([0.25], 0.8), ([0.75, 0.75], 0.8), ([-3.0], 0.2), ([9.0], 0.2)],
)
def test_prompts_are_sampled_with_the_probability_of_their_solve_rate(rewards: list[float], probability: float) -> None:
    curriculum = SolveRate(history=4, floor=0.2, seed=3)
    assert curriculum.probability(rewards) == pytest.approx(probability)
    draws = 4000
    sampled = sum(not curriculum.skips(prompt, 1, rewards) for prompt in range(draws))
    sigma = math.sqrt(draws * probability * (1 - probability))
    assert abs(sampled - draws * probability) <= 3 * sigma


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(2, 16))
def test_prompts_are_sampled_as_their_groups_have_different_rewards(rewards: list[float], size: int) -> None:
    rate = sum(rewards) / len(rewards)
    different = (1 - rate**size - (1 - rate) ** size) / (1 - 2 * 0.5**size)
    assert SolveRate(history=4, floor=0.2, group_size=size).probability(rewards) == pytest.approx(0.2 + 0.8 * different)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([2, 8]))
def test_a_prior_averages_over_the_solve_rates_that_fit(solved: list[int], prior: float, size: int) -> None:
    """After groups of ``size`` samples, against quadrature; the substitution r = sin(t)^2 has no singular end."""
    good = sum(min(one, size) for one in solved)
    bad = size * len(solved) - good
    different = total = 0.0
    for point in range(1, 2000):
        angle = math.pi / 2 * point / 2000
        rate = math.sin(angle) ** 2
        weight = math.sin(angle) ** (2 * (good + prior) - 1) * math.cos(angle) ** (2 * (bad + prior) - 1)
        total += weight
        different += weight * (1 - rate**size - (1 - rate) ** size)
    curriculum = SolveRate(history=4, floor=0.2, prior=prior, group_size=size)
    probability = curriculum.probability([min(one, size) / size for one in solved])
    assert probability == pytest.approx(0.2 + 0.8 * different / total / (1 - 2 * 0.5**size), abs=1e-3)


def test_rewards_are_scaled_to_solve_rates() -> None:
    curriculum = SolveRate(history=1, floor=0.1, failed_reward=-1.0, solved_reward=1.0)
    assert curriculum.probability([0.0]) == 1.0
    assert curriculum.probability([-1.0]) == curriculum.probability([1.0]) == 0.1


def test_the_draw_depends_on_seed_epoch_and_prompt_alone() -> None:
    def skipped(seed: int, epoch: int) -> list[bool]:
        return [SolveRate(history=1, floor=0.5, seed=seed).skips(prompt, epoch, [1.0]) for prompt in range(64)]

    assert skipped(1, 1) == skipped(1, 1)
    assert len({tuple(skipped(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize(
    ("history", "floor", "failed", "words"),
    [(0, 0.5, 0.0, "undefined"), (1, 0.0, 0.0, "least probability"), (1, 0.5, 1.0, "not below solved_reward")],
)
def test_a_curriculum_that_cannot_be_is_refused(history: int, floor: float, failed: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SolveRate(history=history, floor=floor, failed_reward=failed)
    with pytest.raises(ConfigError, match="a prior of -1"):
        SolveRate(history=1, floor=0.5, prior=-1)


# ---- the history of rewards


def outcome(step: int, prompt: int = 7, epoch: int = 0, reward: float = 1.0) -> Outcome:
    return Outcome(step=step, epoch=epoch, prompt=prompt, reward=reward)


def test_outcomes_count_once_their_step_is_closed() -> None:
    history = RewardHistory(2)
    history.add(outcome(0, reward=0.5))
    assert history.rewards(7) == []
    history.close_step()
    assert history.rewards(7) == [0.5]


def test_the_last_outcomes_are_kept_in_order_of_step_and_epoch() -> None:
    history = RewardHistory(2)
    for one in (outcome(0, epoch=2, reward=0.2), outcome(0, epoch=1, reward=0.1)):
        history.add(one)
    history.close_step()
    assert history.rewards(7) == [0.1, 0.2]
    history.add(outcome(1, epoch=3, reward=0.3))
    history.close_step()
    assert history.rewards(7) == [0.2, 0.3]
    assert history.rewards(8) == []


def test_a_restored_history_is_the_one_that_was_there() -> None:
    outcomes = [outcome(step, prompt % 3, step, step / 10) for step in range(6) for prompt in range(2)]
    lived, restored = RewardHistory(2), RewardHistory(2)
    for step in range(5):
        for one in outcomes:
            if one.step == step:
                lived.add(one)
        lived.close_step()
    for one in outcomes:
        if one.step == 5:
            lived.add(one)
    restored.restore(outcomes, 5)
    for history in (lived, restored):
        history.close_step()
    assert [lived.rewards(prompt) for prompt in range(3)] == [restored.rewards(prompt) for prompt in range(3)]


def test_the_ledger_keeps_rewards_until_they_are_rolled_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for prompt, state in enumerate(["trained", "dropped"]):
        for step in range(3):
            ledger.add(AppendLedger(10 * step + prompt, 0, state, step, "filtered", reward=step + prompt / 4), 0.0)
    ledger.add(AppendLedger(99, 0, "dropped", 1, "its source left"), 0.0)
    assert len(ledger.outcomes()) == 6
    ledger.resume(2, 1.0)
    assert ledger.outcomes() == [
        *(Outcome(0, 0, 0, 0.0), Outcome(0, 0, 1, 0.25)),
        *(Outcome(1, 0, 10, 1.0), Outcome(1, 0, 11, 1.25)),
    ]
    ledger.close()
