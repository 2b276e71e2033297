"""Names and reasons are the workers' own, and of no end: what is told of them is bounded."""

import logging
from pathlib import Path

import pytest

from flowrt.controller.diagnostics.counters import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER_REASONS,
    BoundedCounter,
    validate_names,
)
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.recorder import RunRecorder
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.controller.storage.time_recorder import TimeRecorder
from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.errors import RemoteProtocolError
from flowrt.protocol import messages as m
from flowrt.protocol.messages import BusySpan
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import leases_of


def test_reasons_beyond_the_first_count_together_and_none_is_lost() -> None:
    tally = BoundedCounter()
    for number in range(MAX_NAMES + 50):
        tally.count(f"reason {number}")
    tally.count("reason 0", 2)
    assert len(tally) == MAX_NAMES + 1
    assert tally["reason 0"] == 3
    assert tally[OTHER_REASONS] == 50
    assert sum(tally.values()) == MAX_NAMES + 52


def test_a_long_reason_is_cut() -> None:
    tally = BoundedCounter()
    tally.count("x" * 10 * MAX_NAME_CHARS)
    assert list(tally) == ["x" * MAX_NAME_CHARS]


def test_samples_that_are_lost_for_ever_new_reasons_do_not_fill_the_memory() -> None:
    driver = CoreDriver(bound=0, groups_per_step=1, steps=3, members=1)
    driver.offer(prompt=0)
    for number in range(3):
        grant = driver.pull("rollout0", "rollout")
        assert grant is not None
        driver.send(
            "rollout0",
            m.ReleaseLease(
                stage="rollout", slots=grant.slots, leases=leases_of(grant), lost=True, reason=f"{number}" + "x" * 10**6
            ),
        )
    dropped = driver.core.state.dropped
    assert sum(dropped.values()) == 3
    assert all(len(reason) <= MAX_NAME_CHARS for reason in dropped)


def test_names_of_numbers_are_bounded() -> None:
    some = tuple((f"number {number}", 1.0) for number in range(MAX_NAMES))
    assert validate_names(some, {}) == validate_names(some, dict(some)) == ""
    assert "more than 256; name fewer" in validate_names(some, {"another": 1.0})
    assert f"over the limit of {MAX_NAME_CHARS}" in validate_names([("x" * (MAX_NAME_CHARS + 1), 1.0)], {})


def test_what_is_left_out_of_a_report_is_its_numbers_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = RunMetrics(tmp_path, 0.0)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    times = TimeRecorder(tmp_path, 0.0, 0.0, 0, 1.0)
    times.account.joined("rollout-0", "rollout", 0.0)
    books = RunRecorder(ledger, journal, times=times)
    span = BusySpan("train", 0.0, 1.0)
    with caplog.at_level(logging.WARNING):
        books.record_report("rollout-0", m.Report((span,), (("x" * 1000, 1.0),), ()), 0)
    assert "left out the numbers that rollout-0 has reported: a number's name has 1000 characters" in caplog.text
    assert journal.numbers == {}
    books.record_report("rollout-0", m.Report((span,), (("eval", 1.0),), ()), 0)
    assert journal.numbers == {"eval": 1.0}
    journal.close()
    ledger.close()
    times.close(1.0, ())
    assert len(list(read_timeline(tmp_path))) == 2


def test_a_step_with_too_many_numbers_is_refused_and_changes_nothing() -> None:
    driver = CoreDriver(bound=0, groups_per_step=1, steps=3)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    with pytest.raises(RemoteProtocolError, match=r"trainer0 ended step 0, and 257 numbers .* name fewer"):
        driver.send("trainer0", m.StepCompleted(0, tuple((f"{number}", 1.0) for number in range(MAX_NAMES + 1))))
    assert driver.core.state.window.step == 0
