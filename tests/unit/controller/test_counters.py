"""Names and reasons chosen by workers: their number and length are limited."""

import logging
from pathlib import Path

import pytest

from flowrt.controller.state.counters import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER_REASONS,
    BoundedCounter,
    validate_names,
)
from flowrt.controller.storage.accounting import Accounting
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.run_files import RunFiles
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.controller.storage.time_files import TimeFilesStart
from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.errors import RemoteProtocolError
from flowrt.protocol import messages as m
from flowrt.protocol.spans import pack_spans
from flowrt.runtime.timeline import Span
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import leases_of


def test_reasons_beyond_the_limit_are_counted_together() -> None:
    counter = BoundedCounter()
    for number in range(MAX_NAMES + 50):
        counter.count(f"reason {number}")
    counter.count("reason 0", 2)
    assert len(counter) == MAX_NAMES + 1
    assert counter["reason 0"] == 3
    assert counter[OTHER_REASONS] == 50
    assert sum(counter.values()) == MAX_NAMES + 52


def test_a_long_reason_is_truncated() -> None:
    counter = BoundedCounter()
    counter.count("x" * 10 * MAX_NAME_CHARS)
    assert list(counter) == ["x" * MAX_NAME_CHARS]


def test_reasons_of_lost_samples_are_truncated() -> None:
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


def test_number_and_length_of_metric_names_are_limited() -> None:
    numbers = tuple((f"number {number}", 1.0) for number in range(MAX_NAMES))
    assert validate_names(numbers, {}) == validate_names(numbers, dict(numbers)) == ""
    assert "more than 256; name fewer" in validate_names(numbers, {"another": 1.0})
    assert f"over the limit of {MAX_NAME_CHARS}" in validate_names([("x" * (MAX_NAME_CHARS + 1), 1.0)], {})


def test_only_the_metrics_of_an_invalid_report_are_discarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = RunMetrics(tmp_path, 0.0)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    times = Accounting(TimeFilesStart(str(tmp_path), 0.0, 0.0, 0, 1.0))
    times.joined("rollout-0", "rollout", 0.0)
    recorder = RunFiles(ledger, metrics, times=times)
    spans = pack_spans([Span("train", 0.0, 1.0)])
    with caplog.at_level(logging.WARNING):
        recorder.record_report("rollout-0", m.Report(spans, (("x" * 1000, 1.0),), ()), 0)
    assert "left out the numbers that rollout-0 has reported: a number's name has 1000 characters" in caplog.text
    assert metrics.numbers == {}
    recorder.record_report("rollout-0", m.Report(spans, (("eval", 1.0),), ()), 0)
    assert metrics.numbers == {"eval": 1.0}
    metrics.close()
    ledger.close()
    times.close(1.0, [], [])
    assert len(list(read_timeline(tmp_path))) == 2


def test_a_step_with_too_many_metrics_is_rejected_and_stays_open() -> None:
    driver = CoreDriver(bound=0, groups_per_step=1, steps=3)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    with pytest.raises(RemoteProtocolError, match=r"trainer0 ended step 0, and 257 numbers .* name fewer"):
        driver.send("trainer0", m.StepCompleted(0, tuple((f"{number}", 1.0) for number in range(MAX_NAMES + 1))))
    assert driver.core.state.window.step == 0
