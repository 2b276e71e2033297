"""Additional workers join a running job and leave it on request; a worker declared lost is notified."""

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
    """A run with one rollout worker and enough steps for hours."""
    run = launch("--model", str(untrained_model), *ENDLESS)
    run.wait_for_training()
    return run


@pytest.fixture
def start(run: Any, tmp_path: Path) -> Iterator[Start]:
    """Starts an additional rollout worker by name, as a user with spare nodes would."""
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
    """The workers that have generated samples, by the timeline."""
    return {span["worker"] for span in read_timeline(run.run_dir) if span.get("kind") == "generate"}


def steps(run: Any) -> int:
    return len((run.run_dir / "metrics.jsonl").read_text().splitlines())


def assert_training_continues(run: Any) -> None:
    done = steps(run)
    run.wait_for(lambda: steps(run) > done + 2, "more steps")


def drain(run: Any, worker: str) -> subprocess.CompletedProcess[str]:
    command = [str(FLOWRT), "drain", worker, "--run", str(run.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def stop_and_assert_nothing_lost(run: Any) -> None:
    """Interrupt the run; every prompt that was offered is accounted for."""
    run.signal(signal.SIGINT)
    assert run.wait(WITHIN_S) == 130, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    assert not summary["dropped"], "samples of a worker that left were lost"


@pytest.mark.long
def test_additional_worker_joins_takes_work_and_leaves(run: Any, start: Start) -> None:
    extra = start("extra")
    drained = drain(run, "rollout-0")
    assert (drained.returncode, drained.stdout.strip()) == (0, "rollout-0 has left the run"), drained.stderr
    run.wait_for(lambda: not run.find("flowrt.roles.rollout"), "end of the drained worker")
    assert_training_continues(run)
    other = start("other")
    extra.send_signal(signal.SIGTERM)  # as a cluster that reclaims its node
    assert extra.wait(WITHIN_S) == 0
    assert_training_continues(run)
    assert other.poll() is None
    assert "restarting in" not in run.words, "a drained worker is not replaced"
    stop_and_assert_nothing_lost(run)
    assert other.wait(WITHIN_S) == 0


@pytest.mark.long
def test_worker_declared_lost_receives_the_reason_when_it_continues(run: Any, start: Start, tmp_path: Path) -> None:
    """Its exit code reports to the process that started it that it is no longer part of the run."""
    extra = start("extra")
    extra.send_signal(signal.SIGSTOP)
    run.wait_for(lambda: "does not answer although its host does" in run.log("controller"), "notice")
    assert_training_continues(run)
    extra.send_signal(signal.SIGCONT)
    assert extra.wait(WITHIN_S) == EXIT_DISMISSED
    assert "Traceback" not in (tmp_path / "extra.log").read_text()
    stop_and_assert_nothing_lost(run)


def test_source_cannot_be_drained(run: Any) -> None:
    """The prompts that a source has read exist nowhere else."""
    refused = drain(run, "source")
    assert refused.returncode == 2, refused.stdout
    assert "source" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert_training_continues(run)
    stop_and_assert_nothing_lost(run)
