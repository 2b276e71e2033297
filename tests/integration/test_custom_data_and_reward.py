"""Recipe custom, and weight sync by divergence: real runs of a tiny model from a data file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.timeline_file import read_timeline

ROWS, STEPS = 48, 12
REWARD = """
def more_sevens(response, answer):
    return response.count(answer) / 8
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path: Path, untrained_model: Path) -> list[str]:
    data, reward = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(ROWS)))
    reward.write_text(REWARD)
    return [
        *("--recipe", "custom", "--data", str(data), "--model", str(untrained_model), "--data.eval-prompts", "0"),
        *("--prompts-per-step", "4", "--group-size", "4", "--rollout.max-new-tokens", "8", "--algorithm.kl.coef", "0"),
        *("--rollout.workers", "1", "--trainer.lr", "1e-3", "--trainer.warmup-steps", "1"),
        *("--reward", f"{reward}:more_sevens", "--checkpoint.every", "0", "--steps", str(STEPS)),
    ]


def test_training_uses_the_given_reward_function(launch: Callable[..., Any], flags: list[str]) -> None:
    launched = launch(*flags, "--steps", "30")
    assert launched.wait(120.0) == 0, launched.output
    rewards = [line["reward"] for line in lines(launched)]
    assert max(rewards[-5:]) > rewards[0] + 0.2  # truncated responses are scored, too
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0


def test_overridden_positions_reach_every_worker_and_the_exported_model(
    launch: Callable[..., Any], flags: list[str], untrained_model: Path, tmp_path: Path
) -> None:
    """Responses are longer than the positions of the model's own config.json."""
    table = json.loads((untrained_model / "config.json").read_text())
    short = Path(shutil.copytree(untrained_model, tmp_path / "short"))
    (short / "config.json").write_text(json.dumps({**table, "max_position_embeddings": 16}))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    launched = launch(
        *(*flags, "--model", str(short), "--rollout.max-new-tokens", "32", "--steps", "2"),
        *("--algorithm.kl.coef", "0.01", "--model-overrides", json.dumps({"rope_scaling": yarn})),
    )
    assert launched.wait(120.0) == 0, launched.output
    exported = json.loads((launched.run_dir / "final" / "config.json").read_text())
    assert yarn.items() <= exported["rope_parameters"].items()
    first = lines(launched)[0]
    assert first["response_length"] > 16
    assert abs(first["mismatch_kl_k3"]) < 1e-5, "rollout and trainer compute different positions"
    assert abs(first["kl"]) < 1e-5, "the reference computes other positions"


@pytest.mark.long
@pytest.mark.parametrize(("threshold", "frequent"), [(0.0, True), (1e9, False)])
def test_weights_are_fetched_when_the_policy_has_diverged(
    launch: Callable[..., Any], flags: list[str], threshold: float, frequent: bool
) -> None:
    """At staleness bound 4, a worker can generate for five steps without an update of its weights.

    Generation must be slower than training: otherwise admission makes the worker fetch, whatever the policy.
    """
    slow = ["--rollout.max-running-requests", "4", "--rollout.max-new-tokens", "24"]
    policy = [
        *slow,
        "--max-staleness",
        "4",
        "--rollout.weight-sync.type",
        "divergence",
        "--rollout.weight-sync.max-age",
        "100",
    ]
    launched = launch(*flags, *policy, "--rollout.weight-sync.threshold", str(threshold))
    assert launched.wait(120.0) == 0, launched.output
    swaps = sum(span.get("kind") == "swap" for span in read_timeline(launched.run_dir))
    assert len(lines(launched)) == STEPS
    assert any(f"divergence_{age}" in line for line in lines(launched) for age in range(1, 5))
    assert swaps >= STEPS // 2 if frequent else swaps <= STEPS // 4 + 1, swaps


def lines(launched: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]
