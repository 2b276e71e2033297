"""The default recipe with a group filter and a curriculum: controller crash, resume and rejected options."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse

PROMPTS, STEPS, TRIES = 4, 12, 6
SMALL = [
    *("--prompts-per-step", str(PROMPTS), "--group-size", "4", "--steps", str(STEPS), "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--checkpoint.every", "3", "--supervisor.backoff-s", "0.1"),
    *("--algorithm.filter.zero-variance", "True", "--algorithm.filter.tries", str(TRIES)),
]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_steps(run: Any, steps: int) -> None:
    run.wait_for(lambda: (run.run_dir / "metrics.jsonl").is_file() and len(lines(run.run_dir)) >= steps, "steps")


def assert_filtered(run_dir: Path) -> None:
    """Each step trained all groups, none with equal rewards while tries were left; ledger and metrics agree."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    metrics = lines(run_dir)
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert {line["groups"] for line in metrics} == {PROMPTS}
    assert all(line["filtered_groups"] <= TRIES for line in metrics)
    assert all(line["zero_variance_groups"] == line["refused_groups_trained"] for line in metrics)
    assert all(not line["zero_variance_groups"] or line["filtered_groups"] == TRIES for line in metrics)
    assert sum(line["filtered_groups"] for line in metrics) > 0
    with LedgerReader(run_dir / "ledger.sqlite") as ledger:
        query = "SELECT step, reason, reward FROM prompts WHERE state = 'dropped'"
        dropped = [row for row in ledger.query(query) if row[1].startswith("filtered: ")]
        assert {row[1] for row in dropped} == {"filtered: equal rewards"}
        assert {row[2] for row in dropped} <= {0.0, 1.0}
        counts = [sum(row[0] == step for row in dropped) for step in range(STEPS)]
        assert counts == [line["filtered_groups"] for line in metrics]
        [(trained, rewarded)] = ledger.query("SELECT COUNT(*), COUNT(reward) FROM prompts WHERE state = 'trained'")
        assert trained == rewarded == STEPS * PROMPTS


@pytest.mark.slow
def test_a_filtered_run_survives_a_killed_controller_and_a_resume(launch: Callable[..., Any], sft_model: Path) -> None:
    run = launch("--model", str(sft_model), *SMALL)
    wait_for_steps(run, 2)
    [controller] = run.find("flowrt.launcher.controller_main")
    run.signal(signal.SIGKILL, controller)
    wait_for_steps(run, 5)
    run.kill_all(run.processes())
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    assert_filtered(run.run_dir)


@pytest.mark.slow
def test_a_curriculum_skips_solved_prompts_across_a_restart_and_a_resume(
    launch: Callable[..., Any], sft_model: Path, tmp_path: Path
) -> None:
    """Eight always-solved prompts: nearly all are skipped after the first epoch, and none is lost."""
    data, reward = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "1"}) + "\n" for n in range(8)))
    reward.write_text("def reward(response, answer):\n    return 1.0\n")
    run = launch(
        *("--recipe", "custom", "--data", str(data), "--reward", str(reward), "--model", str(sft_model)),
        *("--prompts-per-step", "4", "--group-size", "2", "--steps", str(STEPS), "--data.eval-prompts", "0"),
        *("--rollout.workers", "1", "--checkpoint.every", "3", "--rollout.max-new-tokens", "8"),
        *(
            "--curriculum.type",
            "solve_rate",
            "--curriculum.history",
            "1",
            "--curriculum.floor",
            "0.2",
            "--curriculum.prior",
            "0",
        ),
    )
    wait_for_steps(run, 3)
    [controller] = run.find("flowrt.launcher.controller_main")
    run.signal(signal.SIGKILL, controller)
    wait_for_steps(run, 6)
    run.kill_all(run.processes())
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    assert [line["groups"] for line in lines(run.run_dir)] == [4] * STEPS
    with LedgerReader(run.run_dir / "ledger.sqlite") as ledger:
        skipped = ledger.query("SELECT epoch, step FROM prompts WHERE reason = 'skipped by the curriculum'")
        rewards = ledger.query("SELECT DISTINCT reward FROM prompts WHERE state = 'trained'")
    assert rewards == [(1.0,)]
    assert len(skipped) > STEPS * 4, "about four in five prompts of later epochs are skipped"
    assert min(epoch for epoch, _ in skipped) >= 1
    counts = [line["skipped_prompts"] for line in lines(run.run_dir)]
    assert [sum(at == step for _, at in skipped) for step in range(STEPS)] == counts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [
                *("--algorithm.filter.zero-variance", "True", "--group-size", "1"),
                *("--algorithm.advantage.baseline", "none", "--algorithm.advantage.scale", "none"),
            ],
            "group_size is 1: the rewards of every group would be equal",
        ),
        (["--algorithm.filter.min-reward", "0.9", "--algorithm.filter.max-reward", "0.1"], "no group would be trained"),
        (["--algorithm.filter.tries", "3"], "no groups are filtered"),
        (
            ["--algorithm.filter.zero-variance", "True", "--algorithm.filter.tries", "0"],
            "algorithm.filter.tries is 0; use",
        ),
        (["--algorithm.filter.min-reward", "nan"], "algorithm.filter.min_reward is nan"),
        (
            ["--curriculum.floor", "0.5"],
            "--curriculum.floor is of type solve_rate, and the type is uniform; set --curriculum.type to solve",
        ),
        (["--curriculum.type", "solve_rate", "--curriculum.floor", "0"], "curriculum.floor is 0.0; use"),
        (["--curriculum.type", "solve_rate", "--curriculum.history", "0"], "curriculum.history is 0; use"),
        (
            ["--curriculum.type", "solve_rate", "--curriculum.solved-reward", "0"],
            "not below curriculum.solved_reward",
        ),
        (["--curriculum.type", "solve_rate", "--data.epochs", "1"], "every prompt is new in the first epoch"),
    ],
)
def test_invalid_and_ineffective_options_are_rejected_in_one_sentence(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse(flags)
    assert "\n" not in str(error.value)
