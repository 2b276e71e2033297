"""Workers that nobody planned for join a running job and leave it when asked; one that was given up is told so."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.errors import EXIT_DISMISSED
from tests.integration.conftest import FLOWRT, wait_until

pytestmark = pytest.mark.slow
ENDLESS = [
    *("--steps", "100000", "--data.eval-prompts", "0", "--prompts-per-step", "4", "--group-size", "4"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0"),
]
WITHIN_S = 30.0
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def run(launch: Callable[..., Any], untrained_model: Path) -> Any:
    """A run with one rollout worker that would go on for hours."""
    run = launch("--model", str(untrained_model), *ENDLESS)
    run.wait_for_training()
    return run


@pytest.fixture
def start(run: Any, tmp_path: Path) -> Iterator[Start]:
    """Starts one more rollout worker by name, as a person would who has nodes to spare."""
    started = []

    def worker(name: str) -> subprocess.Popen[bytes]:
        address = (run.run_dir / "address").read_text().strip()
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [str(FLOWRT), "worker", "rollout", "--controller", address, "--name", name]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait_until(lambda: name in generators(run), 60.0, lambda: (tmp_path / f"{name}.log").read_text())
        return started[-1]

    yield worker
    for process in started:
        process.kill()
        process.wait(10.0)


def generators(run: Any) -> set[str]:
    """Whoever has generated something, by the timeline."""
    return {span["worker"] for span in read_timeline(run.run_dir) if span.get("kind") == "generate"}


def steps(run: Any) -> int:
    return len((run.run_dir / "metrics.jsonl").read_text().splitlines())


def assert_goes_on(run: Any) -> None:
    done = steps(run)
    run.wait_for(lambda: steps(run) > done + 2, "more steps")


def drain(run: Any, worker: str) -> subprocess.CompletedProcess[str]:
    command = [str(FLOWRT), "drain", worker, "--run", str(run.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0)


def assert_whole(run: Any) -> None:
    """Ended by hand, and every prompt that was ever offered is accounted for."""
    run.signal(signal.SIGINT)
    assert run.wait(WITHIN_S) == 130, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    assert not summary["dropped"], "somebody who left took samples along"


@pytest.mark.long
def test_additional_worker_joins_takes_work_and_leaves(run: Any, start: Start) -> None:
    extra = start("extra")
    drained = drain(run, "rollout-0")
    assert (drained.returncode, drained.stdout.strip()) == (0, "rollout-0 has left the run"), drained.stderr
    run.wait_for(lambda: not run.find("flowrt.roles.rollout"), "end of the drained worker")
    assert_goes_on(run)
    other = start("other")
    extra.send_signal(signal.SIGTERM)  # as a cluster does that wants its node back
    assert extra.wait(WITHIN_S) == 0
    assert_goes_on(run)
    assert other.poll() is None
    assert "restarting in" not in run.words, "who was asked to leave is not replaced"
    assert_whole(run)
    assert other.wait(WITHIN_S) == 0


@pytest.mark.long
def test_worker_declared_lost_receives_the_reason_when_it_continues(run: Any, start: Start, tmp_path: Path) -> None:
    """Nobody but its own exit code can say to whoever started it that its place is free."""
    extra = start("extra")
    extra.send_signal(signal.SIGSTOP)
    run.wait_for(lambda: "does not answer although its host does" in run.log("controller"), "notice")
    assert_goes_on(run)
    extra.send_signal(signal.SIGCONT)
    assert extra.wait(WITHIN_S) == EXIT_DISMISSED
    assert "Traceback" not in (tmp_path / "extra.log").read_text()
    assert_whole(run)


def test_last_worker_of_a_role_may_not_leave_unasked(run: Any) -> None:
    """A source cannot be drained: what it has read is nowhere else."""
    refused = drain(run, "source")
    assert refused.returncode == 2, refused.stdout
    assert "source" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert_goes_on(run)
    assert_whole(run)
