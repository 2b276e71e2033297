"""A refreshed reference with two FSDP ranks, which write it together, and with samples of several versions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long
REFRESH_EVERY = 2
SMALL = [
    *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--trainer.save", "False", "--trainer.lr", "0.002", "--trainer.warmup-steps", "1"),
    *("--reference.refresh", str(REFRESH_EVERY), "--rollout.max-new-tokens", "8"),
]
ROUNDING = 1e-6
"""Rounding error of float32 in the KL divergence of a policy from its copy."""


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def newest_refresh(version: int) -> int:
    return max(version, 0) // REFRESH_EVERY * REFRESH_EVERY


def test_two_fsdp_ranks_write_one_reference(launch: Callable[..., Any], sft_model: Path) -> None:
    """At staleness bound 0 the reference equals the sampling policy in the step after a refresh."""
    steps = 6
    run = launch(
        *("--model", str(sft_model), *SMALL, "--steps", str(steps), "--max-staleness", "0"),
        *("--trainer.engine", "fsdp", "--trainer.ranks", "2", "--trainer.micro-batch-tokens", "100"),
    )
    assert run.wait(180.0) == 0, run.output + run.log("trainer")
    metrics = lines(run.run_dir)
    assert [line["reference_version"] for line in metrics] == [newest_refresh(step) for step in range(steps)]
    assert max(line["kl"] for line in metrics[::REFRESH_EVERY]) < ROUNDING
    assert min(line["kl"] for line in metrics[1::REFRESH_EVERY]) > 10 * ROUNDING
    run.assert_gone(10.0)


def test_stale_samples_are_scored_by_the_refresh_of_their_own_version(
    launch: Callable[..., Any], sft_model: Path
) -> None:
    """At staleness bound 2 a step has samples of up to three versions; the run is killed and resumed."""
    steps, bound = 12, 2
    run = launch(
        *("--model", str(sft_model), *SMALL, "--steps", str(steps), "--max-staleness", str(bound)),
        *("--checkpoint.every", "3"),
    )
    run.wait_for(lambda: len(lines(run.run_dir)) >= 7, "seventh step")
    run.kill_all()
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(180.0) == 0, resumed.output
    metrics = lines(run.run_dir)
    assert [line["step"] for line in metrics] == list(range(steps))
    assert max(line["staleness_max"] for line in metrics) > 0
    for line in metrics:
        oldest, newest = line["step"] - line["staleness_max"], line["step"]
        assert newest_refresh(oldest) <= line["reference_version"] <= newest_refresh(newest)
    assert metrics[-1]["reference_version"] >= newest_refresh(steps - 1 - bound) > 0
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
