"""Exporters of real runs: they follow the run live, and one that dies or hangs does not affect the run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from common.exported_numbers import metrics_numbers, tensorboard_numbers, wandb_history, wandb_run

from flowrt.observability.exporters.exported_names import exported_name
from flowrt.observability.run_reader import RunReader
from flowrt.recipes.run_dir import checkpoint_steps
from tests.integration.conftest import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SMALL = [
    *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "4", "--rollout.workers", "1"),
    *("--algorithm.kl.coef", "0", "--max-run-restarts", "0", "--trainer.save", "False"),
]
EXPORTERS = """
import json, os, time

class Dies:
    def step(self, line):
        if line["step"] == 2:
            os._exit(7)
    def samples(self, rows): pass
    def close(self): pass

class Writes:
    def __init__(self):
        self.file = open("written.jsonl", "a")
    def step(self, line):
        self.file.write(json.dumps(line) + "\\n")
        self.file.flush()
    def samples(self, rows):
        assert rows and {"prompt_text", "completion", "reward"} <= rows[0].keys()
    def close(self):
        self.file.write('"closed"\\n')
        self.file.close()

class Hangs:
    def step(self, line):
        if line["step"] == 1:
            time.sleep(600)
    def samples(self, rows): pass
    def close(self): pass
"""


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def worker_seconds(run_dir: Path) -> dict[tuple[str, str], float]:
    """What a scrape would have as the seconds of the workers."""
    reader = RunReader(run_dir)
    reader.read_attribution()
    return dict(reader.figures().seconds)


def assert_in_tensorboard(run_dir: Path, directory: Path) -> None:
    """TensorBoard has all numbers of metrics.jsonl, in single precision."""
    exported = tensorboard_numbers(directory)
    for step, line in metrics_numbers(run_dir).items():
        for name, value in line.items():
            if name != "step":
                assert exported[step][exported_name(name)] == pytest.approx(value, rel=2**-23), (step, name)


@pytest.mark.long
@pytest.mark.slow
def test_exporters_follow_a_run_and_failing_ones_do_not_end_it(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    for name in ("dies", "writes", "hangs"):
        (tmp_path / f"{name}.py").write_text(EXPORTERS)
    exporters = [f"{tmp_path}/{name}.py:{name.capitalize()}" for name in ("dies", "writes", "hangs")]
    run = launch(*("--model", str(untrained_model), *SMALL, "--steps", "60"), "--exporters", "tensorboard", *exporters)
    assert run.wait(180.0) == 0, run.output
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == 60
    assert_in_tensorboard(run.run_dir, run.run_dir / "tensorboard")
    written = (run.run_dir.parent / "written.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written[:-1]] == list(range(60))
    assert written[-1] == '"closed"'
    assert "exporter-dies exited with exit code 7" in run.words
    assert "exporter-hangs did not end within 15 s and is killed" in run.words
    recorded = events(run.run_dir)
    assert any(event["kind"] == "exporter" and "exporter-dies exited" in event["text"] for event in recorded)
    assert recorded[0]["kind"] == "started"
    assert recorded[-1]["kind"] == "ended"
    joined = {event["worker"] for event in recorded if event["kind"] == "joined"}
    assert {"source", "trainer", "rollout", "reward"} <= {name.partition("-")[0] for name in joined}
    assert len([event for event in recorded if event["kind"] == "published"]) >= 59
    assert not [event for event in recorded if event["kind"] == "warning"]
    # The model is untrained: all rewards are equal, and no response ends.
    assert {event["text"].split()[1] for event in recorded if event["kind"] == "guard"} <= {
        "zero_variance_fraction",
        "truncated",
    }


@pytest.mark.slow
def test_an_export_follows_a_live_run_to_its_end(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "40")
    metrics = run.run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1, 120.0, lambda: run.output)
    argv = [sys.executable, "-m", "flowrt.cli", "export", str(run.run_dir), "--tensorboard", str(tmp_path), "--follow"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as export:
        assert run.wait(180.0) == 0, run.output
        output, _ = export.communicate(timeout=600)
    assert export.returncode == 0, output
    assert_in_tensorboard(run.run_dir, tmp_path)


@pytest.mark.slow
def test_a_resumed_run_continues_its_wandb_run_and_its_seconds(
    launch: Callable[..., Any], untrained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = launch(
        *("--model", str(untrained_model), *SMALL, "--steps", "100000", "--checkpoint.every", "4"),
        *("--exporters", "wandb"),
    )
    place = run.run_dir / "wandb" / "wandb"
    wait_until(lambda: [*place.glob("flowrt-*.json")], 180.0, lambda: run.output)  # what surely is in W&B's file
    run.kill_all()
    before = worker_seconds(run.run_dir)
    resumed = launch("--steps", str(max(checkpoint_steps(run.run_dir)) + 5), resume=run.run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    first, second = sorted(place.glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert wandb_run(first).run_id == wandb_run(second).run_id
    histories = [wandb_history(path) for path in (first, second)]
    logged = {line["step"]: line["train/wall_s"] for of in histories for line in of if "train/wall_s" in line}
    assert logged == {step: line["wall_s"] for step, line in metrics_numbers(run.run_dir).items()}
    counts = [[line["_step"] for line in history] for history in histories]
    assert all(of == sorted(set(of)) for of in counts)
    assert counts[1][0] > 0, "it goes on counting"
    after = worker_seconds(run.run_dir)
    assert all(after[key] >= value for key, value in before.items())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--exporters", "tensorbord"], "neither tensorboard nor wandb nor FILE.py:CLASS"),
        (["--exporters", "nothing.py:Mine"], "there is no file"),
        (["--exporters", "tensorboard", "tensorboard"], "two that are named 'tensorboard'"),
        (["--guards.command", "no-such-program x"], "there is no such program"),
        (["--guards.command", "'a"], "is no command line"),
    ],
)
def test_bad_exporter_options_are_refused(refused: Callable[..., Any], arguments: list[str], expected: str) -> None:
    assert expected in refused("arithmetic", *arguments).sentence()
