"""A trainer with two ranks, one of which hangs: the run names it and restarts from its last checkpoint."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.recipes.run_dir import checkpoint_steps
from tests.integration.helpers import hanging_rank

pytestmark = pytest.mark.slow
STEPS, PROMPTS = 6, 4
DEADLINE_S = 2.0
SMALL = [
    *("--steps", str(STEPS), "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "2", "--trainer.ranks", "2"),
]


def rank_of(run: Any, rank: int) -> psutil.Process:
    [trainer] = [process for process in run.find("flowrt.roles.trainer") if process.environ().get("RANK") == str(rank)]
    return trainer


@pytest.mark.long
def test_a_stopped_rank_restarts_the_run_from_its_checkpoint(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *SMALL)
    run.wait_for(lambda: checkpoint_steps(run.run_dir), "a checkpoint")
    stopped = rank_of(run, 1)
    run.signal(signal.SIGSTOP, stopped)
    run.wait_for(
        lambda: "the run ends: trainer-1: its connection is closed" in run.log("controller"),
        "detection of the stopped rank",
    )
    assert run.wait(90.0) == 0, run.output
    run.assert_gone(10.0)
    assert "restart 1 of 3" in run.words
    assert not stopped.is_running()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert summary["resumed_from"] >= 2


def test_live_rank_missing_at_the_barrier_is_named() -> None:
    """Its heartbeats continue; at the barrier deadline the other rank names the missing rank and the step."""
    script = [hanging_rank.__file__, str(DEADLINE_S)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 1, ended.stderr
    [message] = ended.stdout.splitlines()
    assert re.fullmatch(r"rank 0 waited \d+ s for step 4 with the other ranks: rank 1 did not arrive", message)
