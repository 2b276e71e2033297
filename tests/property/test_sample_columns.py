"""Statistics of stored samples equal those of their definitions, for any rewards, lengths and missing numbers."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrt.observability.sample_columns import (
    MAX_BINS,
    SOLVE_RATES,
    SampleColumns,
    bin_edges,
    classes,
    grouped,
    histogram,
    last_attempts,
    solve_rate_classes,
)

REWARDS = (
    st.sampled_from((0.0, 1.0))
    | st.integers(-5, 100).map(float)
    | st.floats(-2, 2).map(lambda value: round(value, 1))
    | st.floats(allow_nan=False, allow_infinity=False)
)


@dataclass(frozen=True)
class Row:
    """A sample; ``key`` is its prompt, epoch and run attempt."""

    key: tuple[int, int, int]
    member: int
    attempt: int
    step: int
    tokens: int
    reward: float
    staleness: float
    is_truncated: bool
    is_flagged: bool


ROWS = st.lists(
    st.builds(
        Row,
        key=st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(1, 2)),
        member=st.integers(0, 3),
        attempt=st.integers(0, 2),
        step=st.integers(0, 4),
        tokens=st.integers(0, 32_768),
        reward=REWARDS | st.just(math.nan),
        staleness=st.integers(0, 4).map(float) | st.just(math.nan),
        is_truncated=st.booleans(),
        is_flagged=st.booleans(),
    ),
    max_size=40,
    unique_by=lambda row: (row.key, row.member, row.attempt),
)


def columns(rows: Sequence[Row]) -> SampleColumns:
    def whole(values: Sequence[int]) -> np.ndarray:
        return np.array(values, np.int64)

    return SampleColumns(
        id_N=whole(range(1, len(rows) + 1)),
        step_N=whole([row.step for row in rows]),
        version_N=whole([0] * len(rows)),
        run_attempt_N=whole([row.key[2] for row in rows]),
        epoch_N=whole([row.key[1] for row in rows]),
        prompt_N=whole([row.key[0] for row in rows]),
        member_N=whole([row.member for row in rows]),
        attempt_N=whole([row.attempt for row in rows]),
        tokens_N=whole([row.tokens for row in rows]),
        reward_N=np.array([row.reward for row in rows], np.float64),
        advantage_N=np.array([math.nan] * len(rows), np.float64),
        staleness_N=np.array([row.staleness for row in rows], np.float64),
        is_truncated_N=np.array([row.is_truncated for row in rows], np.bool_),
        is_flagged_N=np.array([row.is_flagged for row in rows], np.bool_),
        is_rolled_back_N=np.array([False] * len(rows), np.bool_),
    )


def close(actual: float, expected: float, scale: float) -> bool:
    if math.isnan(expected):
        return math.isnan(actual)
    return abs(actual - expected) <= 1e-9 * (abs(expected) + scale)


def rewards_of(rows: Sequence[Row]) -> list[float]:
    return [row.reward for row in rows if math.isfinite(row.reward)]


@given(ROWS, st.sampled_from((-1.0, 0.5, 1.0)), st.integers(1, 4))
def test_groups_have_the_numbers_of_their_samples(rows: list[Row], right_from: float, group_size: int) -> None:
    rows = [row for row in rows if not abs(row.reward) > 1e100]
    groups = grouped(columns(rows), right_from, group_size)
    expected = defaultdict(list)
    for row in rows:
        expected[row.key].append(row)
    assert len(groups) == len(expected)
    for at in range(len(groups)):
        of = expected[int(groups.prompt_G[at]), int(groups.epoch_G[at]), int(groups.run_attempt_G[at])]
        rewards = rewards_of(of)
        scale = max(map(abs, rewards), default=0.0)
        assert close(float(groups.reward_G[at]), statistics.fmean(rewards) if rewards else math.nan, scale)
        spread = statistics.stdev(rewards) if len(rewards) > 1 else math.nan
        assert close(float(groups.spread_G[at]), spread, scale)
        assert groups.scored_G[at] == len(rewards)
        assert groups.right_G[at] == sum(reward >= right_from for reward in rewards)
        assert groups.size_G[at] == len(of)
        assert groups.truncated_G[at] == sum(row.is_truncated for row in of)
        assert groups.step_G[at] == max(row.step for row in of)
        lengths = [row.tokens for row in of]
        assert groups.tokens_G[at] == pytest.approx(statistics.fmean(lengths))
        assert (groups.least_tokens_G[at], groups.most_tokens_G[at]) == (min(lengths), max(lengths))
        known = [row.staleness for row in of if not math.isnan(row.staleness)]
        assert close(float(groups.staleness_G[at]), max(known, default=math.nan), 0)
        assert groups.is_whole_G[at] == (len(of) >= group_size or not all(row.is_flagged for row in of))
    for row, at in zip(rows, groups.index_N, strict=True):
        assert row in expected[int(groups.prompt_G[at]), int(groups.epoch_G[at]), int(groups.run_attempt_G[at])]
        assert row.key[0] == groups.prompt_G[at]


@given(ROWS)
def test_of_each_member_the_last_attempt_is_counted(rows: list[Row]) -> None:
    last: dict[tuple[object, int], int] = {}
    for row in rows:
        last[row.key, row.member] = max(row.attempt, last.get((row.key, row.member), -1))
    expected = [at + 1 for at, row in enumerate(rows) if row.attempt == last[row.key, row.member]]
    assert sorted(last_attempts(columns(rows)).id_N.tolist()) == expected


@given(st.lists(REWARDS, max_size=60))
@example([0.0] * 8)
@example([0.3, 0.1, 0.2])
@example([-1e308, 1e308])
@example([1e300, math.nextafter(1e300, math.inf)])
@example([5e-324])
@example([0.37] * 3)
def test_bins_hold_every_value_and_are_few(values: list[float]) -> None:
    edges = bin_edges(np.array(values, np.float64)).tolist()
    if not values:
        assert edges == []
        return
    assert all(low < high for low, high in itertools.pairwise(edges))
    assert edges[0] <= min(values)
    assert edges[-1] >= max(values)
    assert 1 <= len(edges) - 1 <= MAX_BINS + 2
    if all(value.is_integer() and abs(value) < 1e9 for value in values):
        assert all(edge.is_integer() for edge in edges)


def test_bins_begin_at_round_numbers() -> None:
    assert bin_edges(np.array([0.0, 1.0])).tolist() == [0, 1, 2]
    assert bin_edges(np.array([0.1, 0.3])).tolist()[-1] == 0.31
    assert 0.3 in bin_edges(np.array([0.1, 0.2, 0.3])).tolist()
    assert bin_edges(np.array([0.0, 100.0])).tolist() == [5.0 * at for at in range(22)]
    assert bin_edges(np.array([-1.0, 0.5])).tolist()[:2] == [-1.0, -0.9]
    assert bin_edges(np.array([7.0])).tolist() == [7, 8]


@settings(deadline=None)
@given(ROWS)
def test_histograms_count_each_sample_once(rows: list[Row]) -> None:
    samples = columns(rows)
    for name, values in (("tokens", samples.tokens_N), ("reward", samples.reward_N)):
        actual = histogram(values, samples)
        counted = [row for row in rows if math.isfinite(getattr(row, name))]
        assert actual.count_B.sum() == len(counted)
        assert actual.truncated_B.sum() == sum(row.is_truncated for row in counted)
        last = len(actual.count_B) - 1
        for at in range(last + 1):
            low, high = actual.edges[at], actual.edges[at + 1]
            of = [row for row in counted if low <= getattr(row, name) and (getattr(row, name) < high or at == last)]
            assert actual.count_B[at] == len(of)
            assert actual.truncated_B[at] == sum(row.is_truncated for row in of)
            rewards = rewards_of(of)
            if all(abs(reward) < 1e100 for reward in rewards):
                mean = statistics.fmean(rewards) if rewards else math.nan
                assert close(float(actual.reward_B[at]), mean, max(map(abs, rewards), default=0.0))


@given(ROWS, st.data())
def test_means_of_classes(rows: list[Row], data: st.DataObject) -> None:
    rows = [row for row in rows if not abs(row.reward) > 1e100]
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    means = classes(columns(rows), np.array(chosen, np.int64), 3, 0.5)
    for at in range(3):
        of = [row for row, choice in zip(rows, chosen, strict=True) if choice == at]
        rewards = rewards_of(of)
        scale = max(map(abs, rewards), default=0.0)
        assert means.samples_C[at] == len(of)
        assert means.prompts_C[at] == len({row.key[0] for row in of})
        assert close(float(means.reward_C[at]), statistics.fmean(rewards) if rewards else math.nan, scale)
        right = statistics.fmean(reward >= 0.5 for reward in rewards) if rewards else math.nan
        assert close(float(means.right_C[at]), right, 0)
        assert close(float(means.tokens_C[at]), statistics.fmean(row.tokens for row in of) if of else math.nan, 0)
        assert close(
            float(means.truncated_C[at]), statistics.fmean(row.is_truncated for row in of) if of else math.nan, 0
        )


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_every_solve_rate_is_in_the_class_of_its_name(counts: tuple[int, int]) -> None:
    right, scored = counts
    [at] = solve_rate_classes(np.array([right]), np.array([scored])).tolist()
    rate = right / scored
    bounds = {
        "none right": rate == 0,
        "up to 25 %": 0 < rate <= 0.25,
        "25 to 50 %": 0.25 < rate <= 0.5,
        "50 to 75 %": 0.5 < rate <= 0.75,
        "above 75 %": 0.75 < rate < 1,
        "all right": rate == 1,
    }
    assert [name for name, holds in bounds.items() if holds] == [SOLVE_RATES[at]]
