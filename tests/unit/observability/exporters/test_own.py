"""The exporter of examples/own_exporter.py, run by the command in its docstring."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrt.observability.exporters.feed import Feed
from flowrt.observability.exporters.own import OwnExporter
from flowrt.observability.stored_samples import SampleReader
from tests.unit.observability.exporters.written_run import metrics, write_lines, write_run
from tests.unit.observability.test_stored_samples import MEMBERS, fill

EXAMPLE = Path(__file__).parents[4] / "examples" / "own_exporter.py"
SPEC = f"{EXAMPLE}:StepsCsv"
STEPS = 10


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_command_writes_all_steps_with_their_worst_samples(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", STEPS)
    fill(run_dir)
    words = [sys.executable, "-m", "flowrt.cli", "export", str(run_dir), "--exporter", SPEC]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, env={"STEPS_CSV": str(tmp_path / "steps.csv")}
    )
    assert done.returncode == 0, done.stderr
    written = rows(tmp_path / "steps.csv")
    assert [int(row["step"]) for row in written] == list(range(STEPS))
    for row, line in zip(written, metrics(range(STEPS)), strict=True):
        assert [float(row[name]) for name in ("wall_s", "reward", "staleness_max")] == [
            line[name] for name in ("wall_s", "reward", "staleness_max")
        ]
        assert row["response_length"] == ""
    worst = {
        sample.step: sample
        for sample in reversed(SampleReader(run_dir).query(order="worst", limit=STEPS * MEMBERS).samples)
    }
    assert len(worst) == STEPS
    for row in written:
        sample = worst[int(row["step"])]
        assert float(row["worst_reward"]) == sample.reward
        assert row["worst_completion"].encode("utf-8") == sample.completion.encode("utf-8", "backslashreplace")


def test_repeated_steps_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS_CSV", str(tmp_path / "steps.csv"))
    run_dir = write_run(tmp_path / "run", STEPS)
    exporter = OwnExporter(SPEC)
    feed = Feed(run_dir, exporter)
    feed.read_new()
    repeated = [*metrics(range(5)), *metrics(range(5, 8), seed=7)]
    write_lines(run_dir / "metrics.jsonl.new", repeated)
    (run_dir / "metrics.jsonl.new").rename(run_dir / "metrics.jsonl")
    feed.read_new(is_last=True)
    exporter.close()
    written = rows(tmp_path / "steps.csv")
    assert [(int(row["step"]), float(row["reward"])) for row in written] == [
        (line["step"], line["reward"]) for line in repeated
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "steps.csv"]
