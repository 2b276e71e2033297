"""Two reference workers share the samples of a run, and one that is killed is replaced."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SETTINGS = [
    *("--steps", "6", "--prompts-per-step", "8", "--group-size", "4", "--data.eval-prompts", "0"),
    *("--sft.steps", "0", "--sft.answer-only-steps", "0", "--rollout.workers", "1", "--trainer.save", "False"),
    *("--reference.workers", "2", "--reference.dtype", "bfloat16", "--trainer.engine", "fsdp"),
    *("--trainer.fsdp.dtype", "bfloat16"),
]


@pytest.mark.long
def test_two_reference_workers_score_a_run_and_a_killed_one_is_replaced(launch: Callable[..., Any]) -> None:
    run = launch(*SETTINGS)
    run.wait_for_training()
    (worker,) = run.find("flowrt.roles.reference", "reference-0")
    run.signal(signal.SIGKILL, worker)
    assert run.wait(180.0) == 0, run.output
    assert "has joined the run" in run.log("reference-1")
    assert run.log("reference-0").count("has joined the run") == 2
