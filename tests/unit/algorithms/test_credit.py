"""Advantages of random groups against plain Python loops, in float64; the samples that are trained."""

import math
from collections.abc import Callable

import pytest
import torch

from flowrt.algorithms.advantages import BestOfGroup, GroupAdvantages, OverlongPenalty, PreferencePair, Scale
from tests.groups import groups_of
from tests.proofs.comparisons import worst_credit
from tests.proofs.credit import ADVANTAGES, SELECTIONS


@pytest.mark.parametrize("name", [*ADVANTAGES, *SELECTIONS])
def test_credit_equals_its_formula(name: str) -> None:
    assert worst_credit(name, 200) <= 1e-12


@pytest.mark.parametrize("whiten", [True, False])
def test_equal_rewards_in_a_step_give_advantages_of_exactly_zero(whiten: bool) -> None:
    """Seven times 0.1 over 7 is not 0.1 in binary, and the standard deviation is 0."""
    rule = GroupAdvantages(scale="batch_std", whiten=whiten)
    assert rule(groups_of([0.1] * 7, [0, 0, 0, 1, 1, 1, 1])).advantages_N.tolist() == [0.0] * 7
    plain = GroupAdvantages(baseline="none", scale="none", whiten=True)
    assert plain(groups_of([0.1] * 7, [0] * 7)).advantages_N.tolist() == [0.0] * 7


@pytest.mark.parametrize("rule", [GroupAdvantages(), GroupAdvantages(baseline="leave_one_out", scale="none")])
def test_equal_rewards_in_a_group_give_advantages_of_exactly_zero(rule: GroupAdvantages) -> None:
    assert rule(groups_of([0.1] * 7, [3] * 7)).advantages_N.tolist() == [0.0] * 7


@pytest.mark.parametrize(
    "rule",
    [GroupAdvantages(), GroupAdvantages(scale="none"), GroupAdvantages(baseline="leave_one_out", scale="none")],
)
def test_a_group_of_one_is_refused_with_a_group_baseline(rule: GroupAdvantages) -> None:
    with pytest.raises(ValueError, match="group 4 has 1 sample"):
        rule(groups_of([1.0, 2.0, 3.0], [3, 3, 4]))


def test_without_a_baseline_the_advantage_of_a_group_of_one_is_its_reward() -> None:
    assert GroupAdvantages(baseline="none", scale="none")(groups_of([0.5], [4])).advantages_N.tolist() == [0.5]


def test_statistics_of_the_whole_batch_require_the_scope_step() -> None:
    assert GroupAdvantages().scope == "group"
    assert GroupAdvantages(scale="batch_std").scope == "step"
    assert GroupAdvantages(whiten=True).scope == "step"


SIGN_CASES = [[1.0, -0.5, -2.0], [-1.0, -2.0], [0.0, 0.0, -1.0], [1.0, 0.0], [1.0, -1.0], [3.0, -0.5, 0.5], [0.2, 0.1]]


@pytest.mark.parametrize("rewards", SIGN_CASES)
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "group_mean"])
@pytest.mark.parametrize("whiten", [True, False])
def test_no_scale_turns_the_sign_of_learning(rewards: list[float], scale: Scale, whiten: bool) -> None:
    """A better sample never has a lower advantage than a worse one, whatever the signs of the rewards are."""
    ordered = sorted(rewards)
    advantages = GroupAdvantages(scale=scale, whiten=whiten)(groups_of(ordered, [0] * len(ordered))).advantages_N
    assert advantages.tolist() == sorted(advantages.tolist())


def test_a_group_whose_mean_is_not_positive_has_no_advantage_relative_to_its_mean() -> None:
    rule = GroupAdvantages(scale="group_mean")
    credit = rule(groups_of([-1.0, -3.0, 1.0, 0.0, 1.0, -1.0], [0, 0, 1, 1, 2, 2]))
    assert credit.advantages_N.tolist() == [0.0, 0.0, 1.0, -1.0, 0.0, 0.0]
    cut = GroupAdvantages(scale="group_mean", overlong=OverlongPenalty(limit=10, cache=4))
    assert cut(groups_of([1.0, 0.0, 0.0], [0, 0, 0], lengths=[8, 10, 10])).advantages_N.tolist() == [0.0] * 3


def test_the_overlong_penalty_is_linear_over_its_cache() -> None:
    penalty = OverlongPenalty(limit=10, cache=4)
    assert penalty(torch.tensor([0, 6, 7, 8, 10, 12])).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    third = OverlongPenalty(limit=10, cache=3)(torch.tensor([8]))
    assert third.tolist() == [-1 / 3]  # in float64
    rule = GroupAdvantages(baseline="none", scale="none", overlong=penalty)
    assert rule(groups_of([1.0, 1.0], [0, 0], lengths=[6, 10])).advantages_N.tolist() == [1.0, 0.0]


def test_a_kl_penalty_in_the_reward_is_subtracted_and_needs_a_reference() -> None:
    rule = GroupAdvantages(baseline="none", scale="none", kl_coef=0.5)
    assert rule(groups_of([1.0], [0], kl=[0.4])).advantages_N.tolist() == [0.8]
    with pytest.raises(ValueError, match="needs a reference"):
        rule(groups_of([1.0], [0]))


def test_truncated_samples_are_compared_but_not_trained() -> None:
    rule = GroupAdvantages(scale="none", mask_truncated=True)
    credit = rule(groups_of([1.0, 0.0], [0, 0], truncated=[False, True]))
    assert credit.advantages_N.tolist() == [0.5, -0.5]
    assert credit.trained_N.tolist() == [True, False]


def test_only_the_best_of_each_group_are_trained() -> None:
    credit = BestOfGroup(keep=2)(groups_of([0.0, 3.0, 3.0, 1.0, 7.0], [0, 0, 0, 0, 1]))
    assert credit.trained_N.tolist() == [False, True, True, False, True]
    assert credit.advantages_N.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert not BestOfGroup(above=0.0)(groups_of([0.0, 0.0], [0, 0])).trained_N.any()


def test_a_preference_pair_is_the_best_and_the_worst_of_a_group() -> None:
    credit = PreferencePair()(groups_of([0.5, 1.0, 0.0, 2.0, 2.0], [0, 0, 0, 1, 1]))
    assert credit.advantages_N.tolist() == [0.0, 1.0, -1.0, 0.0, 0.0]
    assert credit.trained_N.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    "build",
    [
        lambda: GroupAdvantages(baseline="none", scale="group_mean"),
        lambda: OverlongPenalty(limit=4, cache=5),
        lambda: OverlongPenalty(limit=4, cache=0),
        lambda: BestOfGroup(keep=0),
    ],
)
def test_invalid_credit_parameters_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"(is|divides by)"):
        build()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_non_finite_reward_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="the reward of sample 1"):
        GroupAdvantages()(groups_of([0.0, reward], [0, 0]))
