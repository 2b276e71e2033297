"""Sample counts and fixed token budgets: exact, and without bias towards short responses."""

import math
import random

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


def test_a_budget_is_met_and_cuts_one_sample() -> None:
    lengths = [4, 0, 5, 3, 2]
    for step in range(20):
        kept = FixedTokens(7).kept(lengths, step)
        assert sum(kept) == 7
        assert sum(0 < some < length for some, length in zip(kept, lengths, strict=True)) <= 1
    assert FixedTokens(7).kept([], 0) == []


@pytest.mark.parametrize("tokens", [14, 15, 10**9])
def test_a_budget_of_at_least_all_tokens_cuts_nothing(tokens: int) -> None:
    assert FixedTokens(tokens).kept([4, 0, 5, 3, 2], 0) == [4, 0, 5, 3, 2]


def test_the_order_depends_on_the_seed_and_the_step() -> None:
    lengths = [10] * 40
    policy = FixedTokens(100, seed=1)
    assert policy.kept(lengths, 3) == FixedTokens(100, seed=1).kept(lengths, 3)
    assert policy.kept(lengths, 3) != policy.kept(lengths, 4)
    assert policy.kept(lengths, 3) != FixedTokens(100, seed=2).kept(lengths, 3)
    kept_tokens = [sum(FixedTokens(100, seed=seed).kept(lengths, 0)[at] for seed in range(400)) for at in (0, 39)]
    assert all(800 < total < 1200 for total in kept_tokens)  # a quarter of 400 draws, 10 tokens each


def test_every_step_trains_the_same_number_of_tokens() -> None:
    assert {sum(FixedTokens(BUDGET).kept(responses(step), step)) for step in range(STEPS)} == {BUDGET}


def test_kept_samples_have_the_mean_length_of_all_samples() -> None:
    assert 0.97 <= mean_kept(FixedTokens(BUDGET, seed=7)) <= 1.03
    assert mean_kept(FixedTokens(BUDGET), by_completion=True) >= 0.97, "also when short samples come first"


def test_invalid_parameters_raise_a_config_error() -> None:
    with pytest.raises(ConfigError, match="rows"):
        SampleCount(0)
    with pytest.raises(ConfigError, match="tokens"):
        FixedTokens(0)
