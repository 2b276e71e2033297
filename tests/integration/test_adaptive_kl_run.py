"""A run with an adaptive KL coefficient: on two ranks, and across a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.algorithms.losses import AdaptiveKl

COEF, TARGET, HORIZON, PROMPTS, SIZE = 0.01, 0.001, 64, 4, 4


@pytest.mark.long
@pytest.mark.slow
def test_kl_coefficient_follows_the_kl_on_two_ranks_and_across_a_resume(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch(
        *("--model", str(untrained_model), "--prompts-per-step", str(PROMPTS), "--group-size", str(SIZE)),
        *("--data.eval-prompts", "0", "--rollout.workers", "1", "--trainer.save", "False", "--steps", "4"),
        *("--trainer.lr", "0.002", "--trainer.ranks", "2", "--max-run-restarts", "0"),
        *("--algorithm.kl.coef", str(COEF), "--algorithm.kl.target", str(TARGET)),
        *("--algorithm.kl.horizon", str(HORIZON)),
    )
    assert run.wait(180.0) == 0, run.output
    resumed = launch("--steps", "8", resume=run.run_dir)
    assert resumed.wait(180.0) == 0, resumed.output
    metrics = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(8))
    adaptive, coef = AdaptiveKl(TARGET, HORIZON), COEF
    for line in metrics:
        assert line["kl_coef"] == pytest.approx(coef, rel=1e-4), line["step"]
        coef = adaptive.next_coef(coef, line["kl"], PROMPTS * SIZE)
    assert len({line["kl_coef"] for line in metrics}) > 4
