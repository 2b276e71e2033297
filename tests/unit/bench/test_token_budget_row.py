"""The row `token_budget` at small size: steps have equal numbers of tokens, and no length is preferred."""

import pytest
from objectives_rows import token_budget


def test_the_spread_of_tokens_falls_without_length_bias() -> None:
    figures = token_budget.measure(quick=True)
    assert figures["c3po_cv_ratio"] >= 10.0
    assert figures["c3po_length_bias"] == pytest.approx(1.0, abs=0.03)


def test_a_policy_that_prefers_short_samples_is_detected() -> None:
    """Control case: a budget that is filled in order of length keeps the short samples."""
    lengths = sorted([10] * 64 + [1000] * 64)
    kept, left = [], 6_400
    for length in lengths:
        kept.append(min(length, left))
        left -= kept[-1]
    assert sum(map(bool, kept[:64])) == 64
    assert sum(kept) / sum(part / length for part, length in zip(kept, lengths, strict=True)) < 0.5 * 505
