"""SIGKILL of all processes at any moment, then resume: no prompt lost or trained twice, and bit-equal weights."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrt.cli import main
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.recipes.model_files import TRAINER_STATE
from flowrt.recipes.run_dir import checkpoint_steps

pytestmark = [pytest.mark.slow, pytest.mark.long]
SEED = 20261121
STEPS, EVERY, PROMPTS = 30, 3, 4
SMALL = [
    *("--prompts-per-step", str(PROMPTS), "--group-size", "4", "--trainer.micro-batch-tokens", "100"),
    *("--rollout.workers", "1", "--trainer.lr", "0.002"),
]
EXACT = [
    *("--steps", str(STEPS), "--max-staleness", "0", "--deterministic", "True", "--data.eval-prompts", "4"),
    *("--checkpoint.every", str(EVERY), *SMALL),
]
TIMING_METRICS = {"wall_s", "samples_per_s"}
VICTIMS = [
    *("flowrt.roles.rollout", "flowrt.roles.source", "flowrt.launcher.controller_main"),
    *("flowrt.roles.reward", "flowrt.roles.reference", "flowrt.roles.trainer"),
]


def is_of_one_attempt(metric: str) -> bool:
    """Whether a metric depends on time, or, as the counts of guards, begins anew with a resume."""
    return metric in TIMING_METRICS or metric.endswith("seconds") or metric.startswith("guard_")


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def query(run_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    with LedgerReader(run_dir / "ledger.sqlite") as ledger:
        return ledger.query(statement)


def wait_for_steps(run: Any, steps: int) -> None:
    run.wait_for(lambda: (run.run_dir / "metrics.jsonl").is_file() and len(lines(run.run_dir)) >= steps, "steps")


def busy_wait(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


def kill_at_a_random_moment(run: Any, rng: random.Random) -> None:
    wait_for_steps(run, rng.randint(EVERY + 1, STEPS // 2))
    processes = run.processes()
    busy_wait(rng.uniform(0.0, 0.3))
    run.kill_all(processes)


def kill_while_saving(run: Any, after: int) -> None:
    """Stop the trainer while it writes a checkpoint, then kill every process."""
    run.wait_for(lambda: max(checkpoint_steps(run.run_dir), default=0) > after, "checkpoint")
    processes = run.processes()
    [trainer] = run.find("flowrt.roles.trainer")
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        if partial := list((run.run_dir / "checkpoints").glob(".step-*.part")):
            os.kill(trainer.pid, signal.SIGSTOP)
            if partial[0].exists():
                run.kill_all(processes)
                assert partial[0].exists()
                return
            os.kill(trainer.pid, signal.SIGCONT)
    pytest.fail("no checkpoint was caught while it was written")


def kill_one(run: Any, victim: str, rng: random.Random) -> None:
    """Kill one process at a random moment after two more steps; return when its replacement runs."""
    wait_for_steps(run, len(lines(run.run_dir)) + 2)
    [killed] = run.find(victim)
    busy_wait(rng.uniform(0.0, 0.3))
    run.signal(signal.SIGKILL, killed)
    run.wait_for(lambda: {process.pid for process in run.find(victim)} - {killed.pid}, f"another {victim}")


@pytest.fixture(scope="module")
def runs(launch: Callable[..., Any], sft_model: Path) -> tuple[Path, Path]:
    """A run that was not killed, and one that was killed twice and resumed to its end."""
    uninterrupted = launch("--model", str(sft_model), *EXACT)
    assert uninterrupted.wait(120.0) == 0, uninterrupted.output
    rng = random.Random(SEED)
    killed = launch("--model", str(sft_model), *EXACT)
    wait_for_steps(killed, 1)
    assert main(["resume", str(killed.run_dir)]) == 2  # it is still running
    assert main(["ledger", str(killed.run_dir)]) == 0
    kill_at_a_random_moment(killed, rng)
    saved = max(checkpoint_steps(killed.run_dir))
    assert saved >= EVERY
    second = launch(resume=killed.run_dir)
    kill_while_saving(second, saved)
    third = launch(resume=killed.run_dir)
    assert third.wait(120.0) == 0, third.output
    third.assert_gone(10.0)
    return uninterrupted.run_dir, killed.run_dir


def test_weights_equal_those_of_an_uninterrupted_run(runs: tuple[Path, Path], sft_model: Path) -> None:
    uninterrupted, resumed = (parameters(run_dir / "final") for run_dir in runs)
    start = parameters(sft_model)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in uninterrupted.items())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in uninterrupted.items())


def test_weights_do_not_depend_on_which_process_was_killed(
    runs: tuple[Path, Path], launch: Callable[..., Any], sft_model: Path
) -> None:
    """Each process is killed once; lost samples are generated again, and are the same."""
    rng = random.Random(SEED + 1)
    killed = launch("--model", str(sft_model), *EXACT, "--supervisor.backoff-s", "0.1")
    wait_for_steps(killed, 1)
    for victim in VICTIMS:
        kill_one(killed, victim, rng)
    assert killed.wait(120.0) == 0, killed.output
    killed.assert_gone(10.0)
    uninterrupted, final = (parameters(run_dir / "final") for run_dir in (runs[0], killed.run_dir))
    assert all(torch.equal(tensor, final[name]) for name, tensor in uninterrupted.items())
    assert [line["reward"] for line in lines(killed.run_dir)] == [line["reward"] for line in lines(runs[0])]
    assert (summary(killed.run_dir)["prompts_lost"], summary(killed.run_dir)["prompts_trained_twice"]) == (0, 0)


def test_metrics_equal_those_of_an_uninterrupted_run(runs: tuple[Path, Path]) -> None:
    uninterrupted, resumed = (
        [{name: value for name, value in line.items() if not is_of_one_attempt(name)} for line in lines(run_dir)]
        for run_dir in runs
    )
    assert resumed == uninterrupted
    assert [line["step"] for line in uninterrupted] == list(range(STEPS))
    assert len({line["reward"] for line in uninterrupted}) > 2
    wall_times = [line["wall_s"] for line in lines(runs[1])]
    assert wall_times == sorted(wall_times)


def test_the_ledger_has_each_prompt_in_the_same_step(runs: tuple[Path, Path]) -> None:
    select = "SELECT epoch, prompt, state, step FROM prompts WHERE state = 'trained' ORDER BY epoch, prompt"
    uninterrupted, resumed = (query(run_dir, select) for run_dir in runs)
    assert resumed == uninterrupted
    assert len(uninterrupted) == STEPS * PROMPTS
    rolled_back = query(runs[1], "SELECT epoch, prompt FROM events WHERE reason LIKE 'rolled back: trained in step%'")
    assert rolled_back
    trained = "SELECT epoch, prompt FROM events WHERE state = 'trained'"
    assert len(query(runs[1], trained)) == len(uninterrupted) + len(rolled_back)
    assert len(query(runs[1], "SELECT * FROM run_attempts")) == 3


def test_the_summary_counts_the_whole_run(runs: tuple[Path, Path]) -> None:
    uninterrupted, resumed = (summary(run_dir) for run_dir in runs)
    for name in ("steps", "samples", "reward_first", "reward_last", "staleness_max", "eval_first", "eval_last"):
        assert resumed[name] == uninterrupted[name], name
    assert (resumed["prompts_lost"], resumed["prompts_trained_twice"]) == (0, 0)
    assert (uninterrupted["resumed_from"], resumed["prompts"]["trained"]) == (0, STEPS * PROMPTS)
    assert 0 < resumed["resumed_from"] < STEPS
    assert resumed["wall_s"] >= lines(runs[1])[-1]["wall_s"]


def test_checkpoints_are_complete_and_pruned(runs: tuple[Path, Path]) -> None:
    for run_dir in runs:
        assert checkpoint_steps(run_dir) == [STEPS - EVERY, STEPS]
        assert not list((run_dir / "checkpoints").glob(".*"))
        assert (run_dir / "checkpoints" / f"step-{STEPS:06}" / TRAINER_STATE).is_file()


def test_evaluation_before_training_is_not_repeated(runs: tuple[Path, Path]) -> None:
    # A repeated evaluation would have been recorded again, in a later step.
    assert query(runs[1], "SELECT name, step FROM summary_values WHERE name LIKE 'eval%' ORDER BY name") == [
        ("eval_first", 0),
        ("eval_last", STEPS),
    ]


def test_a_complete_run_is_reported_and_can_be_extended(
    runs: tuple[Path, Path], launch: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = runs[0]
    assert main(["resume", str(run_dir)]) == 0
    assert f"is complete: {STEPS} steps" in " ".join(capsys.readouterr().out.split())
    assert main(["resume", str(run_dir), "--steps", "3"]) == 2
    assert "is less than" in " ".join(capsys.readouterr().err.split())
    # From another directory, and without the model that it started from.
    moved = run_dir.rename(run_dir.with_name("moved"))
    config = moved / "config.toml"
    config.write_text(config.read_text().replace(str(run_dir.parent), "/nowhere"))
    longer = launch("--steps", str(STEPS + 2), resume=moved)
    assert longer.wait(120.0) == 0, longer.output
    assert [line["step"] for line in lines(moved)] == list(range(STEPS + 2))
    assert summary(moved)["prompts"] == {"trained": (STEPS + 2) * PROMPTS}
