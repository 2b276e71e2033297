"""The only worker of a role is terminated and leaves in order: it is replaced at once, and the run continues."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import FLOWRT

pytestmark = pytest.mark.slow
STEPS = 100_000
SMALL = [
    *("--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--supervisor.backoff-s", "0.1"),
]


def steps_of(run: Any) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def test_the_only_worker_of_each_role_is_replaced(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL)
    run.wait_for_training()
    for role, name, number in (
        ("reward", "reward", signal.SIGTERM),
        ("reference", "reference", signal.SIGUSR1),
        ("rollout", "rollout-0", signal.SIGHUP),
    ):
        [worker] = run.find(f"flowrt.roles.{role}")
        joined = run.log("controller").count(f" {name} joined")
        run.signal(number, worker)
        run.wait_for(lambda: not worker.is_running(), f"end of {name}")  # noqa: B023
        run.wait_for(lambda: run.log("controller").count(f" {name} joined") > joined, f"another {name}")  # noqa: B023
        assert f"no {role} worker: {name} was terminated, and leaves in order" in run.words
        assert f"{name} exited with exit code 0: restarting in" in run.words
        done = steps_of(run)
        run.wait_for(lambda: steps_of(run) > done + 3, f"more steps after {name} was replaced")  # noqa: B023
    run.signal(signal.SIGINT)
    assert run.wait(40.0) == 130, run.output
    run.assert_gone(10.0)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)


@pytest.mark.long
def test_status_names_the_vacant_role(launch: Callable[..., Any], untrained_model: Path) -> None:
    """Without worker restarts the status names the vacant role at once, and the run ends after the vacancy timeout."""
    limits = ("--supervisor.max-worker-restarts", "0", "--supervisor.role-vacancy-timeout-s", "20")
    run = launch("--model", str(untrained_model), *SMALL, *limits)
    run.wait_for_training()
    [reward] = run.find("flowrt.roles.reward")
    run.signal(signal.SIGTERM, reward)

    def status() -> str:
        command = [str(FLOWRT), "status", str(run.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600).stdout

    run.wait_for(lambda: "no reward worker for" in status(), "vacancy in the status")
    assert run.wait(40.0) == 1, run.output
    run.assert_gone(10.0)
    assert "no reward worker for" in run.words.rsplit("flowrt:", 1)[1]
