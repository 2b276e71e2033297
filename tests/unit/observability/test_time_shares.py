"""Attribution of a live run: what is read in parts, rolled back and done again, and how much of it is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrt.observability import tails, time_shares
from flowrt.observability.attribution import add_up, read
from flowrt.observability.time_shares import MAX_LINES, TimeShares
from tests.unit.observability.exporters.written_run import shares, write_lines


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def gate_s(lines: list[dict[str, Any]]) -> float:
    return float(sum(line["roles"]["rollout"]["gate"] for line in lines))


@pytest.mark.parametrize("steps", [0, 1, MAX_LINES, MAX_LINES + 1, 3 * MAX_LINES + 7, 20 * MAX_LINES])
def test_sums_of_consecutive_steps_add_up_to_all_steps(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "attribution.jsonl"
    write_lines(path, shares(range(steps)))
    reader = TimeShares(path)
    assert reader.read_new() is False
    lines = reader.lines()
    assert len(lines) <= MAX_LINES
    assert sum(line.get("steps", 1) for line in lines) == steps
    assert [line["from_s"] for line in lines[1:]] == [line["to_s"] for line in lines[:-1]]
    assert gate_s(lines) == pytest.approx(0.6 * steps, abs=0.01)
    if steps:
        assert reader.seconds["rollout"]["gate"] == pytest.approx(0.6 * steps)
        assert (lines[0]["from_s"], lines[-1]["step"]) == (0.0, steps - 1)
        assert reader.last == shares([steps - 1])[0]
        assert reader.lines(steps - 1) == shares([steps - 1])
    assert reader.lines(steps) == []


def test_a_page_that_asks_for_what_is_new_gets_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "attribution.jsonl"
    reader = TimeShares(path)
    have: list[dict[str, Any]] = []
    for start in range(0, 4 * MAX_LINES, 333):
        append(path, shares(range(start, start + 333)))
        reader.read_new()
        have += reader.lines(have[-1]["step"] + 1 if have else 0)
    assert sum(line.get("steps", 1) for line in have) == have[-1]["step"] + 1
    assert gate_s(have) == pytest.approx(0.6 * (have[-1]["step"] + 1), abs=0.01)


@pytest.mark.parametrize("kept", [20, 10 * MAX_LINES])
def test_steps_that_are_done_again_replace_their_lines_and_stay_in_the_seconds(tmp_path: Path, kept: int) -> None:
    steps = kept + 100
    path = tmp_path / "attribution.jsonl"
    write_lines(path, shares(range(steps)))
    reader = TimeShares(path)
    reader.read_new()
    append(path, shares(range(kept, kept + 5)))
    reader.read_new()
    assert reader.lines(kept) == shares(range(kept, kept + 5))
    assert sum(line.get("steps", 1) for line in reader.lines()) == kept + 5
    assert reader.seconds["rollout"]["gate"] == pytest.approx(0.6 * (steps + 5))
    lines, _ = read(tmp_path)
    assert [line["step"] for line in lines] == list(range(kept + 5))
    again = TimeShares(path)  # as a restarted `flowrt watch` reads it
    again.read_new()
    assert again.seconds == reader.seconds
    assert add_up(again.lines()).roles["rollout"]["gate"] == pytest.approx(0.6 * (kept + 5), abs=0.01)


def test_a_rollback_by_more_than_what_is_kept_leaves_out_one_sum_at_most(tmp_path: Path) -> None:
    path = tmp_path / "attribution.jsonl"
    write_lines(path, shares(range(10 * MAX_LINES)))
    reader = TimeShares(path)
    reader.read_new()
    append(path, shares([MAX_LINES]))
    reader.read_new()
    lines = reader.lines()
    assert lines[-1]["step"] == MAX_LINES
    assert MAX_LINES - 32 <= sum(line.get("steps", 1) for line in lines) <= MAX_LINES + 1


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "READ_BYTES", 4096)
    path = tmp_path / "attribution.jsonl"
    write_lines(path, shares(range(200)))
    reader, parts = TimeShares(path), 0
    while reader.read_new(most_bytes=8192):
        parts += 1
        assert 0 < reader.seconds["rollout"]["gate"] < 0.6 * 200
    assert parts > 2
    assert sum(line.get("steps", 1) for line in reader.lines()) == 200


@pytest.mark.parametrize(
    "damage",
    [
        {"step": "x"},
        {"roles": {"rollout": {"busy": "x"}}},
        {"roots": [1]},
        {"roots": [["rollout", "gate", "trainer", "x"]]},
        {"worst": {"gate": [["rollout-0"]]}},
        {"worst": {"gate": 3}},
        {"to_s": None},
    ],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "attribution.jsonl"
    first, second = shares(range(2))
    write_lines(path, [first, second | damage])
    reader = TimeShares(path)
    reader.read_new()
    assert reader.lines() == [first]
    assert read(tmp_path) == ([first], 1)


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "attribution.jsonl"
    reader = TimeShares(path)
    kept = []
    for start in range(0, 16_000, 4_000):
        append(path, shares(range(start, start + 4_000)))
        reader.read_new()
        kept.append(len(reader._lines) + len(reader._sums))
    assert max(kept) < 2 * time_shares.MAX_LINES + 100
