"""Killed workers are replaced up to a limit: no prompt is lost or trained twice."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow
STEPS, PROMPTS = 30, 4
SMALL = [
    *("--steps", str(STEPS), "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "4"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--supervisor.backoff-s", "0.1"),
]


def role(run: Any, name: str) -> psutil.Process:
    """The one process of a role."""
    [process] = run.find(f"flowrt.roles.{name}")
    return process


def completed_steps(run: Any) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.fixture(scope="module")
def restarted_run(launch: Callable[..., Any], untrained_model: Path) -> Any:
    """A completed run whose rollout worker, reward worker, source and controller were killed one by one."""
    run = launch("--model", str(untrained_model), *SMALL)
    for module in ("roles.rollout", "roles.reward", "roles.source", "launcher.controller_main"):
        step = completed_steps(run)
        run.wait_for(lambda: completed_steps(run) > step + 2, f"two more steps before {module} is killed")  # noqa: B023
        [killed] = run.find(f"flowrt.{module}")
        run.signal(signal.SIGKILL, killed)
        run.wait_for(lambda: {p.pid for p in run.find(f"flowrt.{module}")} - {killed.pid}, "its replacement")  # noqa: B023
    assert run.wait(120.0) == 0, run.output
    run.assert_gone(10.0)
    return run


def test_a_run_whose_processes_were_killed_loses_no_prompt(restarted_run: Any) -> None:
    summary = json.loads((restarted_run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert summary["resumed_from"] == 0, "a restarted controller does not resume from a checkpoint"
    for name in ("rollout-0", "reward", "source"):
        assert f"{name} was killed by SIGKILL: restarting in" in restarted_run.words
        # At the start, as a replacement, and after the restart of the controller.
        assert restarted_run.log("controller").count(f" {name} joined") == 3


def test_workers_reconnect_to_a_restarted_controller(restarted_run: Any) -> None:
    lines = restarted_run.log("controller").splitlines()
    restart_line = max(number for number, line in enumerate(lines) if " listening on " in line)
    assert len([line for line in lines[restart_line:] if " joined (" in line]) >= 4


def test_a_controller_killed_before_it_listens_is_restarted(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "2")
    run.wait_for(lambda: run.find("flowrt.launcher.controller_main"), "a controller")
    [controller] = run.find("flowrt.launcher.controller_main")
    run.signal(signal.SIGKILL, controller)  # at once: its imports take half a second
    assert run.wait(120.0) == 0, run.output
    assert completed_steps(run) == 2


def test_a_replacement_source_offers_no_prompt_again(restarted_run: Any) -> None:
    with sqlite3.connect(restarted_run.run_dir / "ledger.sqlite") as ledger:
        history = ledger.execute("SELECT epoch, prompt, state, reason FROM events ORDER BY id").fetchall()
    ledger.close()
    opened: Counter[tuple[int, int]] = Counter()
    for epoch, prompt, state, reason in history:
        if state == "in_flight" and not reason:
            opened[epoch, prompt] += 1
            assert opened[epoch, prompt] == 1, f"prompt {prompt} was opened while it was in flight or done"
        elif state == "unread":
            assert reason == "its source left"
            opened[epoch, prompt] -= 1
    trained = Counter((epoch, prompt) for epoch, prompt, state, _ in history if state == "trained")
    assert (len(trained), set(trained.values())) == (STEPS * PROMPTS, {1})


def test_a_replacement_rollout_worker_does_not_use_the_initial_weights(restarted_run: Any) -> None:
    lines = [json.loads(line) for line in (restarted_run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(line["staleness_max"] for line in lines) <= 1
    summary = json.loads((restarted_run.run_dir / "summary.json").read_text())
    assert "over-age" not in summary["dropped"], "a sample was generated with weights that were too old"


def test_a_trainer_that_exits_without_joining_ends_the_run(launch: Callable[..., Any], untrained_model: Path) -> None:
    """A launch prefix that starts nothing, and reports success."""
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "2", "--launch.trainer", "true")
    assert run.wait(60.0) == 1, run.output
    run.assert_gone(10.0)
    assert "trainer ended with exit code 0 and has not joined the run; its command was `true " in run.words
    assert "Traceback" not in run.output


def test_worker_that_keeps_failing_ends_the_run_with_its_error(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000", "--supervisor.max-worker-restarts", "1")
    run.wait_for_training()
    first = role(run, "reward")
    run.signal(signal.SIGKILL, first)
    run.wait_for(lambda: {p.pid for p in run.find("flowrt.roles.reward")} - {first.pid}, "its replacement")
    run.signal(signal.SIGKILL, role(run, "reward"))
    assert run.wait(20.0) == 1, run.output
    run.assert_gone(10.0)
    assert "reward was killed by SIGKILL; its log" in run.words
    assert "Traceback" not in run.output


def test_a_worker_that_does_not_join_is_named_with_its_reason(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "prefix"
    busy = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    prefix.write_text(f'[ "$1" = a ] || {{ echo "{busy}"; exec sleep 600; }}\nshift\nexec "$@"\n')
    run = launch(
        *("--model", str(untrained_model), *SMALL, "--steps", "100000", "--rollout.workers", "2"),
        *("--launch.rollout-hosts", "a,b", "--launch.rollout", f"sh {prefix} $HOST"),
        *("--supervisor.join-report-s", "2"),
    )
    line = r"rollout-1 has not joined for \d+ s: SLURM holds its step back, .*; its log .*rollout-1\.log ends: srun"
    run.wait_for(lambda: re.search(line, run.words), "the line")
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("flowrt")), "status", str(run.run_dir)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "1000"},
    )
    assert re.search(line, shown.stdout), shown
    run.signal(signal.SIGTERM)
    assert run.wait(60.0) == 130, run.output
