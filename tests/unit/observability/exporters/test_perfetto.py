"""The trace for Perfetto: valid in its format, with the times and numbers of the run's files."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.observability.exporters.exported_names import exported_name
from flowrt.observability.exporters.perfetto import COUNTERS, _Span, _tracks, write_trace
from tests.unit.observability.exporters.written_run import events, metrics, spans, write_run

STEPS = 12


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("perfetto") / "run", STEPS)


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return trace


def assert_nested(trace: list[dict[str, Any]]) -> None:
    """No two slices of a track overlap."""
    tracks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        ordered = sorted(slices)
        assert all(round(1000 * end) <= round(1000 * start) for (_, end), (start, _) in pairwise(ordered))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_slices_counters_and_events_are_those_of_the_run(run_dir: Path, tmp_path: Path, name: str) -> None:
    written = write_trace(run_dir, tmp_path / name)
    trace = read(tmp_path / name)
    assert_nested(trace)
    slices = [event for event in trace if event["ph"] == "X" and event["cat"] != "version"]
    expected = sorted((line.get("kind") or line["wait"], line["start_s"], line["end_s"]) for line in spans(STEPS))
    actual = sorted((slice_["name"], slice_["ts"] / 1e6, (slice_["ts"] + slice_["dur"]) / 1e6) for slice_ in slices)
    assert [span[0] for span in actual] == [span[0] for span in expected]
    assert all(
        abs(a - b) <= 1e-6
        for span, other in zip(actual, expected, strict=True)
        for a, b in zip(span[1:], other[1:], strict=True)
    )
    assert (written.slices, written.left_out, written.problems) == (len(slices) + STEPS, 0, ())
    counters = {(event["name"], event["ts"]): event["args"][""] for event in trace if event["ph"] == "C"}
    assert counters == {
        (exported_name(name), round(line["wall_s"] * 1e9) / 1000): line[name]
        for line in metrics(range(STEPS))
        for name in COUNTERS
        if name in line
    }
    instants = [(event["name"], event["args"]["text"]) for event in trace if event["ph"] == "i"]
    assert instants == [(line["kind"], line["text"]) for line in events(STEPS)]


def test_concurrent_work_is_on_two_tracks_and_waits_are_on_a_third(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "t.json")
    trace = read(tmp_path / "t.json")
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert list(names.values()).count("rollout-0") == 2
    assert list(names.values()).count("rollout-0 waits") == 1
    of_track = defaultdict(set)
    for event in trace:
        if event["ph"] == "X":
            of_track[names[event["pid"], event["tid"]], event["tid"]].add(event["name"])
    assert {"swap"} in of_track.values()
    processes = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert processes == ["run", "rollout on h1", "trainer on h1"]


def test_an_arrow_links_each_version_to_the_swaps_after_it(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "t.json")
    trace = read(tmp_path / "t.json")
    starts = {event["id"]: event for event in trace if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace if event["ph"] == "f"}
    assert len(starts) == STEPS - 1  # nothing was published before the first swap
    assert starts.keys() == ends.keys()
    slices = [event for event in trace if event["ph"] == "X"]
    for start in (*starts.values(), *ends.values()):
        assert any(
            (s["pid"], s["tid"]) == (start["pid"], start["tid"]) and s["ts"] <= start["ts"] <= s["ts"] + s["dur"]
            for s in slices
        )


def test_steps_select_a_window_and_the_latest_slices_are_left_out(run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "t.json", first=3, last=4)
    trace = [event for event in read(tmp_path / "t.json") if event["ph"] == "C" and event["name"] == "train/reward"]
    assert [event["ts"] for event in trace] == [3e6, 4e6, 5e6]  # the end of step 2 is the beginning of step 3
    written = write_trace(run_dir, tmp_path / "few.json", max_slices=20)
    kept = [event for event in read(tmp_path / "few.json") if event["ph"] == "X" and event["cat"] != "version"]
    assert len(kept) + written.left_out == len(spans(STEPS))
    assert len(kept) <= 20
    with pytest.raises(ConfigError, match=r"no step in 40:50; its steps are 0 to 11"):
        write_trace(run_dir, tmp_path / "none.json", first=40, last=50)
    assert not (tmp_path / "none.json").exists()


def test_a_damaged_segment_is_named_and_the_rest_is_written(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run", STEPS)
    path = other / "timeline" / "0001.jsonl.gz"
    path.write_bytes((other / "timeline" / "0000.jsonl.gz").read_bytes() + b"not gzip")
    written = write_trace(other, tmp_path / "t.json")
    assert any("0001.jsonl.gz is damaged" in problem for problem in written.problems)
    assert_nested(read(tmp_path / "t.json"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_tracks_contain_every_span_once_and_do_not_overlap(intervals: list[tuple[int, int]]) -> None:
    given_spans = [
        _Span(start, start + length, "x", {})
        for start, length in sorted(intervals, key=lambda interval: (interval[0], -interval[1]))
    ]
    tracks = _tracks(given_spans)
    assert sorted(id(span) for track in tracks for span in track) == sorted(map(id, given_spans))
    assert all(a.end_ns <= b.start_ns for track in tracks for a, b in pairwise(track))
