"""Runs with a hung, stopped or missing process: they end in time, report the wait graph, and leave no process."""

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.config_io import defaults, to_toml

FLOWRT = Path(sys.executable).with_name("flowrt")

SMALL = [
    *("--steps", "100000", "--data.eval-prompts", "0", "--prompts-per-step", "4", "--group-size", "4"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0"),
]
STALL_S = 8
STARTED_S = 12
"""Longest time until the first worker joins, and until the next one does."""
WITHIN_S = 25.0


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FLOWRT), "status", "--deadline-s", "120", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "200"},
    )


class IncompleteRun:
    """A controller and a source, started by hand, without the other workers."""

    def __init__(self, model: Path, directory: Path) -> None:
        base = defaults("arithmetic")
        self.run_dir = directory / "run"
        config = dataclasses.replace(
            base,
            run_dir=str(self.run_dir),
            model=str(model),
            prompts_per_step=4,
            data=dataclasses.replace(base.data, eval_prompts=0),
            controller=dataclasses.replace(base.controller, no_progress_timeout_s=STALL_S, connect_timeout_s=STALL_S),
        )
        toml = directory / "config.toml"
        toml.write_text(to_toml(config))
        self._log = directory / "controller.log"
        self.controller = self._start(self._log, "flowrt.launcher.controller_main", "--config", str(toml))
        self.wait_for(lambda: (self.run_dir / "address").is_file())
        address = (self.run_dir / "address").read_text().strip()
        self.source = self._start(
            directory / "source.log", "flowrt.roles.source", "--controller", address, "--name", "source"
        )

    @staticmethod
    def _start(log: Path, *module: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen([sys.executable, "-m", *module], stdout=output, stderr=output)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + 300.0
        while not condition():
            assert self.controller.poll() is None, self.log
            assert time.monotonic() < end_s, self.log
            time.sleep(0.05)

    def close(self) -> None:
        for process in (self.controller, self.source):
            process.kill()
            process.wait(60.0)


@pytest.fixture(scope="module")
def incomplete_run(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IncompleteRun]:
    run = IncompleteRun(untrained_model, tmp_path_factory.mktemp("incomplete"))
    yield run
    run.close()


@pytest.mark.slow
def test_status_names_waiting_workers_and_the_deadlock(incomplete_run: IncompleteRun) -> None:
    """Workers never start (all devices idle, no error, no log): the status names what is missing."""
    address = incomplete_run.run_dir / "address"
    assert stat.S_IMODE(address.stat().st_mode) == 0o600

    def waits() -> Any:
        result = status("--controller", address.read_text().strip(), "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["graph"]["waits"]

    incomplete_run.wait_for(waits)
    [first, *_] = waits()
    assert (first["who"], first["unsatisfiable"]) == ("source", True)
    table = status(str(incomplete_run.run_dir))
    assert table.returncode == 0, table.stderr
    text = " ".join(table.stdout.split())
    assert "source waits for admission: 8 groups live" in text
    assert "no worker can satisfy this" in text


@pytest.mark.slow
def test_a_run_with_missing_workers_ends_with_its_wait_graph_and_code_3(incomplete_run: IncompleteRun) -> None:
    """A run without progress ends after no_progress_timeout_s instead of being monitored for hours."""
    assert incomplete_run.controller.wait(STALL_S + 300.0) == 3, incomplete_run.log
    assert incomplete_run.source.wait(300.0) == 0
    assert f"no worker of these roles has joined within {STALL_S} s: rollout, " in incomplete_run.log
    assert "stalled: source waits" in incomplete_run.log
    assert "no worker can satisfy this" in incomplete_run.log
    assert "Traceback" not in incomplete_run.log
    # A later status command reports how the run ended.
    after = status(str(incomplete_run.run_dir))
    assert after.returncode == 1
    assert "has ended with exit code 3: no worker of these roles has joined" in after.stderr
    assert "Traceback" not in after.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_stopped_worker_is_detected_and_replaced(launch: Callable[..., Any], untrained_model: Path) -> None:
    """A stopped process is detected by its missing answers, killed and replaced."""
    run = launch("--model", str(untrained_model), "--supervisor.hung-process-timeout-s", "1.0", *SMALL)
    run.wait_for_training()
    [rollout] = run.find("flowrt.roles.rollout")
    run.signal(signal.SIGSTOP, rollout)
    run.wait_for(lambda: "does not answer although its host does" in run.log("controller"), "notice")
    run.wait_for(lambda: "rollout-0 left the run, but its process is alive: killing it" in run.words, "its end")
    run.wait_for(lambda: run.log("controller").count(" rollout-0 joined") == 2, "its replacement")
    steps = len((run.run_dir / "metrics.jsonl").read_text().splitlines())
    run.wait_for(lambda: len((run.run_dir / "metrics.jsonl").read_text().splitlines()) > steps + 2, "more steps")
    run.signal(signal.SIGINT)
    assert run.wait(WITHIN_S) == 130
    run.assert_gone(WITHIN_S)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_with_a_stopped_worker_ends_with_its_wait_graph_and_code_3(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    """The only rollout worker is stopped and not replaced: the command reports the wait graph."""
    stall = ("--controller.no-progress-timeout-s", str(STARTED_S))
    timeouts = ("--supervisor.hung-process-timeout-s", "1000", "--supervisor.role-vacancy-timeout-s", "1000", *stall)
    run = launch("--model", str(untrained_model), *timeouts, *SMALL)
    run.wait_for_training()
    [rollout] = run.find("flowrt.roles.rollout")
    run.signal(signal.SIGSTOP, rollout)
    assert run.wait(STARTED_S + WITHIN_S) == 3, run.output
    run.assert_gone(STARTED_S + WITHIN_S)
    [reason] = [line for line in run.output.splitlines() if line.startswith("flowrt: ")]
    assert f"no progress for {STARTED_S} s: " in reason
    assert "reward waits " in reason
    assert "for slots ready for reward" in reason
    assert "no worker can satisfy this" in reason
    assert json.loads((run.run_dir / "summary.json").read_text())["exit_code"] == 3
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_hung_model_preparation_ends_the_run(launch: Callable[..., Any]) -> None:
    run = launch("--sft.steps", "100000", "--sft.stop-reward", "2", "--supervisor.role-vacancy-timeout-s", "3")
    run.wait_for(lambda: run.find("flowrt.launcher.build_model"), "preparation")
    [prepare] = run.find("flowrt.launcher.build_model")
    run.signal(signal.SIGSTOP, prepare)
    assert run.wait(30.0) == 3
    assert "build_model has used no CPU time for 3 s: it is stopped, or waits for a disk" in run.words
    run.assert_gone(40.0)


@pytest.mark.long
@pytest.mark.slow
def test_worker_that_never_joins_is_replaced(launch: Callable[..., Any], untrained_model: Path) -> None:
    """The worker is stopped before its hello, so that the controller does not know it."""
    join_flags = (
        "--launch.use-fork-server",
        "False",
        "--controller.connect-timeout-s",
        "20",
        "--supervisor.hung-process-timeout-s",
        "1",
    )
    run = launch("--model", str(untrained_model), "--steps", "3", "--data.eval-prompts", "0", *join_flags)
    run.wait_for(lambda: run.find("flowrt.roles.reward"), "reward worker")
    [reward] = run.find("flowrt.roles.reward")
    run.signal(signal.SIGSTOP, reward)
    assert run.wait(120.0) == 0, run.output
    assert "reward never joined the run, but its process is alive: killing it" in run.words
