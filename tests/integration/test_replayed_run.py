"""A run whose rollout worker and controller are killed: its replay shows every status that was observed."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from common.observed import not_replayed
from common.observed import observe as observed_status

from flowrt.controller.events import WorkerDisconnected
from flowrt.errors import FlowError
from flowrt.observability.recording_reader import Recordings
from flowrt.observability.replay import Replay
from tests.integration.conftest import FLOWRT, Launch

pytestmark = pytest.mark.slow
STEPS = 100
"""Enough for the run to continue for seconds after each fault."""


def observe(run: Launch, statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """Fetch a status of the run and append it to ``statuses``."""
    statuses.append(observed_status(run.run_dir))
    return statuses[-1]


def stopped_with_samples(run: Launch, worker: psutil.Process, statuses: list[dict[str, Any]]) -> bool:
    """Stop rollout-0 and return True if it holds samples; else continue it."""
    run.signal(signal.SIGSTOP, worker)
    for _ in range(2):  # the first may be older than the last messages of the worker
        status = observe(run, statuses)
    if any("rollout" in node[4] for node in status["graph"]["workers"] if node[0] == "rollout-0"):
        return True
    run.signal(signal.SIGCONT, worker)
    return False


@pytest.fixture(scope="module")
def observed(launch: Callable[..., Any], sft_model: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of the completed run, and every status that was observed."""
    run = launch(
        *("--model", str(sft_model), "--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4"),
        *("--data.eval-prompts", "0", "--rollout.max-running-requests", "8", "--supervisor.backoff-s", "0.1"),
        *("--controller.lanes", "gloo"),
    )
    statuses: list[dict[str, Any]] = []
    run.wait_for_training()
    [victim, *_] = run.find("flowrt.roles.rollout", "rollout-0")
    run.wait_for(lambda: stopped_with_samples(run, victim, statuses), "rollout-0 to hold samples when it is stopped")
    run.signal(signal.SIGKILL, victim)
    run.wait_for(lambda: observe(run, statuses)["step"] >= STEPS // 8, f"step {STEPS // 8}")
    # A killed controller has not written the events since its last tick: the last statuses are not compared.
    run.wait_for(lambda: observe(run, [])["step"] >= STEPS // 4, f"step {STEPS // 4}")
    run.signal(signal.SIGKILL, run.find("flowrt.launcher.controller_main")[0])
    while run.processes():
        with suppress(FlowError, OSError):  # the controller restarts, or the run has ended
            observe(run, statuses)
    assert run.wait(60.0) == 0, run.output
    return run.run_dir, statuses


def flowrt(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command, under another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "4", "COLUMNS": "200"}
    ended = subprocess.run(
        [str(FLOWRT), *arguments], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_replay_contains_every_observed_status(observed: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, statuses = observed
    assert len(statuses) > 5
    assert not_replayed(run_dir, statuses) == []


def test_every_invariant_holds_and_both_terms_are_replayed(observed: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, _ = observed
    code, out = flowrt("replay", str(run_dir), "--check", "--json")
    assert code == 0, out
    status = json.loads(out)
    assert [(term["term"], term["damage"], term["complete"]) for term in status["terms"]] == [
        (1, "", False),
        (2, "", True),
    ]
    assert status["ended"] == ["the run is complete", 0]
    assert status["mismatch"] == ""
    ends = [(term["from_s"], term["to_s"]) for term in status["terms"]]
    assert ends[0][0] < ends[0][1] < ends[1][1], "the run clock continues across a restart of the controller"


def test_replay_why_names_the_killed_worker(observed: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, _ = observed
    recording = Recordings.of(run_dir).of_term(1)
    replay = Replay(recording)
    held: dict[str, list[Any]] = {}
    for done in replay.run():
        if isinstance(done.event, WorkerDisconnected) and done.event.worker.startswith("rollout"):
            break
        held = {lease["worker"]: lease["samples"] for lease in replay.status()["leases"] if lease["stage"] == "rollout"}
    else:
        pytest.fail("no rollout worker was lost in term 1")
    worker = done.event.worker
    assert held.get(worker), f"{worker} held nothing when it was killed"
    epoch, prompt, _ = held[worker][0]
    code, out = flowrt("replay", str(run_dir), "--why", f"{epoch}:{prompt}", "--json")
    assert code == 0, out
    decisions = json.loads(out)
    # The worker may have held several samples of the prompt.
    lost = [
        decision
        for decision in decisions
        if (decision["term"], decision["event"]) == (1, done.number) and worker in decision["what"]
    ]
    assert lost, decisions
    for decision in lost:
        assert "ends without a result" in decision["what"]
        assert decision["because"].startswith(f"WorkerDisconnected of {worker}")
    assert any("trained in step" in decision["what"] for decision in decisions[decisions.index(lost[-1]) :])
