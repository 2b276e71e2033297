"""The row `token_budget` at small size: steps have equal numbers of tokens, and no length is preferred."""

import pytest
from objectives_rows import token_budget

from flowrt.controller.policies.batching import FixedTokens


def test_the_spread_of_tokens_falls_without_length_bias() -> None:
    found = token_budget.measure(quick=True)
    assert found["c3po_cv_ratio"] >= 10.0
    assert found["c3po_length_bias"] == pytest.approx(1.0, abs=0.03)


def test_a_policy_that_prefers_short_samples_is_detected() -> None:
    """Control case: in order of length, a budget keeps the short samples."""
    lengths = sorted([10] * 64 + [1000] * 64)
    kept = FixedTokens(6_400, order="issue").kept(lengths, 0)
    assert sum(map(bool, kept[:64])) == 64
    assert sum(kept) / sum(part / length for part, length in zip(kept, lengths, strict=True)) < 0.5 * 505
