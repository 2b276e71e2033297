"""Guards in real runs: one that warns, one that holds the run on policy, one that stops it, and the resume after it.

The guards watch the learning rate, whose value in each warm-up step is known.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.run_dir import checkpoint_steps

SMALL = [
    *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--algorithm.kl.coef", "0", "--trainer.lr", "0.001", "--max-run-restarts", "0", "--trainer.save", "False"),
]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_one_guard_warns_and_another_holds_the_run_on_policy(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    notify = tmp_path / "notify.sh"
    notify.write_text("#!/bin/sh\ncat >> notified.jsonl\nexit 3\n")
    notify.chmod(0o700)
    run = launch(
        *("--guards.command", str(notify)),
        *("--model", str(untrained_model), *SMALL, "--steps", "16", "--max-staleness", "2"),
        *("--trainer.warmup-steps", "10", "--guard", "lr below 0.00055 steps=5 action=hold hold_steps=4"),
        *("--guard", "lr above 0.00095 steps=2"),
    )
    assert run.wait(120.0) == 0, run.output
    metrics = lines(run.run_dir)
    # 0.0001 in step 0, 0.0005 in step 4, 0.001 from step 9 on.
    assert {line["step"]: line["guard_lr"] for line in metrics if "guard_lr" in line} == {
        4: 5,
        **{step: step - 8 for step in range(10, 16)},
    }
    assert [line["staleness_max"] for line in metrics[5:9]] == [0, 0, 0, 0]
    assert max(line["staleness_max"] for line in metrics[9:]) > 0
    guard_log = [line for line in run.log("controller").splitlines() if "guard lr" in line]
    assert len(guard_log) == 2, guard_log
    assert "step 4: guard lr below 0.00055 for 5 steps (hold): lr is 0.0005" in guard_log[0]
    assert "the staleness bound is 0 for 4 steps" in guard_log[0]
    assert "step 10: guard lr above 0.00095 for 2 steps (warn): lr is 0.001" in guard_log[1]
    assert "step 10: guard lr above 0.00095 for 2 steps (warn): lr is 0.001" in run.words
    notified = [json.loads(line) for line in (run.run_dir / "notified.jsonl").read_text().splitlines()]
    recorded = events(run.run_dir)
    guard_events = [line for line in recorded if line["kind"] == "guard"]
    assert notified == [{**line, "run_dir": str(run.run_dir)} for line in guard_events]
    assert [line["step"] for line in guard_events if "guard lr" in line["text"]] == [4, 10]
    warnings = [line["text"] for line in recorded if line["kind"] == "warning"]
    assert warnings == [f"guards.command {notify} ended with exit code 3"] * len(notified)
    assert json.loads((run.run_dir / "summary.json").read_text())["prompts_lost"] == 0


@pytest.mark.slow
def test_a_guard_stops_the_run_and_a_resume_continues_it(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch(
        *("--model", str(untrained_model), *SMALL, "--steps", "8", "--trainer.warmup-steps", "3"),
        *("--guard", "lr above 0.0009 steps=2 action=stop"),
    )
    assert run.wait(120.0) == 5, run.output
    reason = (
        "guard lr above 0.0009 for 2 steps (stop): lr is 0.001, outside its limit for 2 consecutive steps; "
        "saved after 4 steps"
    )
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["exit_code"], summary["reason"], summary["steps"]) == (5, reason, 4)
    assert reason in run.words
    assert checkpoint_steps(run.run_dir) == [4]
    resumed = launch(resume=run.run_dir)  # its step count restarts: it stops two steps later
    assert resumed.wait(120.0) == 5, resumed.output
    assert checkpoint_steps(run.run_dir)[-1] == 6
    last = launch("--guard", "lr off", resume=run.run_dir)
    assert last.wait(120.0) == 0, last.output
    assert [line["step"] for line in lines(run.run_dir)] == list(range(8))
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    kinds = [line["kind"] for line in events(run.run_dir)]
    assert [kind for kind in kinds if kind in ("started", "resumed", "ended", "rolled_back")] == [
        *("started", "ended", "resumed", "ended", "resumed", "ended")
    ]
    # Workers that leave after the end of the run are not recorded.
    assert {"joined", "published", "checkpoint", "guard"} <= {*kinds}


@pytest.mark.slow
def test_a_stop_outlives_the_controller(launch: Callable[..., Any], untrained_model: Path, tmp_path: Path) -> None:
    kill = tmp_path / "kill.sh"
    kill.write_text("#!/bin/sh\nmkdir killed && kill -9 $PPID\n")  # once: a directory can be made once
    kill.chmod(0o700)
    run = launch(
        *("--model", str(untrained_model), *SMALL, "--steps", "8", "--trainer.warmup-steps", "3"),
        *("--guard", "lr above 0.0009 steps=2 action=stop", "--guards.command", str(kill)),
        *("--supervisor.backoff-s", "0.1"),
    )
    assert run.wait(120.0) == 5, run.output
    assert (run.run_dir / "killed").is_dir()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["exit_code"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (5, 0, 0)
    assert "guard lr above 0.0009 for 2 steps (stop)" in summary["reason"]
    assert checkpoint_steps(run.run_dir) == [summary["steps"]]
    assert summary["steps"] < 8


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--steps", "60"), id="default"),
        *(
            pytest.param(("--steps", "12", "--algorithm", name), id=name)
            for name in ("gspo", "grpo", "cispo", "dr_grpo", "dapo")
        ),
    ],
)
def test_a_learning_run_raises_no_false_alarm(launch: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    run = launch("--exporters", "tensorboard", *arguments)
    assert run.wait(240.0) == 0, run.output
    recorded = events(run.run_dir)
    assert len([event for event in recorded if event["kind"] == "published"]) >= 11
    assert [event["text"] for event in recorded if event["kind"] in ("guard", "warning", "exporter")] == []
