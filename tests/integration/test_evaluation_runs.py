"""Evaluation in real runs: exact versions, the same results from a checkpoint, the best weights."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.hf import load_model, named_parameters
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import Launch
from tests.integration.helpers.forked_flowrt import run_flowrt

SMALL = [
    *("--rollout.max-new-tokens", "8", "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "16"),
    *("--algorithm.kl.coef", "0"),
]
EVERY_TWO = [
    *("--steps", "6", "--deterministic", "True", "--max-staleness", "0", "--eval.interval", "2"),
    *("--eval.overlap", "wait", "--eval.samples", "4", "--eval.temperature", "1.0"),
    *("--checkpoint.every", "2", "--checkpoint.keep", "9", "--checkpoint.best", "held_out/avg@4"),
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name not in ("seconds", "wall_s", "name", "version")}


def evaluate(run_dir: Path, *arguments: str) -> dict[str, Any]:
    out = run_dir.parent / "results.json"
    completed = run_flowrt("eval", str(run_dir), "--json", str(out), *arguments)
    assert completed.returncode == 0, completed.stdout
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, sft_model: Path) -> Path:
    """A finished run with evaluations of the versions 0, 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("evaluated")
    flags = ("--run-dir", str(directory / "run"), "--model", str(sft_model))
    completed = run_flowrt("run", "arithmetic", *flags, *SMALL, *EVERY_TWO)
    assert completed.returncode == 0, completed.stdout
    return directory / "run"


@pytest.mark.slow
def test_answers_of_evaluations_may_be_longer_than_responses(launch: Callable[..., Any], sft_model: Path) -> None:
    """At this temperature tokens are drawn nearly evenly, so that responses seldom end before their limit."""
    flags = ("--steps", "2", "--rollout.temperature", "50", "--eval.max-new-tokens", "20", "--eval.temperature", "50")
    run = launch("--model", str(sft_model), *SMALL, *flags)
    assert run.wait(200.0) == 0, run.output
    assert all(line["length"] > 8 for line in lines(run.run_dir / "evaluations.jsonl"))
    assert all(line["response_length"] <= 8 for line in lines(run.run_dir / "metrics.jsonl"))


@pytest.mark.slow
def test_every_due_version_is_evaluated_while_the_run_trains(evaluated: Path) -> None:
    evaluations = lines(evaluated / "evaluations.jsonl")
    assert [line["version"] for line in evaluations] == [0, 2, 4, 6]
    assert {line["name"] for line in evaluations} == {"held_out"}
    summary = json.loads((evaluated / "summary.json").read_text())
    assert summary["evaluations"]["held_out"]["version"] == 6
    assert summary["evaluations"]["held_out"]["evaluations"] == 4
    assert (summary["eval_first"], summary["eval_last"]) == (evaluations[0]["avg@4"], evaluations[3]["avg@4"])
    for line in evaluations:
        assert 0 <= line["avg@4"] == line["pass@1"] <= line["pass@2"] <= line["pass@4"] <= 1
    # The line of the next closed step has the results, too; after the last step there is no line.
    steps = lines(evaluated / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(6))
    in_steps = {step["eval/held_out/version"]: step for step in steps if "eval/held_out/version" in step}
    assert 0 in in_steps
    for version, step in in_steps.items():
        line = next(evaluation for evaluation in evaluations if evaluation["version"] == version)
        assert step["eval/held_out/pass@4"] == line["pass@4"]


@pytest.mark.slow
def test_evaluating_a_checkpoint_reproduces_the_results_of_the_run(evaluated: Path) -> None:
    in_run = {line["version"]: line for line in lines(evaluated / "evaluations.jsonl")}
    before = sorted(path.name for path in evaluated.iterdir())
    for arguments, version in ((("--step", "4"), 4), ((), 6)):
        report = evaluate(evaluated, *arguments)
        assert report["version"] == version
        assert without_time(report["results"]["held_out"]) == without_time(in_run[version])
    assert sorted(path.name for path in evaluated.iterdir()) == before


@pytest.mark.slow
def test_best_weights_are_those_with_the_best_evaluation(evaluated: Path) -> None:
    in_run = {line["version"]: line for line in lines(evaluated / "evaluations.jsonl")}
    [listed] = json.loads((evaluated / "best" / "best.json").read_text())
    best = max(in_run.values(), key=lambda line: (line["avg@4"], -line["version"]))
    assert (listed["version"], listed["value"]) == (best["version"], best["avg@4"])
    directory = evaluated / "best" / f"step-{best['version']:06}"
    assert [path.name for path in (evaluated / "best").glob("*step-*")] == [directory.name]
    weights = Snapshot.take(best["version"], named_parameters(load_model(directory)))
    assert weights.checksum() == listed["checksum"]
    report = evaluate(evaluated, "--best")
    assert report["version"] == best["version"]
    assert without_time(report["results"]["held_out"]) == without_time(best)


@pytest.mark.slow
def test_a_resumed_run_evaluates_only_missing_versions_that_it_has(
    evaluated: Path, tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    """The weights of version 4 are gone when the run continues after 6 steps: the gap is an event."""
    directory = tmp_path / "run"
    shutil.copytree(evaluated, directory)
    before = lines(directory / "evaluations.jsonl")
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as ledger, ledger:
        assert ledger.execute("DELETE FROM evaluations WHERE version >= 4").rowcount == 2
    resumed = launch("--steps", "8", resume=directory)
    assert resumed.wait(200) == 0, resumed.output
    after = lines(directory / "evaluations.jsonl")
    assert [line["version"] for line in after] == [0, 2, 6, 8]
    assert after[:2] == before[:2]
    assert without_time(after[2]) == without_time(before[3])
    skipped = [event for event in lines(directory / "events.jsonl") if event["kind"] == "evaluation_skipped"]
    assert [(event["version"], event["name"]) for event in skipped] == [(4, "held_out")]


@pytest.mark.slow
def test_a_result_that_reaches_the_target_ends_training(launch: Callable[..., Launch], sft_model: Path) -> None:
    flags = ("--steps", "40", "--eval.interval", "2", "--eval.stop-at", "0.001", "--eval.at-start", "False")
    stopped = launch("--model", str(sft_model), *SMALL, *flags, "--eval.samples", "8", "--eval.temperature", "1.0")
    assert stopped.wait(200) == 0, stopped.output
    summary = json.loads((stopped.run_dir / "summary.json").read_text())
    assert 2 <= summary["steps"] < 40
    evaluations = lines(stopped.run_dir / "evaluations.jsonl")
    assert evaluations[0]["avg@8"] >= 0.001
    # The last version is always evaluated.
    assert evaluations[-1]["version"] == summary["steps"]
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)


@pytest.mark.slow
def test_a_run_that_only_evaluates_starts_no_trainer(launch: Callable[..., Launch], sft_model: Path) -> None:
    run = launch("--model", str(sft_model), *SMALL, "--eval.only", "True")
    assert run.wait(200) == 0, run.output
    assert "evaluation held_out: avg@1" in run.words
    assert not (run.run_dir / "logs" / "trainer.log").exists()
    assert [line["version"] for line in lines(run.run_dir / "evaluations.jsonl")] == [0]


@pytest.mark.long
def test_evaluations_are_completed_after_a_pinned_worker_was_killed(
    launch: Callable[..., Launch], sft_model: Path
) -> None:
    """Evaluations take longer than training, so that workers must load old versions for pending evaluations.

    Dropping groups with lost samples is a policy of training: the lost answers are generated again.
    """
    flags = ("--steps", "30", "--eval.interval", "8", "--eval.overlap", "wait", "--eval.at-start", "False")
    policy = ("--on-lost-sample", "drop_group", "--eval.temperature", "1.0")
    run = launch(
        "--model", str(sft_model), *SMALL, *flags, *policy, "--data.eval-prompts", "64", "--eval.samples", "48"
    )
    metrics = run.run_dir / "metrics.jsonl"
    run.wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 9, "ninth step", 120.0)
    for process in run.find("flowrt.roles.rollout", "rollout-0"):
        process.kill()
    assert run.wait(250) == 0, run.output
    assert "rollout-0 is gone" in run.log("controller")
    evaluations = lines(run.run_dir / "evaluations.jsonl")
    assert sorted(line["version"] for line in evaluations) == [8, 16, 24, 30], run.log("source")


@pytest.mark.slow
def test_a_complete_run_without_a_summary_is_resumed(evaluated: Path, tmp_path: Path) -> None:
    """The source has the results of the last version before the trainer publishes it again."""
    directory = tmp_path / "run"
    shutil.copytree(evaluated, directory)
    (directory / "summary.json").unlink()
    completed = run_flowrt("resume", str(directory))
    assert completed.returncode == 0, completed.stdout
    assert "protocol violation" not in completed.stdout
    assert json.loads((directory / "summary.json").read_text())["evaluations"]["held_out"]["version"] == 6
