"""A run that is complete, and whose controller dies before it has said so."""

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


def one_that_waits_for_its_source(launch: Callable[..., Any], untrained_model: Path) -> Any:
    """A run whose controller was killed while it waited; None where the source had left, or was given up, before."""
    small = ["--steps", "3", "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"]
    run = launch("--model", str(untrained_model), *small, "--rollout.workers", "1", "--algorithm.kl.coef", "0")
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


def test_complete_run_whose_controller_dies_before_sending_the_end(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    """The controller waits for the goodbye of a source that is stopped, and is killed meanwhile: nothing is lost."""
    run = next(filter(None, (one_that_waits_for_its_source(launch, untrained_model) for _ in range(4))))
    assert run.wait(90.0) == 0, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (3, 0, 0)
    assert summary["prompts"] == {"trained": 3 * PROMPTS}
    run.assert_gone(10.0)


def test_complete_run_whose_summary_cannot_be_written_names_the_cause(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    """As on a disk that gets full at the very end; here a directory is in the place of the file."""
    small = ["--steps", "3", "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"]
    run = launch("--model", str(untrained_model), *small, "--rollout.workers", "1", "--algorithm.kl.coef", "0")
    run.wait_for(lambda: (run.run_dir / "logs" / "controller.log").is_file(), "a run directory")
    in_the_way = run.run_dir / ".summary.json.part"
    in_the_way.mkdir()
    assert run.wait(90.0) == 1, run.output
    assert "the run is complete, but without a summary: controller exited with exit code 1" in run.words, run.output
    assert "the summary cannot be written: [Errno" in run.words, run.output
    assert f"fix this, then flowrt resume {run.run_dir}" in run.words, run.output
    assert "Traceback" not in run.output
    in_the_way.rmdir()
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(90.0) == 0, resumed.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (3, 0, 0)
