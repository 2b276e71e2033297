"""A killed run resumes with other numbers of trainer ranks (2, then 1, then 2) and of rollout workers."""

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
"""Sums over two ranks are rounded differently from sums over one, which affects all later steps."""
RUN = [
    *("--trainer.engine", "fsdp", "--max-staleness", "0", "--deterministic", "True", "--data.eval-prompts", "0"),
    *("--steps", str(STEPS), "--checkpoint.every", str(EVERY), "--checkpoint.keep", "9", "--trainer.lr", "0.002"),
    *("--prompts-per-step", "4", "--group-size", "4", "--trainer.micro-batch-tokens", "100", "--rollout.workers", "1"),
]

pytestmark = [pytest.mark.long]


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def max_difference(first: Path, second: Path) -> float:
    """The largest absolute difference of two corresponding weights."""
    others = parameters(second)
    return max(float((tensor - others[name]).abs().max()) for name, tensor in parameters(first).items())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def shards(run_dir: Path, step: int) -> int:
    """Number of ranks that wrote this checkpoint."""
    return len(list(checkpoint_dir(run_dir, step).glob("shard-*.safetensors")))


def kill_after(run: Any, step: int) -> None:
    """Kill the run once it has a checkpoint of this step."""
    run.wait_for(lambda: step in checkpoint_steps(run.run_dir), f"checkpoint {step}", 120.0)
    run.kill_all()


@pytest.fixture(scope="module")
def runs(launch: Callable[..., Any], sft_model: Path) -> tuple[Path, Path]:
    """An uninterrupted run of one rank, and a run that was killed and resumed twice."""
    uninterrupted = launch("--model", str(sft_model), *RUN)
    assert uninterrupted.wait(150.0) == 0, uninterrupted.output + uninterrupted.log("trainer")
    resumed = launch("--model", str(sft_model), *RUN, "--trainer.ranks", "2")
    kill_after(resumed, EVERY)
    assert max(checkpoint_steps(resumed.run_dir)) < STEPS
    resumed = launch("--trainer.ranks", "1", "--rollout.workers", "2", resume=resumed.run_dir)
    kill_after(resumed, max(checkpoint_steps(resumed.run_dir)) + EVERY)
    assert max(checkpoint_steps(resumed.run_dir)) < STEPS
    resumed = launch("--trainer.ranks=2", resume=resumed.run_dir)
    assert resumed.wait(150.0) == 0, resumed.output + resumed.log("trainer")
    resumed.assert_gone(10.0)
    return uninterrupted.run_dir, resumed.run_dir


def test_weights_equal_those_of_a_run_with_constant_ranks(runs: tuple[Path, Path], sft_model: Path) -> None:
    uninterrupted, resumed = (run_dir / "final" for run_dir in runs)
    assert max_difference(uninterrupted, resumed) < ROUNDING
    assert max_difference(uninterrupted, sft_model) > 100 * ROUNDING


def test_no_prompt_is_lost_or_trained_twice(runs: tuple[Path, Path]) -> None:
    uninterrupted, resumed = runs
    summary = json.loads((resumed / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert [line["reward"] for line in metrics(resumed)] == [line["reward"] for line in metrics(uninterrupted)]
    assert len({line["reward"] for line in metrics(uninterrupted)}) > 1


def test_every_attempt_had_the_configured_number_of_ranks(runs: tuple[Path, Path]) -> None:
    written = [shards(runs[1], step) for step in checkpoint_steps(runs[1])]
    assert written[0] == written[-1] == 2
    assert 1 in written


def test_resumed_run_keeps_the_latest_settings(runs: tuple[Path, Path]) -> None:
    config = from_file(runs[1] / "config.toml")
    assert (config.trainer.ranks, config.rollout.workers, config.seed) == (2, 2, 0)
