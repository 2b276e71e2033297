"""The attribution of time: every second has exactly one kind, whatever is reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.attribution.account import TimeAccount
from flowrt.controller.attribution.causes import KINDS, Cause, Interval, Kind, WaitInterval
from flowrt.controller.attribution.sweep import KIND_OF_SPAN, sweep
from flowrt.ids import WorkerId

TIMES = st.floats(-5, 25, allow_nan=False, width=32)
SPAN_KINDS = st.sampled_from(
    ["generate", "train", "swap", "snapshot", "save", "load", "stopped", "fetch", "gather", "ranks", "mine"]
)
WORKER = WorkerId("rollout-0")
ORDER = ("away", "update", "save", "busy")


@st.composite
def spans(draw: st.DrawFn) -> Interval:
    start_s, end_s = sorted((draw(TIMES), draw(TIMES)))
    share = draw(st.floats(0, 1, width=32))
    return Interval(draw(SPAN_KINDS), start_s, end_s, share * (end_s - start_s))


@st.composite
def waits(draw: st.DrawFn) -> WaitInterval:
    start_s, end_s = sorted((draw(TIMES), draw(TIMES)))
    cause, root = draw(st.sampled_from(list(Cause))), draw(st.sampled_from(["", "trainer"]))
    return WaitInterval(WORKER, cause, root, start_s, end_s)


@given(st.lists(spans(), max_size=8), st.lists(waits(), max_size=5), st.floats(0, 20, width=32))
def test_every_second_has_exactly_one_kind(
    intervals: list[Interval], wait_intervals: list[WaitInterval], end_s: float
) -> None:
    divided = sweep(intervals, wait_intervals, 0.0, end_s)
    assert all(seconds > 0 and kind in KINDS for (kind, _), seconds in divided.items())
    assert sum(divided.values()) == pytest.approx(end_s, abs=1e-6)


@given(st.lists(spans(), max_size=8), st.lists(waits(), max_size=5), st.floats(0, 20, width=32))
def test_two_adjacent_windows_add_up_to_one(
    intervals: list[Interval], wait_intervals: list[WaitInterval], cut_s: float
) -> None:
    """For spans without gaps: of the others only the sum of the gaps is known."""
    whole_spans = [interval._replace(worked_s=interval.end_s - interval.start_s) for interval in intervals]
    whole = sweep(whole_spans, wait_intervals, 0.0, 20.0)
    first, second = sweep(whole_spans, wait_intervals, 0.0, cut_s), sweep(whole_spans, wait_intervals, cut_s, 20.0)
    for key in {*whole, *first, *second}:
        assert whole.get(key, 0.0) == pytest.approx(first.get(key, 0.0) + second.get(key, 0.0), abs=1e-6)


@given(st.lists(spans(), max_size=6), st.lists(waits(), max_size=3), st.floats(0, 19, width=32))
def test_overlapping_spans_count_as_the_first_kind_of_the_order(
    intervals: list[Interval], wait_intervals: list[WaitInterval], at_s: float
) -> None:
    whole = [interval._replace(worked_s=interval.end_s - interval.start_s) for interval in intervals]
    end_s = at_s + 1e-3
    edges = [edge for interval in whole for edge in (interval.start_s, interval.end_s)]
    edges += [edge for interval in wait_intervals for edge in (interval.start_s, interval.end_s)]
    if any(at_s < edge < end_s for edge in edges):
        return
    names = {interval.kind for interval in whole if interval.start_s <= at_s and interval.end_s >= end_s}
    present = {KIND_OF_SPAN.get(name, Kind.BUSY).value for name in names}
    wait = next((interval for interval in wait_intervals if interval.start_s <= at_s and interval.end_s >= end_s), None)
    first = next((kind for kind in ORDER if kind in present), None)
    (chosen,) = {kind for kind, _ in sweep(whole, wait_intervals, at_s, end_s)}
    if "ranks" in names and first != "away":
        assert chosen == "samples"
    elif first is not None:
        assert chosen == first
    elif wait is not None:
        assert chosen in {interval.cause.value for interval in wait_intervals}
    else:
        assert chosen == ("samples" if "samples" in present else "other")


def test_gaps_of_merged_spans_count_as_the_wait_that_covers_them() -> None:
    span = Interval("generate", 0.0, 10.0, worked_s=6.0)
    wait = WaitInterval(WORKER, Cause.GATE, "trainer", 0.0, 10.0)
    assert sweep([span], [wait], 0.0, 10.0) == {("busy", ""): 6.0, ("gate", "trainer"): 4.0}
    short = WaitInterval(WORKER, Cause.GATE, "trainer", 0.0, 1.0)
    assert sweep([span], [short], 0.0, 10.0) == {("busy", ""): 6.0, ("gate", "trainer"): 1.0, ("other", ""): 3.0}
    assert sweep([span], [], 0.0, 10.0) == {("busy", ""): 6.0, ("other", ""): 4.0}


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), spans()), max_size=12),
    st.lists(st.floats(0.5, 3, width=32), min_size=1, max_size=6),
    st.floats(0, 5, width=32),
    st.floats(5, 10, width=32),
)
def test_steps_add_up_to_the_time_from_joining_to_leaving(
    reported: list[tuple[str, Interval]], steps: list[float], joins_s: float, leaves_s: float
) -> None:
    """One worker stays from start to end, one joins late, one leaves early."""
    account = TimeAccount(0.0, 0, patience_s=3.0)
    account.joined("a", "rollout", 0.0)
    account.joined("b", "rollout", 0.0)
    account.training_started(0.25)
    complete = []
    now, joined, left = 0.0, False, False
    pending = sorted(reported, key=lambda pair: pair[1].end_s)
    for number, length_s in enumerate(steps):
        now += length_s
        if now >= joins_s and not joined:
            account.joined("c", "trainer", joins_s)
            joined = True
        if now >= leaves_s and not left:
            account.gone("b", leaves_s)
            left = True
        while pending and pending[0][1].end_s <= now:
            worker, span = pending.pop(0)
            account.add_spans(worker, [span])
            account.note_report(worker, span.end_s)
        account.close_step(number, now)
        complete += account.advance(now)
    complete += account.finish(now + 1.0)
    assert [window.step for window in complete] == list(range(len(steps) + 1))
    seconds = {role: sum(window.seconds[role].total() for window in complete) for role in ("rollout", "trainer")}
    assert seconds["rollout"] == pytest.approx(now + 1.0 + (leaves_s if left else now + 1.0), abs=1e-5)
    assert seconds["trainer"] == pytest.approx(now + 1.0 - joins_s if joined else 0.0, abs=1e-5)
    for line in (window.as_json(0.0) for window in complete):
        assert all(of[kind] >= 0 for of in line["roles"].values() for kind in KINDS)


def test_a_worker_without_reports_counts_as_away() -> None:
    account = TimeAccount(0.0, 0, patience_s=3.0)
    account.joined("a", "rollout", 0.0)
    account.add_spans("a", [Interval("generate", 0.0, 1.0, 1.0)])
    account.note_report("a", 1.0)
    account.close_step(0, 2.0)
    assert account.advance(4.0) == [], "it may still report"
    (step,) = account.advance(5.0)
    assert step.seconds["rollout"] == {"busy": 1.0, "away": 1.0}
    account.add_spans("a", [Interval("generate", 1.0, 2.5, 1.5)])
    assert account.late_s == 1.0
