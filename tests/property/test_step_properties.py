"""Properties of rank balancing and of the token budget of a step."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.policies.batching import FixedTokens
from flowrt.controller.policies.rank_balancing import karmarkar_karp


@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 9))
def test_karmarkar_karp_keeps_all_items_and_differs_by_at_most_one_weight(weights: list[int], ways: int) -> None:
    shares = karmarkar_karp(weights, ways)
    assert len(shares) == ways
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    sums = [sum(weights[index] for index in share) for share in shares]
    assert max(sums) - min(sums) <= max(weights, default=0)
    assert sums == sorted(sums, reverse=True)
    assert shares == karmarkar_karp(weights, ways)


@given(
    st.lists(st.integers(0, 400), max_size=60),
    st.integers(1, 5_000),
    st.integers(0, 3),
)
def test_a_fixed_budget_is_met_and_cuts_one_sample_at_most(lengths: list[int], tokens: int, step: int) -> None:
    policy = FixedTokens(tokens, seed=5)
    kept = policy.kept(lengths, step)
    assert kept == policy.kept(lengths, step)
    assert all(0 <= some <= length for some, length in zip(kept, lengths, strict=True))
    partly = [(some, length) for some, length in zip(kept, lengths, strict=True) if 0 < some < length]
    assert sum(kept) == min(tokens, sum(lengths))
    assert len(partly) <= 1
    if tokens >= sum(lengths):
        assert kept == lengths
