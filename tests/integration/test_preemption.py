"""A run terminated with SIGTERM saves its trained steps first, and continues from them when it is resumed."""

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.recipes.run_dir import checkpoint_steps

pytestmark = pytest.mark.slow
STEPS_BEFORE, STEPS, PROMPTS = 3, 12, 4
EXIT_WITHIN_S = 15.0
SMALL = [
    *("--prompts-per-step", str(PROMPTS), "--group-size", "4", "--trainer.micro-batch-tokens", "100"),
    *("--rollout.workers", "1", "--trainer.lr", "0.002", "--algorithm.kl.coef", "0", "--data.eval-prompts", "0"),
    *("--checkpoint.every", "1000", "--supervisor.max-worker-restarts", "0", "--max-run-restarts", "0"),
]
EXACT = [*SMALL, "--steps", str(STEPS), "--max-staleness", "0", "--deterministic", "True"]
TIMING_METRICS = {"wall_s", "samples_per_s"}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def metrics_without_times(run_dir: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMING_METRICS} for line in lines(run_dir)]


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final", dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def rolled_back_prompts(run_dir: Path) -> list[tuple[Any, ...]]:
    """Trained prompts that were rolled back."""
    with LedgerReader(run_dir / "ledger.sqlite") as ledger:
        return ledger.query("SELECT epoch, prompt FROM events WHERE reason LIKE 'rolled back: trained in step%'")


def terminate(run: Any, others: Sequence[psutil.Process] = (), number: signal.Signals = signal.SIGTERM) -> int:
    """Send a signal after some steps; return the step of the checkpoint that the run saves."""
    run.wait_for(lambda: len(lines(run.run_dir)) >= STEPS_BEFORE, "steps")
    assert checkpoint_steps(run.run_dir) == []
    run.signal(number)
    for process in others:
        run.signal(number, process)
    assert run.wait(EXIT_WITHIN_S) == 130, run.output
    run.assert_gone(EXIT_WITHIN_S)
    assert "Traceback" not in run.output
    [saved] = checkpoint_steps(run.run_dir)
    assert saved == len(lines(run.run_dir)) >= STEPS_BEFORE
    assert re.search(rf"interrupted \(SIG(TERM|{number.name[3:]})\); saved after {saved} steps", run.words), run.output
    assert re.search(rf"; continue from step {saved} of \d+: flowrt resume {run.run_dir}$", run.words.strip()), (
        run.output
    )
    assert not (run.run_dir / "final").exists()
    return saved


def assert_resumed(run: Any, saved: int, steps: int) -> None:
    assert run.wait(90.0) == 0, run.output
    assert f"resuming after step {saved - 1}" in run.log("controller")
    assert [line["step"] for line in lines(run.run_dir)] == list(range(steps))
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["resumed_from"], summary["steps"]) == (saved, steps)
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
    assert summary["prompts"]["trained"] == steps * PROMPTS
    assert rolled_back_prompts(run.run_dir) == []


@pytest.mark.long
def test_resumed_weights_are_bit_equal_to_an_uninterrupted_run(launch: Callable[..., Any], sft_model: Path) -> None:
    uninterrupted = launch("--model", str(sft_model), *EXACT)
    assert uninterrupted.wait(90.0) == 0, uninterrupted.output
    run = launch("--model", str(sft_model), *EXACT)
    saved, run_dir = terminate(run), run.run_dir
    assert_resumed(launch(resume=run_dir), saved, STEPS)
    assert metrics_without_times(run_dir) == metrics_without_times(uninterrupted.run_dir)
    assert len({line["reward"] for line in metrics_without_times(run_dir)}) > 1
    resumed = parameters(run_dir)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in parameters(uninterrupted.run_dir).items())


@pytest.mark.long
def test_all_ranks_save_the_same_step(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000", "--trainer.ranks", "2")
    saved = terminate(run)
    assert_resumed(launch("--steps", str(saved + 2), resume=run.run_dir), saved, saved + 2)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_job_saves_when_every_process_is_terminated(
    launch: Callable[..., Any], untrained_model: Path, number: signal.Signals
) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000", "--trainer.ranks", "2")
    run.wait_for(lambda: lines(run.run_dir), "a step")
    terminate(run, [process for process in run.processes() if process.pid != run.pid], number)


@pytest.mark.long
def test_terminated_trainer_saves_and_the_run_continues_from_there(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch("--model", str(untrained_model), *SMALL[:-1], "1", "--steps", "100000")
    run.wait_for(lambda: len(lines(run.run_dir)) >= STEPS_BEFORE, "steps")
    [trainer] = run.find("flowrt.roles.trainer")
    run.signal(signal.SIGTERM, trainer)
    run.wait_for(lambda: "restart 1 of 1" in run.words, "restart")
    [saved] = checkpoint_steps(run.run_dir)
    assert saved == len(lines(run.run_dir)) >= STEPS_BEFORE
    assert f"trainer was terminated (SIGTERM); saved after {saved} steps" in run.words
    assert f"from step {saved}" in run.words


@pytest.mark.long
def test_a_stopped_trainer_ends_the_save_before_its_timeout(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000")
    run.wait_for(lambda: len(lines(run.run_dir)) >= STEPS_BEFORE, "steps")
    [trainer] = run.find("flowrt.roles.trainer")
    os.kill(trainer.pid, signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    assert run.wait(2 * EXIT_WITHIN_S) == 130, run.output
    run.assert_gone(2 * EXIT_WITHIN_S)
    assert "what was trained since the last checkpoint is not saved: trainer: " in run.words
    assert checkpoint_steps(run.run_dir) == []


@pytest.mark.long
def test_short_preemption_save_timeout_ends_the_run(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch(
        "--model", str(untrained_model), *SMALL, "--steps", "100000", "--checkpoint.preemption-save-timeout-s", "1"
    )
    run.wait_for(lambda: len(lines(run.run_dir)) >= STEPS_BEFORE, "steps")
    [trainer] = run.find("flowrt.roles.trainer")
    os.kill(trainer.pid, signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    assert run.wait(EXIT_WITHIN_S) == 130, run.output
    assert (
        "is not saved: no progress of it for 1 s (checkpoint.preemption_save_timeout_s): trainer has not saved"
        in run.words
    )


@pytest.mark.long
def test_an_interrupt_during_the_save_ends_the_run_at_once(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL, "--steps", "100000", "--controller.worker-timeout-s", "300")
    run.wait_for(lambda: len(lines(run.run_dir)) >= STEPS_BEFORE, "steps")
    [trainer] = run.find("flowrt.roles.trainer")
    os.kill(trainer.pid, signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    run.wait_for(lambda: "saving the steps after" in run.log("controller"), "message of the controller")
    run.signal(signal.SIGINT)
    assert run.wait(EXIT_WITHIN_S) == 130, run.output
    assert "interrupted (SIGINT)" in run.words
