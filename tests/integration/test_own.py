"""Your own prompts and reward, and refresh by divergence: real runs of a tiny model from a data file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROWS, STEPS = 48, 12
REWARD = """
def more_sevens(response, answer):
    return response.count(answer) / 8

def broken(response, answer):
    raise KeyError("no such thing")
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path: Path, untrained_model: Path) -> list[str]:
    data, reward = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(ROWS)))
    reward.write_text(REWARD)
    return [
        *("--recipe", "own", "--data", str(data), "--model", str(untrained_model), "--data.eval-prompts", "0"),
        *("--prompts-per-step", "4", "--group-size", "4", "--rollout.max-new-tokens", "8", "--loss.kl-coef", "0"),
        *("--rollout.workers", "1", "--trainer.lr", "1e-3", "--trainer.warmup-steps", "1"),
        *("--data.reward", f"{reward}:more_sevens", "--checkpoint.every", "0", "--steps", str(STEPS)),
    ]


def test_the_reward_is_the_function_that_was_named(launch: Callable[..., Any], flags: list[str]) -> None:
    launched = launch(*flags, "--steps", "30")
    assert launched.wait(120.0) == 0, launched.output
    rewards = [line["reward"] for line in lines(launched)]
    assert max(rewards[-5:]) > rewards[0] + 0.2  # responses that are cut off count as they are
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0


def test_a_reward_that_fails_ends_the_run_with_its_own_words(launch: Callable[..., Any], flags: list[str]) -> None:
    broken = [flag.replace("more_sevens", "broken") for flag in flags]
    launched = launch(*broken, "--supervisor.restarts", "2", "--supervisor.backoff-s", "0.1")
    assert launched.wait(120.0) not in (0, 3), launched.output
    assert launched.words.count("it is started again in") == 2
    last_words = launched.words.rpartition("it is started again in")[2]
    assert "broken failed on" in last_words
    assert "no such thing" in last_words
    assert "Traceback" not in launched.output


@pytest.mark.long
@pytest.mark.parametrize(("threshold", "often"), [(0.0, True), (1e9, False)])
def test_weights_are_taken_when_the_policy_has_moved(
    launch: Callable[..., Any], flags: list[str], threshold: float, often: bool
) -> None:
    """With a bound of 4, whoever is not told to fetch goes on for five steps with what it has.

    Generation is the slower part: else it runs ahead, and admission has it fetch whatever the policy says.
    """
    slow = ["--rollout.rows", "4", "--rollout.max-new-tokens", "24"]
    policy = [*slow, "--staleness", "4", "--rollout.refresh.policy", "divergence", "--rollout.refresh.max-age", "100"]
    launched = launch(*flags, *policy, "--rollout.refresh.threshold", str(threshold))
    assert launched.wait(120.0) == 0, launched.output
    timeline = (launched.run_dir / "timeline.jsonl").read_text().splitlines()
    swaps = sum(span["kind"] == "swap" for span in map(json.loads, timeline))
    assert len(lines(launched)) == STEPS
    assert any(f"divergence_{age}" in line for line in lines(launched) for age in range(1, 5))
    assert swaps >= STEPS // 2 if often else swaps <= STEPS // 4 + 1, swaps


def lines(launched: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]
