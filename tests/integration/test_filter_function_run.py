"""A run with a user-defined filter function that keeps a band of mean rewards and hangs once."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse

PROMPTS, GROUP, STEPS, TRIES = 4, 4, 8, 40
BAND = '''
import pathlib, time

def in_band(rewards, lengths, version):
    """Keep groups with some right answers. The third call in the run does not return."""
    calls = pathlib.Path(__file__).with_suffix(".calls")
    if lengths != [1] * len(rewards):
        with calls.open("a") as file:
            file.write(f"{version}\\n")
        if len(calls.read_text().split()) == 3:
            time.sleep(99)
    return 0 < sum(rewards) < len(rewards)
'''


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.slow
def test_hanging_filter_function_drops_its_group_and_the_run_can_be_resumed(
    launch: Callable[..., Any], sft_model: Path, tmp_path: Path
) -> None:
    filter_file = tmp_path / "mine.py"
    filter_file.write_text(BAND)
    run = launch(
        *("--model", str(sft_model), "--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP)),
        *("--steps", str(STEPS), "--data.eval-prompts", "0", "--rollout.workers", "1", "--checkpoint.every", "2"),
        *("--supervisor.backoff-s", "0.1", "--algorithm.filter.tries", str(TRIES)),
        *("--algorithm.filter.function", f"{filter_file}:in_band", "--algorithm.filter.function-timeout-s", "2"),
    )
    run.wait_for(lambda: len(lines(run.run_dir)) >= 2, "steps")
    [reward] = run.find("flowrt.roles.reward")
    run.signal(signal.SIGKILL, reward)
    run.wait_for(lambda: len(lines(run.run_dir)) >= 5, "steps after the reward worker was killed")
    run.kill_all(run.processes())
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(180.0) == 0, resumed.output
    assert "it did not return in 2 s" in run.log("reward") + resumed.log("reward")
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    metrics = lines(run.run_dir)
    assert [(line["step"], line["groups"]) for line in metrics] == [(step, PROMPTS) for step in range(STEPS)]
    assert all(not line["zero_variance_groups"] for line in metrics if line["filtered_groups"] < TRIES)
    assert all(line["filter_decision"] == 1 for line in metrics if line["filtered_groups"] < TRIES)
    with LedgerReader(run.run_dir / "ledger.sqlite") as ledger:
        dropped = ledger.query("SELECT step, reason, reward FROM prompts WHERE state = 'dropped'")
    reasons = Counter(reason for _, reason, _ in dropped)
    assert reasons["filtered: the filter function did not return in time"] == 1
    assert reasons["filtered: the filter function"] == len(dropped) - 1 > 0
    assert {reward for _, reason, reward in dropped if reason == "filtered: the filter function"} <= {0.0, 1.0}
    counts = Counter(step for step, _, _ in dropped)
    assert [counts[step] for step in range(STEPS)] == [line["filtered_groups"] for line in metrics]


@pytest.mark.slow
def test_error_in_the_filter_function_is_refused_before_the_run_starts(
    refused: Callable[..., Any], tmp_path: Path, untrained_model: Path
) -> None:
    filter_file = tmp_path / "mine.py"
    filter_file.write_text("def keep(rewards):\n    return sum(rewards) / 0\n")
    error = refused("--model", str(untrained_model), "--algorithm.filter.function", str(filter_file)).sentence()
    assert f"flowrt: filter function keep ({filter_file}:2): ZeroDivisionError: " in error


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--algorithm.filter.function-timeout-s", "3"], "changes nothing with algorithm.filter.function ''"),
        (
            ["--algorithm.filter.function", "a.py", "--algorithm.filter.function-timeout-s", "0"],
            "function_timeout_s is",
        ),
    ],
)
def test_filter_options_without_effect_are_refused(flags: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(flags)
