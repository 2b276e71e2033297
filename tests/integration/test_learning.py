"""The default job learns, and training is what raises the reward."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrt.controller.storage.timeline_file import read_timeline

pytestmark = pytest.mark.long
COMMAND = [sys.executable, "-m", "flowrt.cli", "run", "--seed", "0"]


def run(run_dir: Path, *settings: str) -> dict[str, Any]:
    result = subprocess.run(
        [*COMMAND, "--run-dir", str(run_dir), *settings], capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def weights(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.slow
def test_the_default_job_learns(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "--steps", "110")
    assert summary["reward_first"] <= 0.4
    assert summary["reward_last"] >= 0.8
    assert summary["eval_first"] <= 0.5
    assert summary["eval_last"] >= 0.8
    assert summary["staleness_max"] <= summary["staleness_bound"] == 1
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0


@pytest.mark.slow
def test_the_default_job_learns_with_two_trainer_ranks(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "--steps", "70", "--trainer.ranks", "2")
    assert summary["reward_first"] <= 0.4
    assert summary["reward_last"] >= 0.7
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    trainers = {line["worker"] for line in read_timeline(tmp_path / "run") if line.get("kind") == "train"}
    assert trainers == {"trainer-0", "trainer-1"}  # both ranks had work


@pytest.mark.slow
def test_the_reward_does_not_change_with_learning_rate_zero(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "--steps", "30", "--trainer.lr", "0")
    assert abs(summary["reward_last"] - summary["reward_first"]) < 0.1
    assert summary["eval_last"] == summary["eval_first"]
    assert torch.equal(weights(tmp_path / "run" / "final"), weights(tmp_path / "run" / "model"))
