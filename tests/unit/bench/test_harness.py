"""The benchmarks' harness: bounds, exit codes, and results files of whole and partial runs."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from common import harness
from common.harness import Bench, Figures, Options, Skipped, beyond, by_turns, median_ratio

BOUNDS = {"wrong": 0.0, "rounding": 1e-12, "start_s": 5.0}
FLOORS = {"ratio": 0.95}


def test_every_missed_bound_fails_a_full_run() -> None:
    metrics = {"wrong": 1.0, "rounding": 1e-11, "start_s": 6.0, "ratio": 0.9, "other": 7.0}
    assert beyond(metrics, BOUNDS, FLOORS, quick=False) == ["wrong", "rounding", "start_s", "ratio"]
    assert beyond({"wrong": 0.0, "start_s": 5.0, "ratio": 0.95}, BOUNDS, FLOORS, quick=False) == []
    assert beyond({"start_s": math.nan, "ratio": math.nan}, BOUNDS, FLOORS, quick=False) == ["start_s", "ratio"]


def test_only_errors_fail_a_quick_run() -> None:
    metrics = {"wrong": 1.0, "rounding": 1e-11, "start_s": 6.0, "ratio": 0.9}
    assert beyond(metrics, BOUNDS, FLOORS, quick=True) == ["wrong", "rounding"]


def speed(options: Options) -> Figures:
    """Speed of one part."""
    return {"speed": float(options.speed)}


def size(_: Options) -> Figures:
    """Size of the other part."""
    return {"size": 2.0}


def device(_: Options) -> Figures:
    raise Skipped("there is no device")


BENCH = Bench(
    about="Two figures.",
    parts={"speed": speed, "size": size, "device": device},
    most={"size": 3.0},
    least={"speed": 5.0},
    derived=lambda metrics: {"figures": float(len(metrics.keys() - {"figures"}))},
    add_options=lambda parser: parser.add_argument("--speed", type=float, default=7.0),
)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str, commit: str = "first") -> int:
    monkeypatch.setattr(harness, "commit", lambda: commit)
    monkeypatch.setattr("sys.argv", ["bench", "--json", str(path), *words])
    return BENCH.main()


def written(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    contents = json.loads(path.read_text())
    return contents["metrics"], contents["machine"]


def test_a_whole_run_writes_all_figures_and_names_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, results) == 0
    metrics, machine = written(results)
    assert metrics == {"speed": 7.0, "size": 2.0, "figures": 2.0}
    assert machine["commit"] == "first"
    assert machine["part_commits"] == {"speed": "first", "size": "first"}
    assert "device is not measured: there is no device" in capsys.readouterr().out


def test_a_partial_run_keeps_other_parts_and_names_those_of_another_commit(
    monkeypatch: pytest.MonkeyPatch, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, results)
    run(monkeypatch, results, "--parts", "speed", "--speed", "8")
    assert written(results)[0] == {"speed": 8.0, "size": 2.0, "figures": 2.0}
    assert "another commit" not in capsys.readouterr().out
    run(monkeypatch, results, "--parts", "speed", "--speed", "9", commit="second")
    metrics, machine = written(results)
    assert metrics == {"speed": 9.0, "size": 2.0, "figures": 2.0}
    assert machine["part_commits"] == {"speed": "second", "size": "first"}
    assert f"{results} has figures of size from another commit: first" in capsys.readouterr().out
    run(monkeypatch, results, commit="second")
    assert written(results)[1]["part_commits"] == {"speed": "second", "size": "second"}


def test_quick_and_whole_runs_are_not_mixed(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    run(monkeypatch, results)
    before = results.read_text()
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, results, "--quick", "--parts", "speed")
    assert error.value.code == 2
    assert results.read_text() == before


def test_a_missed_bound_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, results, "--speed", "4") == 1
    assert "speed is 4, its bound is >= 5" in capsys.readouterr().out
    assert run(monkeypatch, results, "--speed", "4", "--parts", "size") == 0, "speed was not measured in this run"


def test_what_is_measured_before_a_failure_is_written(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    monkeypatch.setitem(BENCH.parts, "size", lambda _: {"size": 1 / 0})
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, results)
    assert written(results)[0]["speed"] == 7.0


def test_sides_take_turns() -> None:
    order: list[str] = []

    def measure(name: str, number: int) -> float:
        order.append(name)
        return number + 1.0

    measured = by_turns({name: partial(measure, name) for name in "ab"}, 2)
    assert order == ["a", "b", "b", "a"]
    assert measured == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert median_ratio([2.0, 3.0, 8.0], [1.0, 1.0, 2.0]) == 3.0
