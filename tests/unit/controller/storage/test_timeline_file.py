"""Segments of the timeline, and attribution.jsonl: bounded, readable while written, continued by later controllers."""

import json
import random
from pathlib import Path

import pytest

from flowrt.controller.attribution.causes import KINDS, Cause, WaitInterval
from flowrt.controller.storage.time_files import RoleSeconds, TimeFiles, TimeFilesStart
from flowrt.controller.storage.timeline_file import TimelineFile, read_segment, read_timeline, segments
from flowrt.ids import WorkerId
from flowrt.observability.attribution import read
from flowrt.runtime.timeline import Span


def recorder(run_dir: Path, now: float, step: int = 0, elapsed_s: float = 0.0) -> TimeFiles:
    return TimeFiles(TimeFilesStart(str(run_dir), now, now - elapsed_s, step, 1.0))


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "attribution.jsonl").read_text().splitlines()]


def test_flushed_lines_are_readable_while_the_file_is_written(tmp_path: Path) -> None:
    file = TimelineFile(tmp_path)
    for number in range(3):
        file.add({"number": number})
        assert len(list(read_timeline(tmp_path))) == number
        file.flush()
        assert [line["number"] for line in read_timeline(tmp_path)] == list(range(number + 1))
    assert segments(tmp_path)[0].stat().st_mode & 0o777 == 0o600
    file.close()
    assert len(list(read_timeline(tmp_path))) == 3


def test_at_the_size_limit_the_first_and_the_newest_segments_are_kept(tmp_path: Path) -> None:
    rng = random.Random(0)
    file = TimelineFile(tmp_path, max_bytes=20_000, segment_bytes=4_000)
    for number in range(2000):
        file.add({"number": number, "noise": rng.randbytes(40).hex()})
        if number % 10 == 9:
            file.flush()
    file.close()
    left = segments(tmp_path)
    assert left[0].name == "0001.jsonl.gz"
    assert sum(path.stat().st_size for path in left) <= 20_000 + 2 * 4_000
    numbers = [line["number"] for line in read_timeline(tmp_path)]
    assert numbers[0] == 0
    assert numbers[-1] == 1999
    assert len(numbers) < 2000


def test_each_controller_begins_a_segment(tmp_path: Path) -> None:
    for number in range(3):
        file = TimelineFile(tmp_path)
        file.add({"number": number})
        file.close()
    assert [path.name for path in segments(tmp_path)] == [f"000{number}.jsonl.gz" for number in (1, 2, 3)]
    assert [line["number"] for line in read_timeline(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 10, 30, 47])
def test_a_damaged_segment_is_read_up_to_the_damage(tmp_path: Path, cut: int) -> None:
    file = TimelineFile(tmp_path)
    for number in range(200):
        file.add({"number": number})
        file.flush()
    file.close()
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * cut // 50])
    numbers = [line["number"] for line in read_segment(path)]
    assert numbers == list(range(len(numbers)))
    path.write_bytes(b"no gzip at all")
    assert list(read_segment(path)) == []


def test_lines_of_steps_that_were_rolled_back_stay_and_are_replaced(tmp_path: Path) -> None:
    first = recorder(tmp_path, now=100.0)
    first.account.joined("trainer", "trainer", 100.0)
    for step in range(5):
        first.account.close_step(step, 101.0 + step)
    first.write(110.0, ())
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    first.close(111.0, ())
    before = steps(tmp_path)
    with (tmp_path / "attribution.jsonl").open("a") as file:
        file.write('{"step": 4, "from')  # Killed. Resumed from the checkpoint after step 2.
    second = recorder(tmp_path, now=7.0, step=3, elapsed_s=5.0)
    assert steps(tmp_path) == before
    second.account.joined("trainer", "trainer", 7.0)
    second.account.close_step(3, 8.0)
    second.close(9.0, ())
    assert steps(tmp_path) == [*before, 3, 4]
    lines, damaged = read(tmp_path)
    assert ([line["step"] for line in lines], damaged) == ([0, 1, 2, 3, 4], 0)
    assert [(line["from_s"], line["to_s"]) for line in lines[3:]] == [(5.0, 6.0), (6.0, 7.0)]


def test_a_role_has_a_field_for_each_kind_of_time() -> None:
    assert RoleSeconds.__struct_fields__ == ("workers", *KINDS)


def test_spans_and_waits_are_written_with_the_run_clock(tmp_path: Path) -> None:
    times = recorder(tmp_path, now=50.0, elapsed_s=2.0)
    times.account.joined("rollout-0", "rollout", 50.0)
    nan = float("nan")
    spans = (Span("generate", 50.0, 51.0, 0.75, 3.5), Span("swap", 51.0, 51.5), Span("x", nan, 51.0))
    times.add_spans("rollout-0", (*spans, Span("x", 52.0, 51.0)))
    waits = [
        WaitInterval(WorkerId("rollout-0"), Cause.GATE, "trainer", 51.5, 52.0),
        WaitInterval(WorkerId("rollout-0"), Cause.GATE, "trainer", 52.0, 52.0004),
    ]
    times.add_waits(waits)
    times.close(52.0, ())
    work = {"worker": "rollout-0", "role": "rollout"}
    assert list(read_timeline(tmp_path)) == [
        {**work, "kind": "generate", "start_s": 2.0, "end_s": 3.0, "worked_s": 0.75, "rows": 3.5},
        {**work, "kind": "swap", "start_s": 3.0, "end_s": 3.5},
        {**work, "wait": "gate", "root": "trainer", "start_s": 3.5, "end_s": 4.0},
    ]
    (line,) = [json.loads(text) for text in (tmp_path / "attribution.jsonl").read_text().splitlines()]
    assert line["roles"]["rollout"] == {
        "workers": 1,
        "busy": 0.75,
        "samples": 0.0,
        "gate": 0.5,
        "weights": 0.0,
        "update": 0.5,
        "save": 0.0,
        "away": 0.0,
        "other": 0.25,
    }
    assert line["roots"] == [["rollout", "gate", "trainer", 0.5]]
    assert line["worst"]["gate"] == [["rollout-0", 0.5]]


def test_failed_writes_log_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "timeline").write_text("in the way")
    times = recorder(tmp_path, now=0.0)
    times.account.joined("trainer", "trainer", 0.0)
    for number in range(3):
        times.add_spans("trainer", [Span("train", number, number + 1.0)])
        times.account.close_step(number, number + 1.0)
        times.write(number + 10.0, ())
    times.close(20.0, ())
    assert len([record for record in caplog.records if "is not written any more" in record.message]) == 1
    assert times.latest is not None, "attribution continues"


def test_waits_of_a_worker_that_has_left_are_in_the_timeline(tmp_path: Path) -> None:
    """A run may end between two writes: its workers have left when its waits are written."""
    times = recorder(tmp_path, 0.0)
    times.account.joined("rollout-0", "rollout", 0.0)
    times.account.training_started(1.0)
    times.account.gone("rollout-0", 3.0)
    times.add_waits([WaitInterval(WorkerId("rollout-0"), Cause.GATE, "trainer", 1.0, 2.0)])
    times.close(3.0, [])
    waits = [line for line in read_timeline(tmp_path) if "wait" in line]
    assert [(line["worker"], line["role"], line["wait"]) for line in waits] == [("rollout-0", "rollout", "gate")]
