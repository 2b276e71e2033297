"""Hosts that share no file system: all but the controller's find its run directory empty."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.netns.runs import Run

STEPS = 5

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_without_checkpoints_needs_no_shared_directory(hosts: Any, begin: Callable[..., Run]) -> None:
    run = begin(STEPS, "--algorithm.kl.coef", "0.05", alone=True)
    run.staff()
    run.python(1, "reference", "-m", "flowrt.roles.reference")
    assert run.code(120.0) == 0, run.words()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    run.all_leave_well(30.0)
    here = {path.name for path in run.dir.iterdir()}
    assert "metrics.jsonl" in here
    assert not here & {"final", "checkpoints", "logs"}, "what workers write stays on their own disks"


def test_checkpoints_on_unshared_disks_end_the_run_before_its_first_step(hosts: Any, begin: Callable[..., Run]) -> None:
    run = begin(STEPS, "--checkpoint.every", "2", alone=True)
    run.staff()
    assert run.code(90.0) == 1, run.words()
    reason = run.summary()["reason"]
    assert f"run directory {run.dir} is not the controller's on host 'host3'" in reason
    assert "--checkpoint.every 0" in reason
    assert run.steps() == 0
    assert run.left("trainer", 30.0) == 1
