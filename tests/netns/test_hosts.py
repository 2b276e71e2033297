"""A small arithmetic job on three hosts: a link that is cut for some seconds, and one that is cut permanently."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import wait_until
from tests.netns.runs import CONTROLLER, ROLLOUT

CUT_S = 5.0
STEPS = 60
GONE_S = 60.0  # 17 s until the worker is lost, then ROLE_VACANCY_TIMEOUT_S, and a margin for slow machines

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]


def test_run_on_three_hosts_survives_a_link_failure_of_five_seconds(hosts: Any, start_run: Any, tmp_path: Path) -> None:
    run = start_run(STEPS, "--trainer.final-dir", str(tmp_path / "trained"))
    run.start_roles()
    run.wait_for_steps(3)
    hosts.cut(ROLLOUT)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() - began_s > CUT_S, 2 * CUT_S, run.logs)
    during = run.steps()
    assert during < STEPS, "the run ended before the link was cut"
    hosts.repair(ROLLOUT)
    assert run.controller_exit_code(120.0) == 0, run.logs()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    run.assert_all_succeed(20.0)
    assert f"listening on tcp://{hosts.address(CONTROLLER)}:" in run.logs()
    assert list((tmp_path / "trained").glob("*.safetensors"))
    assert not (run.dir / "final").exists()


def test_permanently_unreachable_host_ends_the_run_and_is_named(hosts: Any, start_run: Any) -> None:
    run = start_run(10_000)
    run.start_roles()
    run.wait_for_steps(3)
    hosts.cut(ROLLOUT)
    assert run.controller_exit_code(GONE_S) == 1, run.logs()
    assert "rollout-0" in run.summary()["reason"], run.summary()
