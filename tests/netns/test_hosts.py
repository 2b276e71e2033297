"""A small arithmetic job on three hosts: a link that is cut for some seconds, and one that is cut for ever."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import wait_until
from tests.netns.runs import CONTROLLER, ROLLOUT

CUT_S = 5.0
STEPS = 60
GONE_S = 60.0  # 17 s until nobody answers, then ABSENT_S, and the rest for slow machines

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]


def test_run_on_three_hosts_survives_a_link_failure_of_five_seconds(hosts: Any, begin: Any, tmp_path: Path) -> None:
    run = begin(STEPS, "--trainer.final-dir", str(tmp_path / "trained"))
    run.staff()
    run.wait_for_steps(3)
    hosts.cut(ROLLOUT)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() - began_s > CUT_S, 2 * CUT_S, run.words)
    during = run.steps()
    assert during < STEPS, "the run was over before the cut was"
    hosts.mend(ROLLOUT)
    assert run.code(120.0) == 0, run.words()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    run.all_leave_well(20.0)
    assert f"listening on tcp://{hosts.address(CONTROLLER)}:" in run.words()
    assert list((tmp_path / "trained").glob("*.safetensors"))
    assert not (run.dir / "final").exists()


def test_permanently_unreachable_host_ends_the_run_and_is_named(hosts: Any, begin: Any) -> None:
    run = begin(10_000)
    run.staff()
    run.wait_for_steps(3)
    hosts.cut(ROLLOUT)
    assert run.code(GONE_S) == 1, run.words()
    assert "rollout-0" in run.summary()["reason"], run.summary()
