"""events.jsonl: its lines, its bound, and what happens when it cannot be written."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.event_log import EVENTS, EventLog


def opened(tmp_path: Path, **options: Any) -> EventLog:
    return EventLog(tmp_path, start_s=100.0, unix_time=lambda: 1_700_000_000.5, **options)


def read(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]


def test_a_line_has_both_clocks_the_term_and_the_given_fields(tmp_path: Path) -> None:
    events = opened(tmp_path, term=3)
    line = events.add("joined", "rollout-1 has joined", 7, now=102.5, worker="rollout-1", rows=4, rate=float("nan"))
    assert read(tmp_path) == [line]
    assert line == {
        "wall_s": 2.5,
        "unix_s": 1_700_000_000.5,
        "term": 3,
        "step": 7,
        "kind": "joined",
        "text": "rollout-1 has joined",
        "worker": "rollout-1",
        "rows": 4,
        "rate": None,
    }
    assert stat.S_IMODE((tmp_path / EVENTS).stat().st_mode) == 0o600


def test_a_later_controller_appends_after_the_last_complete_line(tmp_path: Path) -> None:
    events = opened(tmp_path)
    events.add("started", "a run has started", 0, 100.0)
    events.close()
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"wall_s": 1')
    opened(tmp_path, term=2).add("resumed", "it is resumed", 0, 101.0)
    assert [line["kind"] for line in read(tmp_path)] == ["started", "resumed"]


def test_thinning_removes_the_most_frequent_kind_of_the_older_half_first(tmp_path: Path) -> None:
    events = opened(tmp_path, max_events=100)
    events.add("started", "a run has started", 0, 100.0)
    for step in range(400):
        events.add("published", f"version {step}", step, 100.0 + step)
        if step % 40 == 0:
            events.add("checkpoint", f"{step} steps are saved", step, 100.0 + step)
    lines = read(tmp_path)
    assert len(lines) <= 100
    assert lines[0]["kind"] == "started"
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == list(range(0, 400, 40))
    versions = [line["step"] for line in lines if line["kind"] == "published"]
    assert versions == sorted(versions)
    assert versions[-40:] == list(range(360, 400))  # the newest are all there
    assert versions[0] == 0


def test_failed_writes_log_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = opened(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    assert events._file is not None
    os.dup2(full, events._file._fd)
    os.close(full)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            events.add("guard", "a guard fires", step, 100.0)
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert read(tmp_path) == []
    events.close()


def test_a_file_that_cannot_be_opened_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / EVENTS).mkdir()
    with caplog.at_level(logging.WARNING):
        events = opened(tmp_path)
        events.add("started", "a run has started", 0, 100.0)
    assert len(caplog.records) == 1
