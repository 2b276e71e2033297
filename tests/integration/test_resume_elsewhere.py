"""A run that is killed goes on with another number of trainer ranks, and of rollout workers: 2, then 1, then 2."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrt.recipes.config_io import from_file
from flowrt.recipes.run_dir import checkpoint_dir, checkpoint_steps

STEPS, EVERY = 8, 2
ROUNDING = 2e-6
"""Sums over two ranks are rounded otherwise than sums over one, and so in all the steps after."""
RUN = [
    *("--trainer.engine", "fsdp", "--max-staleness", "0", "--deterministic", "True", "--data.eval-prompts", "0"),
    *("--steps", str(STEPS), "--checkpoint.every", str(EVERY), "--checkpoint.keep", "9", "--trainer.lr", "0.002"),
    *("--prompts-per-step", "4", "--group-size", "4", "--trainer.micro-batch-tokens", "100", "--rollout.workers", "1"),
]

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def apart(one: Path, other: Path) -> float:
    """The largest difference of two weights of the same place."""
    theirs = parameters(other)
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in parameters(one).items())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def shards(run_dir: Path, step: int) -> int:
    """Ranks that wrote this checkpoint."""
    return len(list(checkpoint_dir(run_dir, step).glob("shard-*.safetensors")))


def kill_after(run: Any, step: int) -> None:
    """Kill all of it when there is a checkpoint of this step."""
    run.wait_for(lambda: step in checkpoint_steps(run.run_dir), f"checkpoint {step}", 120.0)
    run.kill_all()


@pytest.fixture(scope="module")
def runs(launch: Callable[..., Any], taught_model: Path) -> tuple[Path, Path]:
    """One of a single rank that nobody touched, and one that lost everything twice."""
    whole = launch("--model", str(taught_model), *RUN)
    assert whole.wait(150.0) == 0, whole.output + whole.log("trainer")
    moving = launch("--model", str(taught_model), *RUN, "--trainer.ranks", "2")
    kill_after(moving, EVERY)
    assert max(checkpoint_steps(moving.run_dir)) < STEPS
    moving = launch("--trainer.ranks", "1", "--rollout.workers", "2", resume=moving.run_dir)
    kill_after(moving, max(checkpoint_steps(moving.run_dir)) + EVERY)
    assert max(checkpoint_steps(moving.run_dir)) < STEPS
    moving = launch("--trainer.ranks=2", resume=moving.run_dir)
    assert moving.wait(150.0) == 0, moving.output + moving.log("trainer")
    moving.assert_gone(10.0)
    return whole.run_dir, moving.run_dir


def test_weights_equal_those_of_a_run_with_constant_ranks(runs: tuple[Path, Path], taught_model: Path) -> None:
    whole, moved = (run_dir / "final" for run_dir in runs)
    assert apart(whole, moved) < ROUNDING
    assert apart(whole, taught_model) > 100 * ROUNDING


def test_nothing_is_lost_or_trained_twice(runs: tuple[Path, Path]) -> None:
    whole, moved = runs
    summary = json.loads((moved / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert [line["reward"] for line in metrics(moved)] == [line["reward"] for line in metrics(whole)]
    assert len({line["reward"] for line in metrics(whole)}) > 1


def test_every_start_had_the_configured_number_of_ranks(runs: tuple[Path, Path]) -> None:
    written = [shards(runs[1], step) for step in checkpoint_steps(runs[1])]
    assert written[0] == written[-1] == 2
    assert 1 in written


def test_resumed_run_keeps_the_latest_settings(runs: tuple[Path, Path]) -> None:
    config = from_file(runs[1] / "config.toml")
    assert (config.trainer.ranks, config.rollout.workers, config.seed) == (2, 2, 0)
