"""The default job with its roles on three hosts learns as on one host."""

from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.config_io import defaults
from tests.netns.runs import CONTROLLER, ON_HOSTS, ROLLOUT, Run, make_keys_and_model

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_default_job_learns_on_three_hosts(hosts: Any, start_run: Any, tmp_path: Path) -> None:
    base = defaults("arithmetic")
    everywhere = tmp_path / "everywhere"
    everywhere.mkdir()
    run = start_run(base.steps, job=ON_HOSTS, model=make_keys_and_model(everywhere, base))
    assert isinstance(run, Run)
    run.start_roles()
    run.python(CONTROLLER, "reference", "-m", "flowrt.roles.reference")
    run.python(ROLLOUT, "rollout-1", "-m", "flowrt.roles.rollout", "--name", "rollout-1")
    assert run.controller_exit_code(600.0) == 0, run.logs()
    run.assert_all_succeed(30.0)
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (base.steps, 0, 0)
    assert summary["staleness_max"] <= base.max_staleness
    assert summary["reward_first"] <= 0.5
    assert min(summary["reward_last"], summary["eval_last"]) >= 0.9
    assert f"listening on tcp://{hosts.address(CONTROLLER)}:" in run.logs()
