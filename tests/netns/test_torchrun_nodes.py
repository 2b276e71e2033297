"""A trainer on two hosts, each with a torchrun as a user types it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.netns.runs import CONTROLLER, ROLLOUT, ROOT, TRAINER, Run

STEPS = 5
PORT = 29400  # in a namespace of its own it is always free
TOGETHER = ("--nnodes", "2", "--rdzv-id", "trainer", "--rdzv-backend", "c10d")
SCRIPT, MODULE = (f"{ROOT}/workers/trainer.py",), ("-m", "flowrt.roles.trainer")

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


def generate(run: Run) -> None:
    run.python(CONTROLLER, "source", "-m", "flowrt.roles.source")
    run.python(CONTROLLER, "reward", f"{ROOT}/workers/reward.py")
    run.torchrun(ROLLOUT, "rollout", "--standalone", "--nproc-per-node", "1", "-m", "flowrt.roles.rollout")


def all_trained(run: Run) -> None:
    assert run.code(120.0) == 0, run.words()
    summary = run.summary()
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    run.all_leave_well(30.0)


def test_two_torchruns_with_a_rendezvous_host_name(hosts: Any, begin: Callable[..., Run]) -> None:
    run = begin(STEPS, "--trainer.ranks", "2")
    generate(run)
    words = (*TOGETHER, "--nproc-per-node", "1", "--rdzv-endpoint", f"{hosts.name(TRAINER)}:{PORT}")
    run.torchrun(TRAINER, "trainer-here", *words, *SCRIPT)
    run.torchrun(ROLLOUT, "trainer-there", *words, *MODULE)
    all_trained(run)


def test_two_torchruns_of_two_ranks_with_a_rendezvous_address(hosts: Any, begin: Callable[..., Run]) -> None:
    run = begin(STEPS, "--trainer.ranks", "4")
    generate(run)
    words = (*TOGETHER, "--nproc-per-node", "2", "--rdzv-endpoint", f"{hosts.address(TRAINER)}:{PORT}", "--local-addr")
    run.torchrun(TRAINER, "trainer-here", "--rdzv-conf", "is_host=1", *words, hosts.address(TRAINER), *SCRIPT)
    run.torchrun(ROLLOUT, "trainer-there", *words, hosts.address(ROLLOUT), *MODULE)
    all_trained(run)


def test_name_that_resolves_to_loopback_on_every_host_ends_the_run_with_the_fix(
    hosts: Any, begin: Callable[..., Run]
) -> None:
    run = begin(STEPS, "--trainer.ranks", "2")
    words = (*TOGETHER, "--nproc-per-node", "1", "--rdzv-endpoint", f"{hosts.name(TRAINER)}:{PORT}")
    for host, name, trainer in ((TRAINER, "trainer-here", SCRIPT), (ROLLOUT, "trainer-there", MODULE)):
        run.torchrun(host, name, *words, "--local-addr", "localhost", *trainer, "--connect-timeout-s", "20")
    assert run.code(60.0) == 1, run.words()
    assert run.summary()["reason"].startswith("trainer-1: ")
    assert [run.left(name, 40.0) for name in ("trainer-here", "trainer-there")] == [1, 1]
    said = run.said("trainer-here") + run.said("trainer-there")
    assert "cannot reach the store of the ranks at localhost:" in said
    assert "which resolves to 127.0.0.1 here: Connection refused" in said
    assert "--local-addr" in said
