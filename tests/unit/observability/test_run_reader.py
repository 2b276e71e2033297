"""The reader of a run directory: files that grow, are replaced, cut and damaged while it reads."""

import base64
import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.observability import tails
from flowrt.observability.attribution import merged
from flowrt.observability.run_reader import FileUpdate, RunReader, is_locked
from flowrt.observability.series import Series
from flowrt.observability.tails import GzipTail, JsonTail, LineTail
from flowrt.observability.timeline_rows import FULL, MAX_SPANS, TimelineRows
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.runtime.files import RunLock, atomic_write

CUTS = st.lists(st.integers(0, 4000), max_size=12)


def step_line(step: int, reward: float = 0.5, wall_s: float | None = None) -> dict[str, Any]:
    return {"step": step, "wall_s": float(step) if wall_s is None else wall_s, "reward": reward}


def text_of(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(to_toml(defaults("arithmetic")))
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


# ---- tails


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ")), max_size=30), CUTS)
def test_tailed_lines_do_not_depend_on_the_chunk_boundaries(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("tails")
    data = b"".join(line + b"\n" for line in lines)
    packed = gzip.compress(data)
    plain, zipped = LineTail(folder / "a"), GzipTail(folder / "a.gz")
    tailed: list[bytes] = []
    unzipped: list[bytes] = []
    for cut in [*sorted(cuts), len(data) + len(packed)]:
        with (folder / "a").open("ab") as file:
            file.write(data[file.tell() : cut])
        with (folder / "a.gz").open("ab") as file:
            file.write(packed[file.tell() : cut])
        new, of_zipped = plain.read_new(), zipped.read_new()
        assert not new.is_replaced
        assert not of_zipped.is_replaced
        tailed += new.lines
        unzipped += of_zipped.lines
    assert tailed == unzipped == lines
    assert not plain.problem
    assert not zipped.problem


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonTail(path)
    assert (tail.read_new(), tail.state) == (([], False), "missing")
    path.write_text(text_of([step_line(0), step_line(1)]))
    assert tail.read_new() == ([step_line(0), step_line(1)], False)
    atomic_write(path, text_of([step_line(0)]))
    assert tail.read_new() == ([step_line(0)], True)
    path.write_text(text_of([step_line(7)]))  # in place, of the same length
    assert tail.read_new() == ([step_line(7)], True)
    path.unlink()
    assert tail.read_new() == ([], False)


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = JsonTail(path)
    path.write_bytes(b'{"a": 1}\nno json\n[1]\n\xff\xfe\n{"b": ' + b"[" * 9999 + b"\n\n" + b'{"c": 2}\n{"half": ')
    assert tail.read_new() == ([{"a": 1}, {"c": 2}], False)
    assert tail.state == "events.jsonl has 4 damaged lines, left out"


@pytest.mark.parametrize(
    ("appended", "expected"),
    [([b"b" * 3000, b"b" * 500 + b"\n"], [b"a", b"d"]), ([b"b" * 3500 + b"\nc\n"], [b"a", b"c", b"d"])],
)
def test_a_line_that_is_too_long_is_left_out_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appended: list[bytes], expected: list[bytes]
) -> None:
    monkeypatch.setattr(tails, "MAX_LINE_BYTES", 2000)
    monkeypatch.setattr(tails, "READ_BYTES", 1000)
    path = tmp_path / "lines"
    tail, tailed = LineTail(path), []
    for data in (b"a\n", *appended, b"d\n"):
        with path.open("ab") as file:
            file.write(data)
        tailed += tail.read_new().lines
    assert [line for line in tailed if line] == expected
    assert "left out" in tail.problem


def test_a_gzip_tail_reads_up_to_the_last_flush_and_reports_damage(tmp_path: Path) -> None:
    path = tmp_path / "0000.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(b"one\ntwo\nthr")
        file.flush()
        tail = GzipTail(path)
        assert tail.read_new().lines == [b"one", b"two"]
    assert tail.read_new().lines == []  # the last line is incomplete
    with path.open("ab") as plain:
        plain.write(gzip.compress(b"ee\nfour\n"))  # a restarted controller appends a member
    assert tail.read_new().lines == [b"three", b"four"]
    with path.open("ab") as plain:
        plain.write(b"garbage" * 9)
    assert tail.read_new().lines == []
    assert "0000.jsonl.gz is damaged within its first" in tail.problem


# ---- the reader


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 30), CUTS)
def test_tailing_a_run_gives_the_same_as_reading_it_at_once(
    tmp_path_factory: pytest.TempPathFactory, steps: int, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines = [step_line(step, step / 7) for step in range(steps)]
    data = text_of(lines)
    (folder / "metrics.jsonl").write_text("")
    reader = RunReader(folder)
    seen: list[FileUpdate] = []
    for cut in [*sorted(cuts), len(data)]:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(data[file.tell() : cut])
        seen += reader.read_new()
    assert [record.content for record in seen] == lines
    assert reader.series() == RunReader(folder).series()
    assert reader.series(3)["steps"] == list(range(3, steps))


def test_a_resumed_run_is_rewound_but_a_controller_restart_is_not(run_dir: Path) -> None:
    lines = [step_line(step) for step in range(5)]
    atomic_write(run_dir / "metrics.jsonl", text_of(lines))
    reader = RunReader(run_dir)
    atomic_write(run_dir / "metrics.jsonl", text_of([*lines, step_line(5)]))  # as a restarted controller writes it
    assert [(record.kind, record.step) for record in reader.read_new()] == [("step", 5)]
    resumed = [*lines[:3], step_line(3, 0.9, 33.0)]
    atomic_write(run_dir / "metrics.jsonl", text_of(resumed))
    rewound, again = reader.read_new()
    assert (rewound.kind, rewound.content, again.step) == ("rewound", {"step": 3}, 3)
    assert reader.series()["columns"]["reward"] == [0.5, 0.5, 0.5, 0.9]
    assert reader.next_step == 4


def test_events_keep_their_numbers_when_the_file_is_thinned(run_dir: Path) -> None:
    events = [{"wall_s": at, "unix_s": at, "step": 0, "kind": "joined", "text": f"worker {at}"} for at in range(8)]
    atomic_write(run_dir / "events.jsonl", text_of(events[:6]))
    reader = RunReader(run_dir)
    assert reader.events()["next"] == 6
    atomic_write(run_dir / "events.jsonl", text_of([*events[1:6:2], *events[6:]]))
    assert [record.content["text"] for record in reader.read_new()] == ["worker 6", "worker 7"]
    assert reader.events(6) == {"events": events[6:], "next": 8}


def test_damaged_files_are_reported_and_the_others_are_read(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "wall_s": 1, "reward": NaN}\n{"step": "x"}\nnothing\n')
    (run_dir / "ledger.sqlite").write_bytes(b"no ledger" * 99)
    (run_dir / "summary.json").write_text("[")
    (run_dir / "timeline").mkdir()
    (run_dir / "timeline" / "0000.jsonl.gz").write_bytes(gzip.compress(b'{"worker": "a"}\n')[:-12] + b"x" * 20)
    reader = RunReader(run_dir)
    assert reader.series() == {"steps": [0], "columns": {"wall_s": [1], "reward": [None]}}
    assert reader.ledger() == {"states": {}, "dropped": {}}
    assert reader.timeline()["spans"] == []
    run = reader.run()
    assert run["state"] == "killed"
    assert run["summary"] is None
    files = run["files"]
    assert files["metrics.jsonl"] == "metrics.jsonl has 1 damaged line, left out"
    assert "is not a ledger" in files["ledger.sqlite"]
    assert files["summary.json"].startswith("summary.json cannot be read")
    assert "damaged" in files["timeline"]
    assert files["events.jsonl"] == files["samples.sqlite"] == "missing"
    with pytest.raises(ConfigError, match="ledger"):
        reader.prompt(0, 1)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        RunReader(tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        RunReader(tmp_path / "no")


def test_settings_that_differ_from_the_recipe_are_listed(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text(to_toml(dataclasses.replace(defaults("arithmetic"), steps=9)))
    run = RunReader(run_dir).run()
    assert [(key, default) for key, _, default in run["changed"]] == [("steps", defaults("arithmetic").steps)]
    assert run["recipe"] == "arithmetic"
    assert run["staleness_bound"] == 1


def test_settings_of_another_version_are_unknown_not_default(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text(to_toml(defaults("arithmetic")) + "\n[of_another_version]\nkey = 1\n")
    assert RunReader(run_dir).run()["changed"] is None
    (run_dir / "config.toml").write_text(to_toml(defaults("arithmetic")))
    assert RunReader(run_dir).run()["changed"] == []


def test_a_run_is_live_while_its_lock_is_held(run_dir: Path) -> None:
    assert not is_locked(run_dir)
    lock = RunLock(run_dir)
    assert is_locked(run_dir)
    assert RunReader(run_dir).run()["state"] == "live"
    lock.release()
    assert RunReader(run_dir).run()["state"] == "killed"
    (run_dir / "summary.json").write_text("{}")
    assert RunReader(run_dir).run()["state"] == "finished"


def test_the_outcome_is_that_of_the_exit_code(run_dir: Path) -> None:
    assert RunReader(run_dir).run()["outcome"] is None
    for code, outcome in ((0, "complete"), (130, "stopped"), (1, "failed"), ("0", None), ([0], None)):
        (run_dir / "summary.json").write_text(json.dumps({"exit_code": code}))
        assert RunReader(run_dir).run()["outcome"] == outcome


def test_a_read_only_directory_is_read_unchanged(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text(text_of([step_line(0)]))
    os.chmod(run_dir, 0o500)
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    assert RunReader(run_dir).series()["steps"] == [0]
    assert {path: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    os.chmod(run_dir, 0o700)


# ---- series, shares, lanes


def test_a_long_run_is_decimated_and_keeps_its_extremes() -> None:
    series = Series()
    for step in range(30_000):
        series.append(step_line(step, 5.0 if step == 12_345 else -3.0 if step == 777 else 0.5))
    answer = series.since(0)
    assert 1_900 < len(answer["steps"]) <= 2_000
    assert answer["steps"] == sorted(answer["steps"])
    assert {max(answer["columns"]["reward"]), min(answer["columns"]["reward"])} == {5.0, -3.0}
    assert answer["decimated"] == 30_000
    assert series.since(29_000)["steps"] == list(range(29_000, 30_000))


def test_a_column_that_starts_late_is_null_before() -> None:
    series = Series()
    series.append({"step": 0, "wall_s": 0.5})
    series.append({"step": 1, "wall_s": 1.5, "eval/held_out/avg@1": 0.25, "text": "x", "is": True})
    series.append({"step": 2, "wall_s": float("inf")})
    assert series.since(0)["columns"] == {"wall_s": [0.5, 1.5, None], "eval/held_out/avg@1": [None, 0.25, None]}


def test_consecutive_shares_are_added_up() -> None:
    lines = [
        {
            "step": step,
            "from_s": float(step),
            "to_s": step + 1.0,
            "roles": {"rollout": {"workers": 2, "busy": 1.0, "gate": 0.5}},
            "roots": [["rollout", "gate", "trainer", 0.5]],
            "worst": {"gate": [["rollout-1", 0.5]]},
        }
        for step in range(10)
    ]
    assert merged(lines, 10) == lines
    first, *_, last = merged(lines, 4)
    assert (first["step"], first["from_s"], first["to_s"]) == (2, 0.0, 3.0)
    assert first["roles"] == {"rollout": {"workers": 2, "busy": 3.0, "gate": 1.5}}
    assert first["roots"] == [["rollout", "gate", "trainer", 1.5]]
    assert (last["step"], last["worst"]) == (9, {"gate": [["rollout-1", 0.5]]})


def write_lanes(folder: Path, lines: list[dict[str, Any]], segment: int = 0) -> TimelineRows:
    folder.mkdir(exist_ok=True)
    (folder / f"{segment:04}.jsonl.gz").write_bytes(gzip.compress(text_of(lines).encode()))
    lanes = TimelineRows(folder)
    lanes.read_new()
    return lanes


def span(worker: str, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    return {"worker": worker, "role": worker.partition("-")[0], "start_s": start_s, "end_s": end_s} | more


def test_a_window_has_the_spans_and_waits_that_overlap_it(tmp_path: Path) -> None:
    lines = [
        span("rollout-10", 0, 1, kind="generate", rows=7.5),
        span("rollout-2", 1, 2, wait="gate", root="trainer"),
        span("rollout-2", 2, 3, kind="swap"),
        span("rollout-2", 5, 4, kind="swap"),
    ]
    window = write_lanes(tmp_path / "t", lines).window(0.5, 1.5)
    assert [lane["worker"] for lane in window["lanes"]] == ["rollout-2", "rollout-10"]
    assert window["spans"] == [[1, window["kinds"].index("generate"), 0.0, 1.0, 7.5]]
    assert window["waits"] == [[0, window["causes"].index("gate"), window["roots"].index("trainer"), 1.0, 2.0]]
    assert (window["first_s"], window["last_s"], window["all"], window["matrix"]) == (0, 3, 2, None)


def test_too_many_spans_become_a_matrix_of_busy_shares(tmp_path: Path) -> None:
    workers = 300
    lines = [span(f"rollout-{w}", t, t + (w % 2), kind="generate") for w in range(workers) for t in range(0, 140, 2)]
    assert len(lines) > MAX_SPANS
    lanes = write_lanes(tmp_path / "t", lines)
    window = lanes.window(0, 140)
    matrix = window["matrix"]
    cells = base64.b64decode(matrix["base64"])
    assert (matrix["rows"], matrix["columns"], len(cells)) == (256, 512, 256 * 512)
    assert window["left_out"] == len(lines)
    total = sum(cells) / FULL / len(cells)
    assert total == pytest.approx(0.25, abs=0.03)
    part = lanes.window(0, 140, rows=64, first=10)
    assert part["matrix"] is None
    assert [lane["worker"] for lane in part["lanes"]] == [f"rollout-{at}" for at in range(10, 74)]
    assert all(drawn_span[1] == part["kinds"].index("generate") for drawn_span in part["spans"])
    assert len(part["spans"]) == 64 * 70


def test_a_wide_window_keeps_the_extremes_and_a_narrow_one_all_steps() -> None:
    series = Series()
    for step in range(10_000):
        more = {"eval/held_out/avg@1": step / 1e4} if step % 500 == 0 else {}
        series.append(step_line(step, 9.0 if step == 4_321 else step % 7 / 7) | more)
    whole = series.window("step", 0, float("inf"), 1_600)
    assert whole["decimated"] == 10_000
    assert len(whole["steps"]) <= 1_600
    assert whole["steps"] == sorted(whole["steps"])
    assert max(whole["columns"]["reward"]) == 9.0
    assert whole["steps"][-1] == 9_999
    assert whole["columns"]["reward"][-1] == 9_999 % 7 / 7
    evaluations = [value for value in whole["columns"]["eval/held_out/avg@1"] if value is not None]
    assert evaluations == [step / 1e4 for step in range(0, 10_000, 500)]
    narrow = series.window("step", 4_000, 4_999, 1_600)
    assert "decimated" not in narrow
    assert narrow["steps"] == list(range(4_000, 5_000))
    assert narrow["columns"]["reward"][321] == 9.0
    first_s, last_s = narrow["columns"]["wall_s"][0], narrow["columns"]["wall_s"][-1]
    assert series.window("wall_s", first_s, last_s, 1_600) == narrow
    assert series.window("step", 20_000, 30_000, 1_600)["steps"] == []
    assert Series().window("wall_s", 0, 1, 1_600) == {"steps": [], "columns": {}}


def test_derived_columns_are_computed_before_decimation() -> None:
    series = Series()
    for step in range(1_000):
        more = {"tokens": 100.0 + step, "samples": 10.0, "samples_per_s": 2.0 + step % 3, "reward_std": 0.5}
        series.append(step_line(step, float(step % 2)) | more)
    columns = series.window("step", 0, 999, 100)["columns"]
    assert max(columns["tokens_per_s"]) == max((100 + step) * (2 + step % 3) / 10 for step in range(1_000))
    assert min(columns["reward - std"]) == -0.5
    assert max(columns["reward + std"]) == 1.5
