"""Group filters and curricula in isolation, and the share of groups that a filter drops at a known solve rate."""

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
    compared,
    mean_reward,
)
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.settings import Policies, Settings
from flowrt.controller.state.reward_history import Outcome, RewardHistory
from flowrt.controller.state.slots import Group, new_groups
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.transitions.step_metrics import _mean, _spread
from flowrt.controller.transitions.step_selection import _trainable_tokens
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.errors import ConfigError
from flowrt.ids import UNSCORED
from flowrt.simulation.cluster import FLOW, ClusterPlan, ClusterSimulation


def group(rewards: Sequence[float]) -> Group:
    [created], slots = new_groups("train", (7,), 0, len(rewards), 0, 0, 0)
    for slot, reward in zip(slots, rewards, strict=True):
        slot.inline = {"reward": reward}
    return created


def test_samples_to_which_no_reward_function_applies_do_not_count() -> None:
    half, none = group([1.0, 3.0, 0.0]), group([0.0, 0.0])
    for slot in (half.slots[2], *none.slots):
        slot.inline = {**slot.inline, UNSCORED: 1.0}
    assert (mean_reward(half), mean_reward(none)) == (2.0, None)
    assert ZeroVariance().refusal(half) == ""
    half.slots[1].inline = {"reward": 1.0}
    assert ZeroVariance().refusal(half) == "equal rewards"
    assert ZeroVariance().refusal(none) == "no reward function applies"
    assert RewardBand(0.5, 1.0).refusal(none) == ""
    assert (_mean("reward", [half, none]), _mean("reward", [none])) == (1.0, None)
    assert dict(_spread([half, none]))["reward_std"] == 0.0


def test_only_tokens_of_samples_that_are_trained_count_for_a_cut() -> None:
    scored = group([1.0, 2.0, 0.0])
    for slot, spans in zip(scored.slots, ((0, 3), (0, 2, 1, 2), (0, 5)), strict=True):
        slot.spans = spans
    assert [count for _, count in _trainable_tokens(scored)] == [3, 4, 5]
    scored.slots[2].inline = {"reward": 0.0, UNSCORED: 1.0}
    assert [count for _, count in _trainable_tokens(scored)] == [3, 4, 0]
    scored.slots[0].inline = {"reward": 0.0, UNSCORED: 1.0}  # the only other one has no sample to be compared with
    assert [count for _, count in _trainable_tokens(scored)] == [0, 0, 0]
    assert (compared([0.0]), compared([1.0]), compared([0.0, 0.0]), compared([])) == ([0], [], [0, 1], [])


@pytest.mark.parametrize(
    ("decision", "reason"),
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
def test_each_decision_of_a_filter_function_has_a_fixed_reason(decision: float, reason: str) -> None:
    decided = group([0.0, 1.0])
    for slot in decided.slots:
        slot.inline = {**slot.inline, DECISION: decision}
    assert UserFunction().refusal(decided) == reason
    assert AllOf((ZeroVariance(), UserFunction())).refusal(decided) == reason


@pytest.mark.parametrize(
    ("group_filter", "rewards", "reason"),
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
def test_each_filter_refuses_groups_with_its_reason(
    group_filter: GroupFilter, rewards: list[float], reason: str
) -> None:
    assert group_filter.refusal(group(rewards)) == reason


def test_a_group_with_a_missing_reward_has_no_mean() -> None:
    incomplete = group([1.0, 0.0])
    incomplete.slots[0].inline = {}
    assert mean_reward(incomplete) is None
    assert mean_reward(group([1.0, 0.0])) == 0.5


def test_a_filter_of_an_unknown_column_raises_a_config_error() -> None:
    policies = Policies(StrictLag(1), Fifo(), GroupCount(1), DelayedUpdate(), group_filter=ZeroVariance())
    with pytest.raises(ConfigError, match="ZeroVariance reads column 'reward', which is no inline column"):
        Core(Settings(), FLOW, policies)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (math.nan, 1.0)])
def test_an_empty_reward_band_raises_a_config_error(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="no mean reward is between"):
        RewardBand(low, high)


# ---- the share of dropped groups


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "members"), [(0.5, 4), (0.8, 4), (0.1, 8)])
def test_the_dropped_share_is_the_probability_of_equal_rewards(rate: float, members: int) -> None:
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
    step_counts = [dict(closed.counts) for _, closed in simulation.steps]
    assert [closed.groups for _, closed in simulation.steps] == [16] * 60
    assert [counts["zero_variance_groups"] for counts in step_counts] == [0] * 60
    dropped = sum(counts["filtered_groups"] for counts in step_counts)
    assert simulation.core.state.dropped == {"filtered: equal rewards": dropped}
    opened = 60 * 16 + dropped
    share = rate**members + (1 - rate) ** members
    assert abs(dropped - opened * share) < 3 * math.sqrt(opened * share * (1 - share))


# ---- the curriculum


def test_the_uniform_curriculum_skips_nothing_and_keeps_no_history() -> None:
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
def test_the_sampling_probability_is_that_of_different_rewards_in_a_group(rewards: list[float], size: int) -> None:
    rate = sum(rewards) / len(rewards)
    different = (1 - rate**size - (1 - rate) ** size) / (1 - 2 * 0.5**size)
    assert SolveRate(history=4, floor=0.2, group_size=size).probability(rewards) == pytest.approx(0.2 + 0.8 * different)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([2, 8]))
def test_a_prior_averages_over_the_posterior_of_the_solve_rate(solved: list[int], prior: float, size: int) -> None:
    """After groups of ``size`` samples, compared with quadrature; r = sin(t)^2 removes the end singularities."""
    good = sum(min(count, size) for count in solved)
    bad = size * len(solved) - good
    different = total = 0.0
    for point in range(1, 2000):
        angle = math.pi / 2 * point / 2000
        rate = math.sin(angle) ** 2
        weight = math.sin(angle) ** (2 * (good + prior) - 1) * math.cos(angle) ** (2 * (bad + prior) - 1)
        total += weight
        different += weight * (1 - rate**size - (1 - rate) ** size)
    curriculum = SolveRate(history=4, floor=0.2, prior=prior, group_size=size)
    probability = curriculum.probability([min(count, size) / size for count in solved])
    assert probability == pytest.approx(0.2 + 0.8 * different / total / (1 - 2 * 0.5**size), abs=1e-3)


def test_rewards_are_scaled_to_solve_rates() -> None:
    curriculum = SolveRate(history=1, floor=0.1, failed_reward=-1.0, solved_reward=1.0)
    assert curriculum.probability([0.0]) == 1.0
    assert curriculum.probability([-1.0]) == curriculum.probability([1.0]) == 0.1


def test_the_draw_depends_on_seed_epoch_and_prompt_only() -> None:
    def skipped(seed: int, epoch: int) -> list[bool]:
        return [SolveRate(history=1, floor=0.5, seed=seed).skips(prompt, epoch, [1.0]) for prompt in range(64)]

    assert skipped(1, 1) == skipped(1, 1)
    assert len({tuple(skipped(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize(
    ("history", "floor", "failed", "message"),
    [(0, 0.5, 0.0, "undefined"), (1, 0.0, 0.0, "least probability"), (1, 0.5, 1.0, "not below solved_reward")],
)
def test_invalid_curriculum_parameters_raise_a_config_error(
    history: int, floor: float, failed: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
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
    for result in (outcome(0, epoch=2, reward=0.2), outcome(0, epoch=1, reward=0.1)):
        history.add(result)
    history.close_step()
    assert history.rewards(7) == [0.1, 0.2]
    history.add(outcome(1, epoch=3, reward=0.3))
    history.close_step()
    assert history.rewards(7) == [0.2, 0.3]
    assert history.rewards(8) == []


def test_a_restored_history_equals_the_original() -> None:
    outcomes = [outcome(step, prompt % 3, step, step / 10) for step in range(6) for prompt in range(2)]
    original, restored = RewardHistory(2), RewardHistory(2)
    for step in range(5):
        for result in outcomes:
            if result.step == step:
                original.add(result)
        original.close_step()
    for result in outcomes:
        if result.step == 5:
            original.add(result)
    restored.restore(outcomes, 5)
    for history in (original, restored):
        history.close_step()
    assert [original.rewards(prompt) for prompt in range(3)] == [restored.rewards(prompt) for prompt in range(3)]


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
