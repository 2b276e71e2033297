"""A run with several ranks leaves no temporary file, even if its torchrun agent or its launcher is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.long
TWO_RANKS = [
    *("--trainer.ranks", "2", "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "2"),
]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the processes that a test starts."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # kept across runs by design
    return directory


def agent_of(run: Any) -> psutil.Process:
    """The torchrun agent of the trainer's ranks."""
    [agent] = run.find("flowrt.ranks.torchrun")
    return agent


def test_no_temporary_files_remain_after_the_agent_was_killed(
    launch: Callable[..., Any], untrained_model: Path, temporary: Path
) -> None:
    run = launch("--model", str(untrained_model), *TWO_RANKS, "--steps", "12")
    run.wait_for(lambda: list((run.run_dir / "checkpoints").glob("step-*")), "a checkpoint")
    agent = agent_of(run)
    run.signal(signal.SIGKILL, agent)
    run.wait_for(
        lambda: any(process.pid != agent.pid for process in run.find("flowrt.ranks.torchrun")), "another agent"
    )
    assert run.wait(180.0) == 0, run.output
    run.assert_gone(10.0)
    assert os.listdir(temporary) == []
    assert not (run.run_dir / "ranks").exists()


def test_resume_removes_files_of_a_killed_launcher(
    launch: Callable[..., Any], untrained_model: Path, temporary: Path
) -> None:
    run = launch("--model", str(untrained_model), *TWO_RANKS, "--steps", "12")
    run.wait_for(lambda: list((run.run_dir / "checkpoints").glob("step-*")), "a checkpoint")
    run.signal(signal.SIGKILL)
    run.assert_gone(10.0)
    assert os.listdir(temporary) == []
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(180.0) == 0, resumed.output
    resumed.assert_gone(10.0)
    assert os.listdir(temporary) == []
    assert not (run.run_dir / "ranks").exists()
