"""A host that is cut off for ever: the run does what it says, and what is left on that host leaves by itself."""

import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.netns.runs import CONTROLLER, ROLLOUT, ROOT, TRAINER, Run

NAME = {"rollout": "rollout-0", "reward": "reward-0", "trainer": "trainer-0"}
RETURN_S = 10.0
SEEN_S = 5.0  # when the controller says that nothing comes over a link any more, …
NOTICED_S = 17.0  # … and when it gives up who is behind it
ALONE_S = 30.0 + RETURN_S  # that of a worker: so many heartbeats, then the wait for a controller that comes back
SLOW_S = 15.0  # for a machine that has other things to do
RETRIES, RETRIED_S = 6, 26.0  # how often the kernel repeats what is not acknowledged, and how long that takes it

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


def family(run: Run, name: str) -> list[psutil.Process]:
    one = psutil.Process(run.processes[name].pid)
    return [one, *one.children(recursive=True)]


def leaves_alone(run: Run, name: str, left_s: float, processes: list[psutil.Process]) -> None:
    """What is cut off leaves by the deadline, with exit code 1 and nobody left behind."""
    assert run.left(name, max(left_s, 1.0)) == 1, run.words()
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def says_why(run: Run, name: str) -> None:
    assert f"went away and did not come back within {RETURN_S:.0f} s" in run.said(name).splitlines()[-1]


def begun(begin: Callable[..., Run], far: str, *flags: str) -> Run:
    """A run of which one role is far away, and all others are beside the controller."""
    run = begin(10_000, "--controller.reconnect-timeout-s", str(RETURN_S), *flags)
    for role in ("source", *NAME):
        run.python(ROLLOUT if role == far else CONTROLLER, role, f"{ROOT}/workers/{role}.py")
    return run


@pytest.mark.parametrize(("far", "ended_s"), [("trainer", NOTICED_S), ("reward", NOTICED_S + 15.0)])
def test_loss_of_the_only_worker_of_a_role_ends_the_run(
    hosts: Any, begin: Callable[..., Run], far: str, ended_s: float
) -> None:
    run = begun(begin, far)
    run.wait_for_steps(3)
    processes = family(run, far)
    hosts.cut(ROLLOUT)
    cut_s = time.monotonic()
    run.wait_for_word("controller", f"nothing has come from {NAME[far]} for", SEEN_S + SLOW_S)
    seen = re.search(rf"nothing has come from {NAME[far]} for ([0-9.]+) s", run.said("controller"))
    assert seen is not None
    assert float(seen[1]) < SEEN_S
    assert run.code(ended_s + SLOW_S) == 1, run.words()
    reason = run.summary()["reason"]
    assert f"{NAME[far]}: its connection is closed" in reason
    assert reason.endswith("(on host 'host2')")
    for name in {"source", *NAME} - {far}:
        assert run.left(name, SLOW_S) == 0, (name, run.words())
    leaves_alone(run, far, cut_s + ALONE_S + SLOW_S - time.monotonic(), processes)
    says_why(run, far)


def test_run_continues_without_one_of_its_rollout_workers(hosts: Any, begin: Callable[..., Run]) -> None:
    run = begun(begin, "rollout", "--supervisor.role-vacancy-timeout-s", "5")
    run.python(CONTROLLER, "rollout-near", f"{ROOT}/workers/rollout.py", "--name", "near")
    run.wait_for_steps(3)
    processes = family(run, "rollout")
    hosts.cut(ROLLOUT)
    run.wait_for_word("controller", f"nothing has come from {NAME['rollout']} for", SEEN_S + SLOW_S)
    assert list(run.status()["cut_off"]) == [NAME["rollout"]]
    leaves_alone(run, "rollout", ALONE_S + SLOW_S, processes)
    says_why(run, "rollout")
    assert "rollout-0 is gone: its connection is closed" in run.said("controller")
    run.wait_for_steps(run.steps() + 3)
    run.processes["controller"].send_signal(signal.SIGINT)
    assert run.code(SLOW_S) == 130, run.words()
    for name in set(run.processes) - {"controller", "rollout"}:
        assert run.left(name, SLOW_S) == 0, (name, run.words())
    summary = run.summary()
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)


def test_a_trainers_host_that_is_cut_off_leaves_no_torchrun_behind(hosts: Any, begin: Callable[..., Run]) -> None:
    """torchrun waits for its store on another host for as long as the kernel does: 15 minutes as it is by default."""
    less = f"echo {RETRIES} > /proc/sys/net/ipv4/tcp_retries2"
    subprocess.run([*hosts.on(ROLLOUT), "sh", "-c", less], check=True, timeout=20)
    run = begin(10_000, "--controller.reconnect-timeout-s", str(RETURN_S), "--trainer.ranks", "2")
    for role in ("source", "reward", "rollout"):
        run.python(CONTROLLER, role, f"{ROOT}/workers/{role}.py")
    words: tuple[str, ...] = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-id",
        "trainer",
        "--rdzv-backend",
        "c10d",
    )
    words += ("--rdzv-endpoint", f"{hosts.name(TRAINER)}:29400", f"{ROOT}/workers/trainer.py")
    for host, name in ((TRAINER, "trainer-store"), (ROLLOUT, "trainer-far")):
        run.torchrun(host, name, *words)
    run.wait_for_steps(3)
    processes = family(run, "trainer-far")
    hosts.cut(ROLLOUT)
    cut_s = time.monotonic()
    assert run.code(NOTICED_S + SLOW_S) == 1, run.words()
    assert run.summary()["reason"].startswith("trainer-"), run.summary()
    for name in ("source", "reward", "rollout"):
        assert run.left(name, SLOW_S) == 0, (name, run.words())
    assert run.left("trainer-store", SLOW_S) == 1
    leaves_alone(run, "trainer-far", cut_s + RETRIED_S + SLOW_S - time.monotonic(), processes)
