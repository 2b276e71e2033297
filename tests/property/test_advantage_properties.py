import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.algorithms.advantages import Scale
from tests.groups import group_advantages

LEAVE_ONE_OUT = {"baseline": "leave_one_out", "scale": "none"}
Groups = list[list[float]]
REWARDS = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, -1.0, 1 / 3])
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=7), min_size=1, max_size=5)
SCALES = st.sampled_from(["group_std", "none", "batch_std"])


def flatten(groups: Groups, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    ids = torch.tensor([7 * index - 3 for index, group in enumerate(groups) for _ in group])
    return rewards[order], ids[order]


def shuffled(groups: Groups, seed: int) -> torch.Tensor:
    return torch.randperm(sum(map(len, groups)), generator=torch.Generator().manual_seed(seed))


@given(GROUPS, SCALES, st.integers(0, 2**31))
def test_advantages_do_not_depend_on_the_order_of_samples(groups: Groups, scale: Scale, seed: int) -> None:
    order = shuffled(groups, seed)
    in_order = flatten(groups, torch.arange(len(order)))
    mixed = flatten(groups, order)
    for fields in ({"scale": scale}, LEAVE_ONE_OUT):
        expected = group_advantages(*in_order, **fields)[order]
        torch.testing.assert_close(group_advantages(*mixed, **fields), expected)


@given(GROUPS, st.integers(0, 2**31))
def test_the_advantages_of_each_group_match_the_formula(groups: Groups, seed: int) -> None:
    order = shuffled(groups, seed)
    rewards, ids = flatten(groups, order)
    scaled, left_out = group_advantages(rewards, ids), group_advantages(rewards, ids, **LEAVE_ONE_OUT)
    expected_scaled, expected_left_out = [], []
    for group in groups:
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            expected_left_out.append(reward - statistics.fmean(others))
            expected_scaled.append((reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6))
    torch.testing.assert_close(scaled, torch.tensor(expected_scaled, dtype=torch.float64)[order], atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(
        left_out, torch.tensor(expected_left_out, dtype=torch.float64)[order], atol=1e-9, rtol=1e-7
    )


@given(GROUPS, REWARDS, st.integers(2, 12), SCALES)
def test_a_group_without_variance_is_exactly_zero_among_others(
    groups: Groups, reward: float, size: int, scale: Scale
) -> None:
    groups = [*groups, [reward] * size]
    rewards, ids = flatten(groups, torch.arange(sum(map(len, groups))))
    for dtype in (torch.float32, torch.float64):
        advantages = group_advantages(rewards.to(dtype), ids, scale=scale)
        assert advantages[-size:].tolist() == [0.0] * size
        assert bool(advantages.isfinite().all())
