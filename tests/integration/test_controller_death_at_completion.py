"""Runs that have ended and whose controller dies before all workers have left."""

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPTS = 4

pytestmark = [pytest.mark.slow, pytest.mark.long]


def steps_of(run: Any) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def run_killed_while_it_waits_for_the_source(launch: Callable[..., Any], untrained_model: Path) -> Any:
    """A run whose controller was killed while it waited for the source; None if the controller had ended before."""
    flags = ["--steps", "3", "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"]
    run = launch("--model", str(untrained_model), *flags, "--rollout.workers", "1", "--algorithm.kl.coef", "0")
    run.wait_for(lambda: steps_of(run) >= 1, "a step")
    sources, controllers = run.find("flowrt.roles.source"), run.find("flowrt.launcher.controller_main")
    run.wait_for(lambda: steps_of(run) >= 2, "two steps, and the prompts of the third")
    with contextlib.suppress(ProcessLookupError):
        run.signal(signal.SIGSTOP, sources[0])
    run.wait_for(lambda: "the run ends: the run is complete" in run.log("controller"), "end")
    try:
        run.signal(signal.SIGKILL, controllers[0])
    except ProcessLookupError:
        return None
    return run


def test_complete_run_survives_the_death_of_its_controller(launch: Callable[..., Any], untrained_model: Path) -> None:
    """The controller is killed while it waits for a stopped source to leave: nothing is lost."""
    run = next(filter(None, (run_killed_while_it_waits_for_the_source(launch, untrained_model) for _ in range(4))))
    assert run.wait(90.0) == 0, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (3, 0, 0)
    assert summary["prompts"] == {"trained": 3 * PROMPTS}
    run.assert_gone(10.0)


def run_killed_after_the_loss_of_its_trainer(launch: Callable[..., Any], untrained_model: Path) -> Any:
    """A run that lost its trainer, and its controller, which waited for the source; None if that had ended before."""
    flags = ["--steps", "6", "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"]
    flags += ["--checkpoint.every", "1"]
    run = launch("--model", str(untrained_model), *flags, "--rollout.workers", "1", "--algorithm.kl.coef", "0")
    run.wait_for(lambda: steps_of(run) >= 1, "a step")
    [source], [controller] = run.find("flowrt.roles.source"), run.find("flowrt.launcher.controller_main")
    [trainer] = run.find("flowrt.roles.trainer")
    run.signal(signal.SIGSTOP, source)
    run.signal(signal.SIGKILL, trainer)
    run.wait_for(lambda: "the run ends: " in run.log("controller"), "the end")
    try:
        run.signal(signal.SIGKILL, controller)
    except ProcessLookupError:
        return None
    return run


def test_run_that_lost_its_trainer_restarts_after_the_death_of_its_controller(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    """The controller is not recovered, because its run lacks the trainer: the run starts again from a checkpoint."""
    run = next(filter(None, (run_killed_after_the_loss_of_its_trainer(launch, untrained_model) for _ in range(4))))
    assert run.wait(180.0) == 0, run.output
    assert "restart 1 of 3 in 1 s, from step" in run.words
    assert "controller was killed by SIGKILL: restarting" not in run.words
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (6, 0, 0)
    run.assert_gone(10.0)


def test_complete_run_whose_summary_cannot_be_written_reports_the_cause(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    """As on a disk that becomes full at the end; here a directory is in the place of the temporary file."""
    flags = ["--steps", "3", "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"]
    run = launch("--model", str(untrained_model), *flags, "--rollout.workers", "1", "--algorithm.kl.coef", "0")
    run.wait_for(lambda: (run.run_dir / "logs" / "controller.log").is_file(), "a run directory")
    blocker = run.run_dir / ".summary.json.part"
    blocker.mkdir()
    assert run.wait(90.0) == 1, run.output
    assert "the run is complete, but without a summary: controller exited with exit code 1" in run.words, run.output
    assert "the summary cannot be written: [Errno" in run.words, run.output
    assert f"fix this, then flowrt resume {run.run_dir}" in run.words, run.output
    assert "Traceback" not in run.output
    blocker.rmdir()
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(90.0) == 0, resumed.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (3, 0, 0)
