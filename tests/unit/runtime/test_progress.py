"""Progress of a worker, and the limits of work that cannot report it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.runtime import time_limits
from flowrt.runtime.progress import Progress

GB = 10**9


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_taken_once() -> None:
    progress = Progress()
    assert not progress.take()
    progress.advance()
    progress.advance()
    assert progress.take()
    assert not progress.take()


def test_expected_progress_ends_at_its_limit() -> None:
    clock = Clock()
    progress = Progress(clock)
    with progress.expected(10.0):
        clock.now = 9.0
        assert progress.take()
        assert progress.take()
        clock.now = 11.0
        assert not progress.take(), "work beyond its limit counts as progress"
        with progress.expected(5.0):
            assert progress.take()
    assert progress.take(), "the end of the work is progress"
    assert not progress.take()


def test_work_that_fails_is_no_progress() -> None:
    progress = Progress()
    with pytest.raises(ValueError, match="broken"), progress.expected(10.0):
        raise ValueError("broken")
    assert not progress.take()


def test_idle_time_counts_from_the_last_advance() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now = 7.0
    assert progress.idle_s == 7.0
    with progress.expected(5.0):
        clock.now = 10.0
        assert progress.idle_s == 0.0
    clock.now = 14.0
    assert progress.idle_s == 4.0


@given(st.integers(0, 10**7), st.integers(0, 10**12), st.integers(1, 10**7), st.integers(1, 10**12))
def test_limits_grow_with_the_work(tokens: int, size: int, more: int, larger: int) -> None:
    assert time_limits.pass_s(tokens, size) <= time_limits.pass_s(tokens + more, size + larger)
    assert time_limits.weights_s(size) < time_limits.weights_s(size + larger) <= time_limits.state_s(size + larger)


@pytest.mark.parametrize(
    ("limit_s", "needed_s"),
    [
        (time_limits.state_s(140 * GB), 840e9 / 100e6),  # 70B with AdamW's state on a file system of 100 MB/s
        (time_limits.pass_s(8192, 14 * GB), 3600 / 2),  # half an hour for a pass of a 7B model on a processor
        (time_limits.generation_limit_s(600.0, 32_000), 32_000 / 50),  # at 50 tokens/s
        (time_limits.request_s(64 * 16, 64, 32_000), 16 * 32_000 / 50),  # 16 waves of 64 sequences
    ],
)
def test_slow_but_healthy_work_is_within_its_limit(limit_s: float, needed_s: float) -> None:
    assert limit_s >= needed_s


def test_limits_of_small_work_stay_short() -> None:
    """What hangs is still given up: a fast model does not get hours."""
    assert time_limits.pass_s(8192, 3 * 10**6) < 2 * time_limits.BASE_S
    assert time_limits.request_s(256, 128, 64) == time_limits.MIN_REQUEST_S
