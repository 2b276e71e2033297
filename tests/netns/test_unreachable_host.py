"""A permanently unreachable host: the run ends or continues without it, and the processes on that host exit."""

import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.netns.runs import CONTROLLER, ROLLOUT, ROOT, TRAINER, Run

WORKER = {"rollout": "rollout-0", "reward": "reward-0", "trainer": "trainer-0"}
RECONNECT_TIMEOUT_S = 10.0
SILENCE_REPORTED_S = 5.0  # the controller reports that it receives nothing over a link
WORKER_LOST_S = 17.0  # the controller removes the worker behind it
WORKER_EXIT_S = 30.0 + RECONNECT_TIMEOUT_S  # of the worker: unanswered heartbeats, then the timeout for reconnecting
MARGIN_S = 15.0  # for a loaded machine
TCP_RETRIES, TCP_RETRIES_S = 6, 26.0  # retransmissions by the kernel, and how long they take

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


def process_tree(run: Run, name: str) -> list[psutil.Process]:
    process = psutil.Process(run.processes[name].pid)
    return [process, *process.children(recursive=True)]


def assert_exits(run: Run, name: str, deadline_s: float, processes: list[psutil.Process]) -> None:
    """The process exits with code 1 by the deadline, and all of its children have ended."""
    assert run.exit_code(name, max(deadline_s, 1.0)) == 1, run.logs()
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def assert_reports_the_reason(run: Run, name: str) -> None:
    assert f"went away and did not come back within {RECONNECT_TIMEOUT_S:.0f} s" in run.log(name).splitlines()[-1]


def start_with_remote(start_run: Callable[..., Run], remote_role: str, *flags: str) -> Run:
    """Start a run with one role on another host and all others on the controller's host."""
    run = start_run(10_000, "--controller.reconnect-timeout-s", str(RECONNECT_TIMEOUT_S), *flags)
    for role in ("source", *WORKER):
        run.python(ROLLOUT if role == remote_role else CONTROLLER, role, f"{ROOT}/workers/{role}.py")
    return run


@pytest.mark.parametrize(("remote_role", "ended_s"), [("trainer", WORKER_LOST_S), ("reward", WORKER_LOST_S + 15.0)])
def test_loss_of_the_only_worker_of_a_role_ends_the_run(
    hosts: Any, start_run: Callable[..., Run], remote_role: str, ended_s: float
) -> None:
    run = start_with_remote(start_run, remote_role)
    run.wait_for_steps(3)
    processes = process_tree(run, remote_role)
    hosts.cut(ROLLOUT)
    cut_s = time.monotonic()
    run.wait_for_log("controller", f"nothing has come from {WORKER[remote_role]} for", SILENCE_REPORTED_S + MARGIN_S)
    match = re.search(rf"nothing has come from {WORKER[remote_role]} for ([0-9.]+) s", run.log("controller"))
    assert match is not None
    assert float(match[1]) < SILENCE_REPORTED_S
    assert run.controller_exit_code(ended_s + MARGIN_S) == 1, run.logs()
    reason = run.summary()["reason"]
    assert f"{WORKER[remote_role]}: its connection is closed" in reason
    assert reason.endswith("(on host 'host2')")
    for name in {"source", *WORKER} - {remote_role}:
        assert run.exit_code(name, MARGIN_S) == 0, (name, run.logs())
    assert_exits(run, remote_role, cut_s + WORKER_EXIT_S + MARGIN_S - time.monotonic(), processes)
    assert_reports_the_reason(run, remote_role)


def test_run_continues_without_one_of_its_rollout_workers(hosts: Any, start_run: Callable[..., Run]) -> None:
    run = start_with_remote(start_run, "rollout", "--supervisor.role-vacancy-timeout-s", "5")
    run.python(CONTROLLER, "rollout-near", f"{ROOT}/workers/rollout.py", "--name", "near")
    run.wait_for_steps(3)
    processes = process_tree(run, "rollout")
    hosts.cut(ROLLOUT)
    run.wait_for_log("controller", f"nothing has come from {WORKER['rollout']} for", SILENCE_REPORTED_S + MARGIN_S)
    assert list(run.status()["cut_off"]) == [WORKER["rollout"]]
    assert_exits(run, "rollout", WORKER_EXIT_S + MARGIN_S, processes)
    assert_reports_the_reason(run, "rollout")
    assert "rollout-0 is gone: its connection is closed" in run.log("controller")
    run.wait_for_steps(run.steps() + 3)
    run.processes["controller"].send_signal(signal.SIGINT)
    assert run.controller_exit_code(MARGIN_S) == 130, run.logs()
    for name in set(run.processes) - {"controller", "rollout"}:
        assert run.exit_code(name, MARGIN_S) == 0, (name, run.logs())
    summary = run.summary()
    assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)


def test_torchrun_exits_on_a_trainer_host_that_is_cut_off(hosts: Any, start_run: Callable[..., Run]) -> None:
    """torchrun waits for its store on another host until the kernel's TCP timeout, by default 15 minutes."""
    set_retries = f"echo {TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2"
    subprocess.run([*hosts.on(ROLLOUT), "sh", "-c", set_retries], check=True, timeout=20)
    run = start_run(10_000, "--controller.reconnect-timeout-s", str(RECONNECT_TIMEOUT_S), "--trainer.ranks", "2")
    for role in ("source", "reward", "rollout"):
        run.python(CONTROLLER, role, f"{ROOT}/workers/{role}.py")
    command: tuple[str, ...] = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-id",
        "trainer",
        "--rdzv-backend",
        "c10d",
    )
    command += ("--rdzv-endpoint", f"{hosts.name(TRAINER)}:29400", f"{ROOT}/workers/trainer.py")
    for host, name in ((TRAINER, "trainer-store"), (ROLLOUT, "trainer-far")):
        run.torchrun(host, name, *command)
    run.wait_for_steps(3)
    processes = process_tree(run, "trainer-far")
    hosts.cut(ROLLOUT)
    cut_s = time.monotonic()
    assert run.controller_exit_code(WORKER_LOST_S + MARGIN_S) == 1, run.logs()
    assert run.summary()["reason"].startswith("trainer-"), run.summary()
    for name in ("source", "reward", "rollout"):
        assert run.exit_code(name, MARGIN_S) == 0, (name, run.logs())
    assert run.exit_code("trainer-store", MARGIN_S) == 1
    assert_exits(run, "trainer-far", cut_s + TCP_RETRIES_S + MARGIN_S - time.monotonic(), processes)
