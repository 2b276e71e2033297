"""Runs in which somebody hangs or is stopped for good: they end soon, say who waited for whom, and leave nothing."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLOWRT = Path(sys.executable).with_name("flowrt")

SMALL = [
    *("--steps", "100000", "--data.eval-prompts", "0", "--prompts-per-step", "4", "--group-size", "4"),
    *("--rollout.workers", "1", "--loss.kl-coef", "0"),
]
STALL_S = 12
NOTICED_S = 5.0
WITHIN_S = 10.0


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FLOWRT), "status", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.fixture(scope="module")
def hung(launch: Callable[..., Any], untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose engines hang while they load: their weights are a pipe into which nobody writes."""
    model = Path(shutil.copytree(untrained_model, tmp_path_factory.mktemp("hung") / "model"))
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    run = launch("--model", str(model), *SMALL, "--controller.stall-s", str(STALL_S))
    run.wait_for(lambda: "offers" in said_of(run) or len(waits_of(run)) >= 1, "a parked offer")
    return run


def said_of(run: Any) -> str:
    return run.log("controller")


def waits_of(run: Any) -> list[dict[str, object]]:
    if not (run.run_dir / "address").is_file():
        return []
    looked = status(str(run.run_dir), "--json", "--deadline-s", "2")
    return json.loads(looked.stdout)["graph"]["waits"] if looked.returncode == 0 else []


@pytest.mark.slow
def test_status_of_a_stuck_run_names_who_waits_and_that_nobody_acts(hung: Any) -> None:
    """Engines that never come up (all devices idle, no error, no log): the status says what is missing."""
    address = hung.run_dir / "address"
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    table = status(str(hung.run_dir))
    assert table.returncode == 0, table.stderr
    words = " ".join(table.stdout.split())
    assert "source waits for admission" in words
    assert "nobody is there to act" in words
    for worker in ("source", "reward", "rollout-0", "trainer"):
        assert worker in words
    by_address = status("--controller", address.read_text().strip(), "--json")
    graph = json.loads(by_address.stdout)["graph"]
    assert {row[0] for row in graph["workers"]} >= {"source", "rollout-0", "trainer-0"}
    assert graph["waits"][0]["who"] == "source"
    assert graph["waits"][0]["nobody"]


@pytest.mark.slow
def test_a_stalled_run_ends_with_its_graph_and_code_3(hung: Any) -> None:
    """The monitor goes on, nothing progresses, for hours: here the run ends when nothing has happened for stall_s."""
    assert hung.wait(STALL_S + 60.0) == 3, hung.output
    hung.assert_gone(WITHIN_S)
    assert f"no progress for {STALL_S}" in hung.words
    assert "source waits" in hung.words
    assert "nobody is there to act" in hung.words
    assert "stalled: source waits" in said_of(hung)
    assert "Traceback" not in hung.output + said_of(hung)
    # Whoever asks afterwards is told how it ended.
    after = status(str(hung.run_dir))
    assert after.returncode == 1
    assert "has ended with exit code 3" in after.stderr
    assert "no progress" in after.stderr
    assert "Traceback" not in after.stderr


@pytest.mark.slow
def test_a_stopped_worker_is_noticed_in_5_s_and_an_interrupt_does_not_wait_for_it(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    """A process that is stopped for good holds nobody up: it is noticed by its silence, whatever it holds."""
    run = launch("--model", str(untrained_model), *SMALL)
    run.wait_for_training()
    [rollout] = run.find("flowrt.workers.rollout")
    run.signal(signal.SIGSTOP, rollout)
    stopped_s = time.monotonic()
    run.wait_for(lambda: "the run ends" in said_of(run), "end")
    assert time.monotonic() - stopped_s < NOTICED_S + 0.5
    assert run.wait(WITHIN_S) == 1
    run.assert_gone(WITHIN_S)
    assert "rollout-0: its connection is closed" in run.words
