"""The controller's clock as a worker sees it: offsets from exchanges over a slow link, jumps, and stops."""

import random
from types import SimpleNamespace

import pytest

from flowrt.client import controller_clock
from flowrt.client.controller_clock import WINDOW, ControllerClock, StopWatcher
from flowrt.runtime.clock import DrivenClock


def exchange(clock: ControllerClock, at_s: float, offset_s: float, outbound_s: float, return_s: float) -> float:
    """A heartbeat to the controller, whose clock is ``offset_s`` ahead, and its answer."""
    return clock.add(at_s, at_s + outbound_s + offset_s, at_s + outbound_s + return_s)


@pytest.mark.parametrize(("outbound_ms", "return_ms"), [(20, 20), (30, 2), (0.05, 0.06)])
def test_the_error_is_at_most_half_of_the_least_round_trip(outbound_ms: float, return_ms: float) -> None:
    """Some exchanges are delayed by a queue or a disk."""
    rng = random.Random(7)
    clock = ControllerClock(is_shared=False)
    assert clock.error_s == float("inf")
    for number in range(WINDOW):
        delay_s = rng.choice((0.0, 0.05, 0.3))
        outbound_s = outbound_ms / 1e3 + rng.choice((0.0, delay_s))
        return_s = return_ms / 1e3 + (delay_s if number else 0.0)
        assert exchange(clock, 100.0 + number, 37.0, outbound_s, return_s) == 0.0
    assert clock.offset_s is not None
    assert abs(clock.offset_s - 37.0) <= clock.error_s + 1e-9
    assert clock.error_s <= (outbound_ms + return_ms) / 2e3 + 0.15 + 1e-9


def test_the_fastest_of_several_exchanges_sets_the_offset() -> None:
    clock = ControllerClock(is_shared=False)
    exchange(clock, 0.0, 5.0, 0.080, 0.001)
    exchange(clock, 1.0, 5.0, 0.001, 0.001)
    exchange(clock, 2.0, 5.0, 0.001, 0.090)
    assert clock.offset_s == pytest.approx(5.0)


def test_a_suspended_host_is_a_jump_and_a_slow_answer_is_not() -> None:
    clock = ControllerClock(is_shared=False)
    for at_s in range(20):
        assert exchange(clock, float(at_s), 1.0, 0.001, 0.001) == 0.0
    assert exchange(clock, 20.0, 1.0, 0.4, 0.001) == 0.0, "half of this round trip explains it"
    jump_s = exchange(clock, 21.0, 9.0, 0.001, 0.001)
    assert jump_s == pytest.approx(8.0)
    assert clock.offset_s == pytest.approx(9.0), "earlier exchanges are of another offset"
    assert exchange(clock, 22.0, 8.5, 0.001, 0.001) == pytest.approx(-0.5)


def test_drift_is_not_a_jump() -> None:
    clock = ControllerClock(is_shared=False)
    for number in range(2000):
        offset_s = 3.0 + number * 50e-6
        assert exchange(clock, float(number), offset_s, 0.001, 0.001) == 0.0
        assert clock.offset_s is not None
        assert abs(clock.offset_s - offset_s) < 0.001 + WINDOW * 50e-6


def test_a_shared_clock_has_no_offset() -> None:
    assert ControllerClock(is_shared=False).offset_s is None
    clock = ControllerClock(is_shared=True)
    assert exchange(clock, 0.0, 5.0, 0.1, 0.1) == 0.0
    assert (clock.offset_s, clock.error_s) == (0.0, 0.0)
    clock.reset(is_shared=False)
    assert clock.error_s == float("inf")


def test_a_stop_is_a_long_gap_without_processor_time() -> None:
    watcher = StopWatcher()
    watcher.note(0.0, 0.3, 0.0)
    watcher.note(1.0, 6.0, 4.9)  # it computed, and no other thread could run
    watcher.note(10.0, 15.0, 0.01)
    (stop,) = watcher.take()
    assert (stop.kind, stop.start_s, stop.end_s) == ("stopped", 10.0, 15.0)
    assert watcher.take() == []


def test_a_stop_is_part_of_the_first_report_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report may be made before the thread that detects stops has run again."""
    clock = DrivenClock(100.0)
    monkeypatch.setattr(controller_clock, "time", SimpleNamespace(monotonic=clock.now, process_time=lambda: 7.0))
    watcher = StopWatcher()
    clock.advance(5.0)
    (stop,) = watcher.take()
    assert (stop.start_s, stop.end_s) == (100.0, 105.0)
    assert watcher.take() == []
