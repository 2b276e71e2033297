"""Workers of a run that die are replaced: nothing is lost, nothing is trained twice, and not for ever."""

import json
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
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


def steps_of(run: Any) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.fixture(scope="module")
def bereaved(launch: Callable[..., Any], untrained_model: Path) -> Any:
    """A run whose rollout worker, reward worker, source and controller were killed one by one, and that has ended."""
    run = launch("--model", str(untrained_model), *SMALL)
    for victim in ("roles.rollout", "roles.reward", "roles.source", "launcher.controller_main"):
        step = steps_of(run)
        run.wait_for(lambda: steps_of(run) > step + 2, f"two more steps before {victim} is killed")  # noqa: B023
        [gone] = run.find(f"flowrt.{victim}")
        run.signal(signal.SIGKILL, gone)
        run.wait_for(lambda: {p.pid for p in run.find(f"flowrt.{victim}")} - {gone.pid}, "its replacement")  # noqa: B023
    assert run.wait(120.0) == 0, run.output
    run.assert_gone(10.0)
    return run


def test_run_continues_without_loss(bereaved: Any) -> None:
    summary = json.loads((bereaved.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert summary["resumed_from"] == 0, "a controller that comes back resumes nothing"
    for name in ("rollout-0", "reward", "source"):
        assert f"{name} was killed by SIGKILL: restarting in" in bereaved.words
        # At the start, as a replacement, and when the controller is back.
        assert bereaved.log("controller").count(f" {name} joined") == 3


def test_workers_reconnect_to_a_restarted_controller_within_ten_seconds(bereaved: Any) -> None:
    lines = bereaved.log("controller").splitlines()
    back = max(number for number, line in enumerate(lines) if " listening on " in line)
    began, *joined = [moment(line) for line in lines[back:] if " listening on " in line or " joined (" in line]
    assert len(joined) >= 4
    assert max(joined) - began < timedelta(seconds=10)


def moment(line: str) -> datetime:
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")


def test_a_controller_that_is_killed_before_it_listens_is_started_again(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "2")
    run.wait_for(lambda: run.find("flowrt.launcher.controller_main"), "a controller")
    [controller] = run.find("flowrt.launcher.controller_main")
    run.signal(signal.SIGKILL, controller)  # as soon as there is one: it takes half a second to import what it needs
    assert run.wait(120.0) == 0, run.output
    assert steps_of(run) == 2


def test_a_new_source_offers_nothing_that_was_offered(bereaved: Any) -> None:
    with sqlite3.connect(bereaved.run_dir / "ledger.sqlite") as ledger:
        life = ledger.execute("SELECT epoch, prompt, state, reason FROM events ORDER BY id").fetchall()
    ledger.close()
    opened: Counter[tuple[int, int]] = Counter()
    for epoch, prompt, state, reason in life:
        if state == "in_flight" and not reason:
            opened[epoch, prompt] += 1
            assert opened[epoch, prompt] == 1, f"prompt {prompt} was opened while it was under way or done"
        elif state == "unread":
            assert reason == "its source left"
            opened[epoch, prompt] -= 1
    trained = Counter((epoch, prompt) for epoch, prompt, state, _ in life if state == "trained")
    assert (len(trained), set(trained.values())) == (STEPS * PROMPTS, {1})


def test_a_new_rollout_worker_makes_no_token_with_the_start_weights(bereaved: Any) -> None:
    lines = [json.loads(line) for line in (bereaved.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(line["staleness_max"] for line in lines) <= 1
    summary = json.loads((bereaved.run_dir / "summary.json").read_text())
    assert "over-age" not in summary["dropped"], "something was made with weights that were too old"


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
