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
