"""Hosts that have IPv6 alone: a job with keys on three of them, with a trainer on two, its status, and doctor."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.runs import CONTROLLER, FLOWRT, HOSTS, ROLLOUT, SMALL, TRAINER, Run

STEPS = 8

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def hosts(ipv6_hosts: Any) -> Iterator[Any]:
    yield ipv6_hosts
    ipv6_hosts.kill_all()


def on_each_host(hosts: Any, directory: Path) -> str:
    """A script that runs its arguments on the host that is its first one."""
    script = directory / "on"
    cases = "".join(f'{hosts.name(host)}) exec {shlex.join(hosts.on(host))} "$@";;\n' for host in HOSTS)
    script.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}esac\n")
    script.chmod(0o755)
    return str(script)


def test_a_job_on_hosts_without_ipv4(hosts: Any, keys_and_model: tuple[Path, Path], tmp_path: Path) -> None:
    """`flowrt run` on the first host; its rendezvous joins the ranks of the second and third one."""
    keys, model = keys_and_model
    on = on_each_host(hosts, tmp_path)
    both = tmp_path / "both"
    both.write_text(f'#!/bin/sh\n{on} host{ROLLOUT} "$@" &\n{on} host{TRAINER} "$@" &\nwait\n')
    both.chmod(0o755)
    run_dir = tmp_path / "run"
    launch = ["--launch.rollout-hosts", f"host{ROLLOUT}", "--launch.rollout", f"{on} $HOST"]
    launch += ["--trainer.ranks", "2", "--trainer.nodes", "2", "--launch.trainer", str(both)]
    command = [str(FLOWRT), "run", *SMALL, *launch, "--steps", str(STEPS), "--model", str(model)]
    command += ["--run-dir", str(run_dir)]
    environment = {"FLOWRT_KEYS": str(keys), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    process = hosts.start(CONTROLLER, command, log, environment)
    assert process.wait(400) == 0, log.read_text() + controller_log(run_dir)
    assert f"controller at tcp://[{hosts.address(CONTROLLER)}]:" in log.read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert all(f"{name} joined" in controller_log(run_dir) for name in ("rollout-0", "trainer-0", "trainer-1"))


def controller_log(run_dir: Path) -> str:
    return (run_dir / "logs" / "controller.log").read_text()


def test_status_and_drain_find_a_controller_at_an_ipv6_address(
    hosts: Any, keys_and_model: tuple[Path, Path], tmp_path: Path
) -> None:
    run = Run(hosts, tmp_path, *keys_and_model, 100_000)
    run.start_roles()
    run.python(ROLLOUT, "rollout-1", "-m", "flowrt.roles.rollout", "--name", "rollout-1")
    run.wait_for_log("controller", "rollout-1 joined", 120.0)
    run.wait_for_steps(2)
    assert run.address.startswith(f"tcp://[{hosts.address(CONTROLLER)}]:")
    assert "rollout-1" in run.status()["workers"]
    drain = [*hosts.on(TRAINER), "env", f"FLOWRT_KEYS={keys_and_model[0]}", str(FLOWRT), "drain", "rollout-1"]
    drained = subprocess.run([*drain, "--controller", run.address], capture_output=True, text=True, timeout=120)
    assert drained.returncode == 0, drained.stderr + run.logs()
    assert run.exit_code("rollout-1", 60.0) == 0
    hosts.kill_all()


def test_doctor_passes_hosts_without_ipv4(hosts: Any, keys_and_model: tuple[Path, Path], tmp_path: Path) -> None:
    keys, model = keys_and_model
    script = tmp_path / "everywhere"
    starts = "".join(f'{shlex.join(hosts.on(host))} "$@" &\n' for host in HOSTS)
    script.write_text(f"#!/bin/sh\n{starts}wait\n")
    script.chmod(0o755)
    command = [*hosts.on(1), "env", "COLUMNS=200", "OMP_NUM_THREADS=1", str(FLOWRT), "doctor", "--on", str(script)]
    command += ["--nodes", "3", "--keys", str(keys), "--model", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert hosts.address(1) in result.stdout
