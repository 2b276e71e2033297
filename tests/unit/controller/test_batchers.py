"""Sample counts, and the fixed token budget: exact, without a taste for short answers."""

import math
import random
from statistics import fmean, pstdev

import pytest

from flowrt.controller.policies.batching import FixedTokens, SampleCount
from flowrt.errors import ConfigError

SAMPLES = 256
BUDGET = 100_000  # about six tenths of what the samples have
STEPS = 120


def responses(step: int) -> list[int]:
    """Log-normal lengths, sigma 1, in order of issue."""
    chance = random.Random(step)
    return [max(1, round(400 * math.exp(chance.gauss(0, 1)))) for _ in range(SAMPLES)]


def mean_kept(policy: FixedTokens, by_completion: bool = False) -> float:
    """Mean length of what is trained, as a part of the mean length of all samples."""
    kept, trained, tokens = 0, 0, 0
    for step in range(STEPS):
        lengths = responses(step)
        mine = policy.kept(sorted(lengths) if by_completion else lengths, step)
        kept, trained, tokens = kept + sum(mine), trained + sum(some > 0 for some in mine), tokens + sum(lengths)
    return (kept / trained) / (tokens / (STEPS * SAMPLES))


def test_rows_are_full_at_their_number() -> None:
    assert [SampleCount(4).full(1, 10**9, rows) for rows in (0, 3, 4, 9)] == [False, False, True, True]


def test_a_budget_takes_samples_in_order_of_issue_and_cuts_the_last() -> None:
    lengths = [4, 0, 5, 3, 2]
    assert FixedTokens(7).kept(lengths, 0) == [4, 0, 3, 0, 0]
    assert FixedTokens(7, cut="whole").kept(lengths, 0) == [4, 0, 5, 0, 0]
    assert FixedTokens(9, cut="whole").kept(lengths, 0) == [4, 0, 5, 0, 0]
    assert FixedTokens(7).kept([], 0) == []


@pytest.mark.parametrize("tokens", [14, 15, 10**9])
def test_a_budget_of_everything_cuts_nothing(tokens: int) -> None:
    for order in ("issue", "shuffled"):
        assert FixedTokens(tokens, order=order).kept([4, 0, 5, 3, 2], 0) == [4, 0, 5, 3, 2]


def test_a_shuffle_is_drawn_from_the_seed_and_the_step() -> None:
    lengths = [10] * 40
    one = FixedTokens(100, order="shuffled", seed=1)
    assert one.kept(lengths, 3) == FixedTokens(100, order="shuffled", seed=1).kept(lengths, 3)
    assert one.kept(lengths, 3) != one.kept(lengths, 4)
    assert one.kept(lengths, 3) != FixedTokens(100, order="shuffled", seed=2).kept(lengths, 3)
    often = [sum(FixedTokens(100, order="shuffled", seed=s).kept(lengths, 0)[at] for s in range(400)) for at in (0, 39)]
    assert all(800 < total < 1200 for total in often)  # a quarter of 400 draws, 10 tokens each


@pytest.mark.parametrize("order", ["issue", "shuffled"])
def test_every_step_trains_the_same_number_of_tokens(order: str) -> None:
    exact = [sum(FixedTokens(BUDGET, "truncate", order).kept(responses(step), step)) for step in range(STEPS)]  # type: ignore[arg-type]
    assert set(exact) == {BUDGET}
    whole = [sum(FixedTokens(BUDGET, "whole", order).kept(responses(step), step)) for step in range(STEPS)]  # type: ignore[arg-type]
    everything = [sum(responses(step)) for step in range(STEPS)]
    assert pstdev(whole) / fmean(whole) < 0.25 * pstdev(everything) / fmean(everything)


@pytest.mark.parametrize("cut", ["truncate", "whole"])
@pytest.mark.parametrize("order", ["issue", "shuffled"])
def test_what_is_kept_is_as_long_as_what_was_made(cut: str, order: str) -> None:
    assert 0.97 <= mean_kept(FixedTokens(BUDGET, cut, order, seed=7)) <= 1.03  # type: ignore[arg-type]


def test_a_budget_filled_as_answers_finish_would_keep_the_short_ones() -> None:
    """Why the order of issue is asked for: given the shortest first, it trains on two thirds of the length."""
    assert 0.55 <= mean_kept(FixedTokens(BUDGET), by_completion=True) <= 0.75
    assert mean_kept(FixedTokens(BUDGET, order="shuffled"), by_completion=True) >= 0.97


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows"):
        SampleCount(0)
    with pytest.raises(ConfigError, match="tokens"):
        FixedTokens(0)
    with pytest.raises(ConfigError, match="truncate, whole"):
        FixedTokens(1, cut="half")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="issue, shuffled"):
        FixedTokens(1, order="completion")  # type: ignore[arg-type]
