"""Runs of a task file: bit-identical to the built-in task, resumed, evaluated, and read without the file."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrt.recipes.tasks import arithmetic

FLOWRT = Path(sys.executable).with_name("flowrt")
WITHIN_S = 120.0
SMALL = [
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "8"),
    *("--sft.steps", "5", "--sft.answer-only-steps", "0", "--sft.eval-prompts", "8"),
    *("--build.layers", "1", "--build.hidden-size", "32"),
    *("--rollout.workers", "1", "--trainer.warmup-steps", "1", "--checkpoint.every", "1"),
]
SYNCHRONOUS = ["--max-staleness", "0", "--deterministic", "True"]


def weights(run: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run.run_dir / "final" / "model.safetensors")
    return tensors


def rewards(run: Any) -> list[float]:
    return [line["reward"] for line in read_metrics(run) if "loss" in line]


def read_metrics(run: Any) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def stdout_of(directory: Path, *arguments: str) -> str:
    """The output of a flowrt command that runs in this directory."""
    ended = subprocess.run(
        [str(FLOWRT), *arguments], cwd=directory, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_copy_of_a_built_in_task_gives_a_bit_identical_run(launch: Callable[..., Any], tmp_path: Path) -> None:
    copy = tmp_path / "mine.py"
    shutil.copy(str(arithmetic.__file__), copy)
    runs = []
    for recipe in (str(copy), "arithmetic"):
        runs.append(launch("--recipe", recipe, *SMALL, *SYNCHRONOUS))
        assert runs[-1].wait(WITHIN_S) == 0, runs[-1].output
    own, built_in = runs
    own_weights, expected_weights = weights(own), weights(built_in)
    assert own_weights.keys() == expected_weights.keys()
    assert all(torch.equal(own_weights[name], expected_weights[name]) for name in expected_weights)
    assert rewards(own) == rewards(built_in)
    start = load_file(own.run_dir / "model" / "model.safetensors")
    assert not all(torch.equal(own_weights[name], start[name]) for name in expected_weights), "the weights were trained"


@pytest.mark.slow
def test_reward_errors_and_timeouts_of_a_task_file_are_counted(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    text = Path(str(arithmetic.__file__)).read_text()
    original = 'return float(response.rsplit(",", 1)[-1] == answer)'
    assert original in text
    is_run = "'rewards.reaper' in str(sys.modules['__main__'].__spec__)"
    fault = f"import sys, time\n        if {is_run}: time.sleep(60 * (int(answer) % 2)); 1 / 0"
    file.write_text(text.replace(original, f"{fault}\n        {original}"))
    sizes = ["--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--data.eval-prompts", "0"]
    flags = ["--model", str(untrained_model), "--rollout.workers", "1", "--reward.timeout-s", "2"]
    run = launch("--recipe", str(file), *sizes, *flags, "--reward.workers", "2")
    assert run.wait(WITHIN_S) == 0, run.output
    line = next(metric for metric in read_metrics(run) if "loss" in metric)
    assert line["reward_failures/error"] + line["reward_failures/timeout"] == 1.0
    assert (line["reward"], line["reward/task"]) == (0.0, 0.0)
    assert f"reward of task RECIPE ({file}:" in run.log("reward"), run.log("reward")


@pytest.mark.long
@pytest.mark.slow
def test_a_task_file_run_resumes_with_the_same_file_and_is_readable_without_it(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    copy = tmp_path / "mine.py"
    shutil.copy(str(arithmetic.__file__), copy)
    run = launch("--recipe", str(copy), *SMALL)
    assert run.wait(WITHIN_S) == 0, run.output
    assert "avg@1" in stdout_of(tmp_path, "eval", str(run.run_dir))
    copy.write_text(copy.read_text() + "\n# another file\n")
    refused = launch("--steps", "3", resume=run.run_dir)
    assert refused.wait(WITHIN_S) == 2, refused.output
    assert f"task file {copy} has changed since the run began" in refused.words
    digest = refused.output.split()[-1]
    evaluated = stdout_of(tmp_path, "eval", str(run.run_dir))
    assert f"task file {copy} has changed since the run began" in " ".join(evaluated.split())
    assert "avg@1" in evaluated
    resumed = launch("--steps", "3", "--recipe-sha256", digest, resume=run.run_dir)
    assert resumed.wait(WITHIN_S) == 0, resumed.output
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == 3
    copy.unlink()
    for command in (["samples"], ["replay"], ["ledger"], ["time"]):
        assert stdout_of(tmp_path, *command, str(run.run_dir))
    without_file = launch("--steps", "4", resume=run.run_dir)
    assert without_file.wait(WITHIN_S) == 2
    assert f"there is no task file {copy}" in without_file.words
