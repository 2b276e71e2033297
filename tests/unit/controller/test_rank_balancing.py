"""Rank balancing: quality for small steps, the spread of tokens, and steps that cannot be balanced."""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from flowrt.controller.policies.rank_balancing import Balanced, OnDemand, karmarkar_karp
from flowrt.errors import ConfigError
from flowrt.simulation.dispatch import SampleFactory


def largest_differences(weights: Sequence[int], ways: int) -> list[int]:
    return [sum(weights[index] for index in share) for share in karmarkar_karp(weights, ways)]


def greedy(weights: Sequence[int], ways: int) -> list[int]:
    """The heaviest first, each to the lightest share."""
    sums = [0] * ways
    for weight in sorted(weights, reverse=True):
        heapq.heapreplace(sums, sums[0] + weight)
    return sums


def round_robin(weights: Sequence[int], ways: int) -> list[int]:
    return [sum(weights[rank::ways]) for rank in range(ways)]


def spread(sums: Sequence[int]) -> float:
    return (max(sums) - min(sums)) / (sum(sums) / len(sums))


def step(groups: int, members: int, seed: int) -> list[int]:
    """Tokens of each group; lengths are log-normal of sigma 1 over all samples, 0.9 between and 0.44 within prompts."""
    rng = random.Random(seed)

    def group() -> int:
        centre = rng.gauss(0, 0.9)
        return sum(max(1, round(400 * math.exp(centre + rng.gauss(0, 0.44)))) for _ in range(members))

    return [group() for _ in range(groups)]


def test_known_partitions() -> None:
    assert largest_differences([8, 7, 6, 5, 4], 2) == [16, 14]  # the optimum is 15, 15: this is a heuristic
    assert largest_differences([5, 5, 5, 5], 4) == [5, 5, 5, 5]
    assert largest_differences([10, 6, 5, 5, 4], 2) == [15, 15]
    assert karmarkar_karp([3], 3) == [[0], [], []]
    assert karmarkar_karp([], 2) == [[], []]
    assert karmarkar_karp([4, 9, 2], 1) == [[0, 1, 2]]


@pytest.mark.parametrize("ways", [2, 3])
def test_partitions_of_small_steps_are_near_optimal(ways: int) -> None:
    """The heaviest share is at most 7/6 of the optimum for two (a known bound), and here at most 4/3 for three."""
    rng, exact = random.Random(0), 0
    for _ in range(60):
        weights = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 9))]
        best = min(
            max(sum(w for w, way in zip(weights, assignment, strict=True) if way == part) for part in range(ways))
            for assignment in itertools.product(range(ways), repeat=len(weights))
        )
        largest = max(largest_differences(weights, ways))
        exact += largest == best
        assert largest <= best * (7 / 6 if ways == 2 else 4 / 3)
    assert exact >= 40


@pytest.mark.parametrize(("groups", "members", "ranks"), [(512, 1, 8), (64, 8, 4)])
def test_ranks_get_equal_tokens_within_two_percent(groups: int, members: int, ranks: int) -> None:
    for seed in range(20):
        weights = step(groups, members, seed)
        shared = spread(largest_differences(weights, ranks))
        assert shared <= 0.02
        assert shared <= spread(greedy(weights, ranks))
        assert spread(round_robin(weights, ranks)) >= 0.1


def test_a_group_larger_than_a_share_limits_the_balance() -> None:
    """With few groups per rank, two percent is often out of reach: one group exceeds the share of a rank."""
    unbalanced = 0
    for seed in range(20):
        weights = step(16, 8, seed)
        sums = largest_differences(weights, 4)
        unbalanced += spread(sums) > 0.02
        if max(weights) > sum(weights) / 4:
            assert max(sums) == max(weights)
    assert unbalanced > 5


def test_a_balanced_split_keeps_the_groups_and_their_order() -> None:
    factory = SampleFactory()
    groups = [factory.group(2) for _ in range(5)]
    assert Balanced(2).whole_step
    shares = Balanced(2).split(groups, [10, 20, 30, 40, 20])
    assert shares is not None
    assert sorted(group.id for share in shares for group in share) == [0, 1, 2, 3, 4]
    assert all([group.id for group in share] == sorted(group.id for group in share) for share in shares)
    tokens = {0: 10, 1: 20, 2: 30, 3: 40, 4: 20}
    assert [sum(tokens[group.id] for group in share) for share in shares] == [60, 60]


def test_one_rank_is_served_on_demand() -> None:
    groups = [SampleFactory().group() for _ in range(3)]
    for policy in (OnDemand(), Balanced(1)):
        assert not policy.whole_step
        assert policy.split(groups, [1, 2, 3]) is None


@pytest.mark.parametrize("create", [lambda: Balanced(0), lambda: karmarkar_karp([1], 0)])
def test_zero_ranks_are_refused(create: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        create()
