"""Token bucket: at most the capacity, and the rate times the elapsed time, passes."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.state.counters import TokenBucket


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 3)), max_size=50))
def test_no_more_passes_than_capacity_and_rate_allow(requests: list[tuple[float, float]]) -> None:
    bucket, now_s, passed = TokenBucket(100.0, 10.0), 0.0, 0.0
    for tokens, pause_s in requests:
        now_s += pause_s
        before = bucket.spent, bucket.at_s
        if bucket.take(tokens, now_s):
            passed += tokens
        else:
            assert (bucket.spent, bucket.at_s) == before
    assert passed <= 100.0 + 10.0 * now_s + 1e-6


def test_a_full_bucket_passes_its_capacity_at_once_and_again_when_refilled() -> None:
    bucket = TokenBucket(8.0, 2.0)
    assert bucket.take(8.0, 1.0)
    assert not bucket.take(1.0, 1.0)
    assert bucket.take(8.0, 5.0)
