"""Guards in real runs: one that warns, one that holds the run on policy, one that stops it, and the resume after it.

The rules are on the learning rate, which rises to a known value in each step of the warm-up.
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
@pytest.mark.parallel
def test_a_guard_warns_and_one_holds_the_run_on_policy(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    notify = tmp_path / "notify.sh"
    notify.write_text("#!/bin/sh\ncat >> told.jsonl\nexit 3\n")
    notify.chmod(0o700)
    run = launch(
        *("--guards.command", str(notify)),
        *("--model", str(untrained_model), *SMALL, "--steps", "16", "--max-staleness", "2"),
        *("--trainer.warmup-steps", "10", "--guard", "lr below 0.00055 steps=5 action=hold hold_steps=4"),
        *("--guard", "lr above 0.00095 steps=2"),
    )
    assert run.wait(120.0) == 0, run.output
    found = lines(run.run_dir)
    # 0.0001 in step 0, 0.0005 in step 4, 0.001 from step 9 on.
    assert {line["step"]: line["guard_lr"] for line in found if "guard_lr" in line} == {
        4: 5,
        **{step: step - 8 for step in range(10, 16)},
    }
    assert [line["staleness_max"] for line in found[5:9]] == [0, 0, 0, 0]
    assert max(line["staleness_max"] for line in found[9:]) > 0
    warned = [line for line in run.log("controller").splitlines() if "guard lr" in line]
    assert len(warned) == 2, warned
    assert "step 4: guard lr below 0.00055 for 5 steps (hold): lr is 0.0005" in warned[0]
    assert "the staleness bound is 0 for 4 steps" in warned[0]
    assert "step 10: guard lr above 0.00095 for 2 steps (warn): lr is 0.001" in warned[1]
    assert "step 10: guard lr above 0.00095 for 2 steps (warn): lr is 0.001" in run.words
    told = [json.loads(line) for line in (run.run_dir / "told.jsonl").read_text().splitlines()]
    happened = events(run.run_dir)
    fired = [line for line in happened if line["kind"] == "guard"]
    assert told == [{**line, "run_dir": str(run.run_dir)} for line in fired]
    assert [line["step"] for line in fired if "guard lr" in line["text"]] == [4, 10]
    failed = [line["text"] for line in happened if line["kind"] == "warning"]
    assert failed == [f"guards.command {notify} ended with exit code 3"] * len(told)
    assert json.loads((run.run_dir / "summary.json").read_text())["prompts_lost"] == 0


@pytest.mark.slow
@pytest.mark.parallel
def test_a_guard_stops_the_run_and_resume_goes_on(launch: Callable[..., Any], untrained_model: Path) -> None:
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
    again = launch(resume=run.run_dir)  # its counts begin again: it stops two steps later
    assert again.wait(120.0) == 5, again.output
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
    assert {"joined", "published", "checkpoint", "guard"} <= {*kinds}  # who leaves after the end is no event


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--steps", "60"), id="default", marks=pytest.mark.long),
        *(
            pytest.param(("--steps", "12", "--algorithm", name), id=name, marks=pytest.mark.long)
            for name in ("gspo", "grpo", "cispo", "dr_grpo")
        ),
        pytest.param(("--steps", "12", "--algorithm", "dapo"), id="dapo"),
    ],
)
def test_a_run_that_learns_has_no_false_alarm(launch: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    run = launch("--exporters", "tensorboard", *arguments)
    assert run.wait(240.0) == 0, run.output
    found = events(run.run_dir)
    assert len([one for one in found if one["kind"] == "published"]) >= 11
    assert [one["text"] for one in found if one["kind"] in ("guard", "warning", "exporter")] == []
