"""Attribution of real runs: the seconds of every step add up, with late, stopped and killed workers too."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.controller.attribution.causes import KINDS
from flowrt.controller.storage.timeline_file import read_timeline
from tests.integration.conftest import FLOWRT, wait_until
from tests.integration.helpers.forked_flowrt import ForkedFlowrt

pytestmark = pytest.mark.slow
SMALL = [
    *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--algorithm.kl.coef", "0"),
]
STOPPED_S = 2.5
ROUNDED_S = 0.0001
"""Resolution of the times in the event log."""


def lines(run_dir: Path, name: str = "attribution.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def presence(run_dir: Path) -> dict[str, tuple[str, float, float]]:
    """Role, join time and leave time of each worker, from the event log."""
    roles = {line["worker"]: line["role"] for line in read_timeline(run_dir)}
    intervals: dict[str, tuple[str, float, float]] = {}
    for event in lines(run_dir, "events.jsonl"):
        worker = event.get("worker", "")
        if event["kind"] in ("joined", "restarted") and worker in roles:
            intervals[worker] = roles[worker], event["wall_s"], float("inf")
        if event["kind"] == "gone" and worker in intervals:
            intervals[worker] = roles[worker], intervals[worker][1], event["wall_s"]
    return intervals


def assert_adds_up(run_dir: Path, steps: list[dict[str, Any]]) -> None:
    """The seconds of each step are those of the workers present."""
    workers = presence(run_dir)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    for before, after in pairwise(steps):
        assert before["to_s"] == after["from_s"]
    for line in steps:
        for role in {role for role, _, _ in workers.values()}:
            expected = sum(
                max(min(left_s, line["to_s"]) - max(joined_s, line["from_s"]), 0.0)
                for worker_role, joined_s, left_s in workers.values()
                if worker_role == role
            )
            total = sum(line["roles"].get(role, {}).get(kind, 0.0) for kind in KINDS)
            assert total == pytest.approx(expected, abs=ROUNDED_S * len(workers)), (line["step"], role)


@pytest.fixture
def run(launch: Callable[..., Any], untrained_model: Path) -> Any:
    run = launch("--model", str(untrained_model), "--steps", "100000", *SMALL)
    run.wait_for_training()
    return run


@pytest.fixture
def late(run: Any, tmp_path: Path) -> Iterator[int]:
    """The process id of a worker that joins during the run."""
    address = (run.run_dir / "address").read_text().strip()
    with (tmp_path / "late.log").open("wb") as log:
        arguments = ["worker", "rollout", "--controller", address, "--name", "late"]
        process = ForkedFlowrt(arguments, tmp_path, os.environ, log.fileno())
    yield process.pid
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(10.0)


def kinds_of(run_dir: Path, worker: str) -> set[str]:
    return {line["kind"] for line in read_timeline(run_dir) if line["worker"] == worker and "kind" in line}


def longest_stop_s(run_dir: Path, worker: str) -> float:
    """On a busy machine a process that waits for a processor counts as stopped, too."""
    stops = [line for line in read_timeline(run_dir) if line["worker"] == worker and line.get("kind") == "stopped"]
    return max((line["end_s"] - line["start_s"] for line in stops), default=0.0)


def test_seconds_add_up_with_a_late_a_stopped_and_a_killed_worker(run: Any, late: int) -> None:
    run_dir = run.run_dir
    wait_until(lambda: "generate" in kinds_of(run_dir, "late"), 180.0, lambda: run.output)
    os.kill(late, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(late).status() == psutil.STATUS_STOPPED, 20.0, lambda: run.output)
    begin_s = time.monotonic()
    time.sleep(STOPPED_S)  # the duration that the test measures
    stopped_s = time.monotonic() - begin_s
    os.kill(late, signal.SIGCONT)
    wait_until(lambda: longest_stop_s(run_dir, "late") >= stopped_s - ROUNDED_S, 60.0, lambda: run.log("controller"))
    completed = subprocess.run(
        [str(FLOWRT), "time", str(run_dir), "--json"], capture_output=True, text=True, timeout=600, check=True
    )
    assert json.loads(completed.stdout)["sentences"], "for a run in progress"
    os.kill(late, signal.SIGKILL)
    wait_until(lambda: presence(run_dir)["late"][2] < float("inf"), 60.0, lambda: run.log("controller"))
    done = len(lines(run_dir))
    wait_until(lambda: len(lines(run_dir)) > done + 3, 60.0, lambda: run.log("controller"))
    steps = lines(run_dir)
    run.signal(signal.SIGINT)
    assert run.wait(30.0) == 130, run.output
    assert_adds_up(run_dir, steps)
    away = sum(line["roles"]["rollout"]["away"] for line in steps)
    assert away >= stopped_s - ROUNDED_S
    assert any(worker == "late" for line in steps for worker, _ in line["worst"].get("away", ()))
    assert lines(run_dir)[-1]["step"] == len(lines(run_dir)) - 1, "the step in progress has its line"
    assert_resources(run_dir)


def assert_resources(run_dir: Path) -> None:
    """What the workers used is recorded, without gaps in time."""
    used = [line["resources"] for line in lines(run_dir) if "resources" in line]
    for before, after in pairwise(used):
        assert before["to_s"] <= after["from_s"]
    rollout = [window["roles"]["rollout"] for window in used if "rollout" in window["roles"]]
    assert max(use["workers"] for use in rollout) == 2
    assert max(use.get("tokens_per_s", 0.0) for use in rollout) > 0
    for role in ("rollout", "trainer", "reward"):
        of_role = [window["roles"][role]["figures"] for window in used if role in window["roles"]]
        assert max(figures["processors"][2] for figures in of_role) > 0
        assert all(
            10e6 < least <= middle <= largest for figures in of_role for least, middle, largest in [figures["memory"]]
        )
    shares = [share for use in rollout for share in use["figures"].get("cache", ())]
    assert all(0 <= share <= 1 for share in shares)
    assert shares  # what an engine holds at an instant may be nothing
    assert "late" in {worker for window in used for worker, _ in window["worst"]["memory"]}


def test_a_completed_run_reports_the_time_shares_of_each_role(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch("--model", str(untrained_model), "--steps", "8", *SMALL)
    assert run.wait(120.0) == 0, run.output
    steps = lines(run.run_dir)
    assert_adds_up(run.run_dir, steps[:-1])
    assert [line["step"] for line in steps] == list(range(9)), (
        "the time after the last step is recorded as one more step"
    )
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert steps[-1]["to_s"] == pytest.approx(summary["wall_s"], abs=0.001)
    for role in ("rollout", "trainer", "reward"):
        assert sum(summary["time"][role].values()) == pytest.approx(1.0, abs=0.001)
        assert summary["time"][role]["busy"] == summary["busy_fraction"][role]
        assert f"time of {role}" in run.output
    assert summary["time"]["trainer"]["busy"] > 0
    waits = {line["wait"] for line in read_timeline(run.run_dir) if "wait" in line}
    assert "gate" in waits or "samples" in waits
    completed = subprocess.run(
        [str(FLOWRT), "time", str(run.run_dir), "--worker", "rollout-0"], capture_output=True, text=True, timeout=600
    )
    assert completed.returncode == 0, completed.stderr
    assert "rollout-0: " in completed.stdout
