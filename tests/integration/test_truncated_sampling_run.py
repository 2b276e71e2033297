"""A run with top-p, also with top-k and a stop string: in flight, at staleness 0, on both training engines."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

STEPS = 3
SMALL = [
    *("--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "8"),
    *("--sft.steps", "20", "--sft.answer-only-steps", "0", "--rollout.workers", "1", "--trainer.warmup-steps", "1"),
    *("--rollout.top-p", "0.9", "--rollout.temperature", "0.7", "--max-staleness", "0"),
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [
        ["--rollout.top-k", "10", "--rollout.weight-update", "in_flight", "--rollout.stop", "="],
        ["--trainer.engine", "fsdp", "--trainer.tokens-per-step", "60"],
    ],
)
def test_truncated_sampling_at_staleness_0_has_policy_ratios_of_one(
    launch: Callable[..., Any], flags: list[str]
) -> None:
    run = launch(*SMALL, *flags)
    assert run.wait(200.0) == 0, run.output + run.log("trainer") + run.log("rollout-0")
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    for line in lines:
        assert abs(line["mismatch_kl_k1"]) < 1e-5
        assert line["mismatch_kl_k3"] < 1e-9
        assert line["invalid_samples"] == 0
        assert 1 < line["support_size"] <= 10
        assert 0 <= line["truncated"] <= 1
        assert all(math.isfinite(value) for value in line.values())
    assert any(line["grad_norm"] > 0 for line in lines)
