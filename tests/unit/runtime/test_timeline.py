"""Spans of work on a driven clock, and the busy fraction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.runtime.clock import DrivenClock
from flowrt.runtime.timeline import MERGE_GAP_S, Span, Timeline, busy_fraction


def test_adjacent_spans_of_one_kind_are_merged() -> None:
    clock = DrivenClock()
    timeline = Timeline(clock)
    for kind, work_s, pause_s in [("a", 1.0, 0.0), ("a", 1.0, 2 * MERGE_GAP_S), ("a", 1.0, 0.0), ("b", 1.0, 0.0)]:
        with timeline.busy(kind):
            clock.advance(work_s)
        clock.advance(pause_s)
    gap_s = 2 * MERGE_GAP_S
    assert timeline.drain() == [Span("a", 0, 2), Span("a", 2 + gap_s, 3 + gap_s), Span("b", 3 + gap_s, 4 + gap_s)]
    assert timeline.drain() == []


def test_work_that_raises_is_recorded() -> None:
    clock = DrivenClock(5.0)
    timeline = Timeline(clock)

    def work() -> None:
        with timeline.busy("a"):
            clock.advance(1.0)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        work()
    assert timeline.drain() == [Span("a", 5.0, 6.0)]


def test_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="cannot go back by 1"):
        DrivenClock().advance(-1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_busy_fraction_counts_overlaps_once(pairs: list[tuple[int, int]]) -> None:
    spans = [Span("a", min(pair), max(pair)) for pair in pairs]
    covered = {second for span in spans for second in range(int(span.start_s), int(span.end_s)) if 10 <= second < 40}
    assert busy_fraction(spans, 10, 40) == pytest.approx(len(covered) / 30)


def test_busy_fraction_of_an_empty_window_is_zero() -> None:
    assert busy_fraction([Span("a", 0, 1)], 1, 1) == 0
