"""Bounds of numbers: membership, and their text in messages and tables."""

import argparse
import math
from typing import Annotated

import pytest
from annotated_types import Interval

from flowrt.runtime.bounds import MAX_TIMEOUT_S, Seconds, advice, contains, ends, interval_of, seconds, span


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        (Interval(ge=0, le=10), (0, 5, 10), (-1, -0.001, 10.001, 11)),
        (Interval(gt=0, le=10), (0.001, 10), (0, -1, 10.001)),
        (Interval(ge=0, lt=1), (0, 0.999), (1, -0.001)),
    ],
)
def test_only_closed_ends_belong_to_an_interval(
    interval: Interval, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert all(contains(interval, value) for value in inside)
    assert not any(contains(interval, value) for value in (*outside, math.inf, -math.inf, math.nan))


@pytest.mark.parametrize(
    ("interval", "kind", "advised", "spanned"),
    [
        (Interval(ge=0, le=10), float, "0 or more, and at most 10", "0 to 10"),
        (Interval(gt=0, le=1000), int, "a value above 0, and at most 1,000", "1 to 1,000"),
        (Interval(gt=0, le=1000), float, "a value above 0, and at most 1,000", "above 0 to 1,000"),
        (Interval(ge=0, lt=1), float, "0 or more, and less than 1", "0 to below 1"),
        (Interval(ge=0, le=2**63 - 1), int, "0 or more, and at most 9,223,372,036,854,775,807", "0 to 2^63 - 1"),
    ],
)
def test_an_interval_is_described_in_words(interval: Interval, kind: type, advised: str, spanned: str) -> None:
    assert advice(interval) == advised
    assert span(interval, kind) == spanned


def test_an_interval_is_read_from_its_annotation() -> None:
    assert interval_of(Annotated[int, "text", Interval(ge=1, le=2)]) == Interval(ge=1, le=2)
    assert interval_of(Annotated[int, "text"]) is None
    assert interval_of(int) is None
    assert interval_of(Seconds) is not None


def test_an_interval_needs_both_ends() -> None:
    with pytest.raises(TypeError, match="two ends"):
        ends(Interval(ge=0))


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", str(MAX_TIMEOUT_S + 1)])
def test_a_timeout_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a valid timeout; use a value above 0"):
        seconds(text)
    assert seconds("0.5") == 0.5
