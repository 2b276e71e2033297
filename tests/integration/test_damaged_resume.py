"""Resuming a killed run with damaged files: it continues, or is refused with nothing changed; concurrent resumes."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.timeline_file import segments
from flowrt.recipes.config_io import from_file
from flowrt.recipes.run_dir import checkpoint_dir, checkpoint_steps
from tests.integration.conftest import Launch

pytestmark = pytest.mark.slow
STEPS = 12
SMALL = [
    *("--steps", str(STEPS), "--prompts-per-step", "2", "--group-size", "2", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "3"),
]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def killed(launch: Callable[..., Any], untrained_model: Path) -> Path:
    """The directory of a run whose processes were killed after two checkpoints and the first timeline segment."""
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000")
    run.wait_for(lambda: len(checkpoint_steps(run.run_dir)) >= 2 and segments(run.run_dir), "checkpoints and a segment")
    run.kill_all(run.processes())
    run.wait(10.0)
    assert max(checkpoint_steps(run.run_dir)) < 1000
    return Path(run.run_dir)


def copied(killed: Path, tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)
    return run_dir


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_damaged_metrics_and_summary_are_rebuilt_on_resume(
    launch: Callable[..., Any], killed: Path, tmp_path: Path
) -> None:
    run_dir = copied(killed, tmp_path)
    last = max(checkpoint_steps(run_dir)) + 2
    metrics = run_dir / "metrics.jsonl"
    metrics.write_bytes(b"\xff\xfe{}\n[1,2]\n" + metrics.read_bytes()[300:])
    (run_dir / "summary.json").write_text("{half")
    with segments(run_dir)[-1].open("ab") as timeline:
        timeline.write(b"\x00\xff noise\n{}\n")
    with (run_dir / "attribution.jsonl").open("ab") as attribution:
        attribution.write(b"\x00\xff noise\n{}\n[1]\n")
    run = launch("--steps", str(last), resume=run_dir)
    assert run.wait(120.0) == 0, run.output
    assert "Traceback" not in run.output
    assert [line["step"] for line in lines(run_dir)] == list(range(last))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (last, 0, 0)


def test_a_damaged_checkpoint_is_refused_and_nothing_changes(
    launch: Callable[..., Any], killed: Path, tmp_path: Path
) -> None:
    run_dir = copied(killed, tmp_path)
    *_, before, newest = checkpoint_steps(run_dir)
    weights = max(checkpoint_dir(run_dir, newest).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    for place in range(len(data) // 2, len(data) // 2 + 50):
        data[place] ^= 255
    weights.write_bytes(data)
    original = contents(run_dir)
    run = launch("--steps", str(newest + 1), resume=run_dir)
    assert run.wait(60.0) == 2, run.output
    assert f"step-{newest:06} is damaged: {weights.name} has other bytes than were written" in run.words
    assert f"step-{before:06} before it is intact: remove step-{newest:06} to resume from that" in run.words
    assert contents(run_dir) == original
    shutil.rmtree(checkpoint_dir(run_dir, newest))
    run = launch("--steps", str(newest + 1), resume=run_dir)
    assert run.wait(120.0) == 0, run.output
    assert [line["step"] for line in lines(run_dir)] == list(range(newest + 1))


@pytest.mark.parametrize("refused_by", ["flowrt resume", "controller"])
def test_a_directory_in_place_of_the_summary_is_refused_and_nothing_changes(
    launch: Callable[..., Any], killed: Path, tmp_path: Path, refused_by: str
) -> None:
    run_dir = copied(killed, tmp_path)
    (run_dir / "summary.json").mkdir()
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace(str(killed), str(run_dir)))
    original = contents(run_dir)
    if refused_by == "controller":
        argv = [sys.executable, "-m", "flowrt.launcher.controller_main", "--config", str(config), "--from-checkpoint"]
        completed = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
        code, output = completed.returncode, completed.stdout + completed.stderr
    else:
        run = launch("--steps", "100000", resume=run_dir)
        code, output = run.wait(60.0), run.words
    assert code == 2, output
    assert "summary.json is a directory, where the run writes its summary; move it away" in output
    assert "Traceback" not in output
    assert contents(run_dir) == original


def test_one_of_two_concurrent_resumes_succeeds(killed: Path, tmp_path: Path) -> None:
    run_dir = copied(killed, tmp_path)
    newest = max(checkpoint_steps(run_dir))
    runs = {
        steps: Launch(["--steps", str(steps)], tmp_path / str(steps), resume=run_dir)
        for steps in (newest + 20, newest + 30)
    }
    try:
        codes = {steps: run.wait(120.0) for steps, run in runs.items()}
    finally:
        for run in runs.values():
            run.close()
    assert sorted(codes.values()) == [0, 2], {steps: run.output for steps, run in runs.items()}
    [winner] = [steps for steps, code in codes.items() if code == 0]
    assert from_file(run_dir / "config.toml").steps == winner
    assert [line["step"] for line in lines(run_dir)] == list(range(winner))
    assert not list(run_dir.glob(".config*"))


def test_a_resume_refused_because_of_the_ledger_changes_nothing(
    launch: Callable[..., Any], killed: Path, tmp_path: Path
) -> None:
    """Refused by the controller, after the checks of the launcher have passed."""
    run_dir = copied(killed, tmp_path)
    path = run_dir / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM steps WHERE step = 1")
        database.execute("DELETE FROM pending_writes")
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (run_dir / "summary.json").write_text('{"exit_code": 1, "reason": "trainer0: killed", "steps": 7}')
    (run_dir / ".config.toml.4194305").write_text("of a launcher that was killed; no process has this id")
    original = {name: data for name, data in contents(run_dir).items() if "/" not in name and "ledger" not in name}
    run = launch("--steps", str(max(checkpoint_steps(run_dir)) + 1), resume=run_dir)
    assert run.wait(60.0) == 2, run.output
    assert "has no metrics of step 1: it is damaged" in run.words
    assert {name: data for name, data in contents(run_dir).items() if name in original} == original
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT COUNT(*) FROM prompts WHERE reason LIKE 'rolled back%'").fetchone() == (0,)


def test_complete_run_with_a_damaged_summary_is_not_restarted(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "2", "--checkpoint.every", "0")
    assert run.wait(120.0) == 0, run.output
    (run.run_dir / "summary.json").write_text("{half")
    original = contents(run.run_dir)
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(60.0) == 2, resumed.output
    assert "would discard all 2 steps" in resumed.words
    assert "remove summary.json to start again at step 0" in resumed.words
    assert contents(run.run_dir) == original
    (run.run_dir / "summary.json").unlink()
    again = launch(resume=run.run_dir)
    assert again.wait(120.0) == 0, again.output
    assert "has no checkpoint yet: its steps trained so far (2) are made again" in again.words


def test_a_run_whose_checkpoints_are_gone_is_refused_and_nothing_changes(
    launch: Callable[..., Any], killed: Path, tmp_path: Path
) -> None:
    run_dir = copied(killed, tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    original = contents(run_dir)
    run = launch("--steps", "2000", resume=run_dir)
    assert run.wait(60.0) == 2, run.output
    assert "has none of its checkpoints any more" in run.words
    assert f"restore {run_dir}/checkpoints from a copy, or start again in another run directory" in run.words
    readers = {"ledger.sqlite-shm": b""}  # the memory that readers share
    assert contents(run_dir) | readers == original | readers


def test_removing_the_ledger_ends_the_run_with_an_error(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000", "--max-run-restarts", "0")
    run.wait_for(lambda: checkpoint_steps(run.run_dir), "a checkpoint")
    for path in run.run_dir.glob("ledger.sqlite*"):
        path.unlink()
    assert run.wait(60.0) == 1, run.output
    assert "ledger.sqlite was removed or replaced during the run" in run.words
