"""A trainer on two hosts, started by one torchrun command on each."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.netns.runs import CONTROLLER, ROLLOUT, ROOT, TRAINER, Run

STEPS = 5
PORT = 29400  # always free in a new network namespace
RENDEZVOUS = ("--nnodes", "2", "--rdzv-id", "trainer", "--rdzv-backend", "c10d")
SCRIPT, MODULE = (f"{ROOT}/workers/trainer.py",), ("-m", "flowrt.roles.trainer")

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


def start_generation(run: Run) -> None:
    run.python(CONTROLLER, "source", "-m", "flowrt.roles.source")
    run.python(CONTROLLER, "reward", f"{ROOT}/workers/reward.py")
    run.torchrun(ROLLOUT, "rollout", "--standalone", "--nproc-per-node", "1", "-m", "flowrt.roles.rollout")


def assert_all_trained(run: Run) -> None:
    assert run.controller_exit_code(120.0) == 0, run.logs()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    run.assert_all_succeed(30.0)


def test_two_torchruns_with_a_rendezvous_host_name(hosts: Any, start_run: Callable[..., Run]) -> None:
    run = start_run(STEPS, "--trainer.ranks", "2")
    start_generation(run)
    command = (*RENDEZVOUS, "--nproc-per-node", "1", "--rdzv-endpoint", f"{hosts.name(TRAINER)}:{PORT}")
    run.torchrun(TRAINER, "trainer-here", *command, *SCRIPT)
    run.torchrun(ROLLOUT, "trainer-there", *command, *MODULE)
    assert_all_trained(run)


def test_two_torchruns_of_two_ranks_with_a_rendezvous_address(hosts: Any, start_run: Callable[..., Run]) -> None:
    run = start_run(STEPS, "--trainer.ranks", "4")
    start_generation(run)
    command = (
        *RENDEZVOUS,
        "--nproc-per-node",
        "2",
        "--rdzv-endpoint",
        f"{hosts.address(TRAINER)}:{PORT}",
        "--local-addr",
    )
    run.torchrun(TRAINER, "trainer-here", "--rdzv-conf", "is_host=1", *command, hosts.address(TRAINER), *SCRIPT)
    run.torchrun(ROLLOUT, "trainer-there", *command, hosts.address(ROLLOUT), *MODULE)
    assert_all_trained(run)


def test_rendezvous_name_that_resolves_to_loopback_ends_the_run_with_a_remedy(
    hosts: Any, start_run: Callable[..., Run]
) -> None:
    run = start_run(STEPS, "--trainer.ranks", "2")
    command = (*RENDEZVOUS, "--nproc-per-node", "1", "--rdzv-endpoint", f"{hosts.name(TRAINER)}:{PORT}")
    for host, name, trainer in ((TRAINER, "trainer-here", SCRIPT), (ROLLOUT, "trainer-there", MODULE)):
        run.torchrun(host, name, *command, "--local-addr", "localhost", *trainer, "--connect-timeout-s", "20")
    assert run.controller_exit_code(60.0) == 1, run.logs()
    assert run.summary()["reason"].startswith("trainer-1: ")
    assert [run.exit_code(name, 40.0) for name in ("trainer-here", "trainer-there")] == [1, 1]
    logs = run.log("trainer-here") + run.log("trainer-there")
    assert "cannot reach the store of the ranks at localhost:" in logs
    assert "which resolves to 127.0.0.1 here: Connection refused" in logs
    assert "--local-addr" in logs
