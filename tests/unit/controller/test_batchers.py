"""Sample counts and fixed token budgets: exact, and without bias towards short responses."""

import math
import random
from statistics import fmean, pstdev

import pytest

from flowrt.controller.policies.batching import FixedTokens, SampleCount
from flowrt.errors import ConfigError

SAMPLES = 256
BUDGET = 100_000  # about 60 % of the tokens of all samples
STEPS = 120


def responses(step: int) -> list[int]:
    """Log-normal lengths, sigma 1, in order of issue."""
    rng = random.Random(step)
    return [max(1, round(400 * math.exp(rng.gauss(0, 1)))) for _ in range(SAMPLES)]


def mean_kept(policy: FixedTokens, by_completion: bool = False) -> float:
    """Mean length of the trained samples, relative to the mean length of all samples."""
    kept, trained, tokens = 0, 0, 0
    for step in range(STEPS):
        lengths = responses(step)
        kept_lengths = policy.kept(sorted(lengths) if by_completion else lengths, step)
        kept, trained, tokens = (
            kept + sum(kept_lengths),
            trained + sum(length > 0 for length in kept_lengths),
            tokens + sum(lengths),
        )
    return (kept / trained) / (tokens / (STEPS * SAMPLES))


def test_a_sample_count_is_full_at_its_number_of_rows() -> None:
    assert [SampleCount(4).full(1, 10**9, rows) for rows in (0, 3, 4, 9)] == [False, False, True, True]


def test_a_budget_takes_samples_in_order_of_issue_and_cuts_the_last() -> None:
    lengths = [4, 0, 5, 3, 2]
    assert FixedTokens(7).kept(lengths, 0) == [4, 0, 3, 0, 0]
    assert FixedTokens(7, cut="whole").kept(lengths, 0) == [4, 0, 5, 0, 0]
    assert FixedTokens(9, cut="whole").kept(lengths, 0) == [4, 0, 5, 0, 0]
    assert FixedTokens(7).kept([], 0) == []


@pytest.mark.parametrize("tokens", [14, 15, 10**9])
def test_a_budget_of_at_least_all_tokens_cuts_nothing(tokens: int) -> None:
    for order in ("issue", "shuffled"):
        assert FixedTokens(tokens, order=order).kept([4, 0, 5, 3, 2], 0) == [4, 0, 5, 3, 2]


def test_a_shuffle_depends_on_the_seed_and_the_step() -> None:
    lengths = [10] * 40
    one = FixedTokens(100, order="shuffled", seed=1)
    assert one.kept(lengths, 3) == FixedTokens(100, order="shuffled", seed=1).kept(lengths, 3)
    assert one.kept(lengths, 3) != one.kept(lengths, 4)
    assert one.kept(lengths, 3) != FixedTokens(100, order="shuffled", seed=2).kept(lengths, 3)
    kept_tokens = [
        sum(FixedTokens(100, order="shuffled", seed=seed).kept(lengths, 0)[at] for seed in range(400)) for at in (0, 39)
    ]
    assert all(800 < total < 1200 for total in kept_tokens)  # a quarter of 400 draws, 10 tokens each


@pytest.mark.parametrize("order", ["issue", "shuffled"])
def test_every_step_trains_the_same_number_of_tokens(order: str) -> None:
    exact = [sum(FixedTokens(BUDGET, "truncate", order).kept(responses(step), step)) for step in range(STEPS)]  # type: ignore[arg-type]
    assert set(exact) == {BUDGET}
    whole = [sum(FixedTokens(BUDGET, "whole", order).kept(responses(step), step)) for step in range(STEPS)]  # type: ignore[arg-type]
    everything = [sum(responses(step)) for step in range(STEPS)]
    assert pstdev(whole) / fmean(whole) < 0.25 * pstdev(everything) / fmean(everything)


@pytest.mark.parametrize("cut", ["truncate", "whole"])
@pytest.mark.parametrize("order", ["issue", "shuffled"])
def test_kept_samples_have_the_mean_length_of_all_samples(cut: str, order: str) -> None:
    assert 0.97 <= mean_kept(FixedTokens(BUDGET, cut, order, seed=7)) <= 1.03  # type: ignore[arg-type]


def test_a_budget_filled_in_order_of_completion_keeps_the_short_samples() -> None:
    """The reason for the order of issue: shortest first, the mean trained length falls to two thirds."""
    assert 0.55 <= mean_kept(FixedTokens(BUDGET), by_completion=True) <= 0.75
    assert mean_kept(FixedTokens(BUDGET, order="shuffled"), by_completion=True) >= 0.97


def test_invalid_parameters_raise_a_config_error() -> None:
    with pytest.raises(ConfigError, match="rows"):
        SampleCount(0)
    with pytest.raises(ConfigError, match="tokens"):
        FixedTokens(0)
    with pytest.raises(ConfigError, match="truncate, whole"):
        FixedTokens(1, cut="half")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="issue, shuffled"):
        FixedTokens(1, order="completion")  # type: ignore[arg-type]
