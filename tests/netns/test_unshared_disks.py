"""Hosts without a shared file system: the run directory is empty on all but the controller's."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.netns.runs import Run

STEPS = 5

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_without_checkpoints_needs_no_shared_directory(hosts: Any, start_run: Callable[..., Run]) -> None:
    run = start_run(STEPS, "--algorithm.kl.coef", "0.05", unshared=True)
    run.start_roles()
    run.python(1, "reference", "-m", "flowrt.roles.reference")
    assert run.controller_exit_code(120.0) == 0, run.logs()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    run.assert_all_succeed(30.0)
    here = {path.name for path in run.dir.iterdir()}
    assert "metrics.jsonl" in here
    assert not here & {"final", "checkpoints", "logs"}, "what workers write stays on their own disks"


def test_checkpoints_on_unshared_disks_end_the_run_before_its_first_step(
    hosts: Any, start_run: Callable[..., Run]
) -> None:
    run = start_run(STEPS, "--checkpoint.every", "2", unshared=True)
    run.start_roles()
    assert run.controller_exit_code(90.0) == 2, run.logs()
    reason = run.summary()["reason"]
    assert f"run directory {run.dir} is not the controller's on host 'host3'" in reason
    assert "--checkpoint.every 0" in reason
    assert run.steps() == 0
    assert run.exit_code("trainer", 30.0) == 1, "torchrun ends with 1 whatever its rank ended with"
