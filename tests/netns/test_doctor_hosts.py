"""flowrt doctor on three hosts: no fault, and one fault at a time, reported with its host and remedy."""

import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.runs import FLOWRT, HOSTS

DEADLINE_S = 25.0
Doctor = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def doctor(hosts: Any, keys_and_model: tuple[Path, Path], tmp_path: Path) -> Doctor:
    """Runs the command on host 1, which checks all three; ``on`` has command prefixes for some hosts."""
    keys, model = keys_and_model

    def run(on: dict[int, list[str]] | None = None) -> Any:
        script = tmp_path / "everywhere"
        starts = "".join(f'{shlex.join([*hosts.on(host), *(on or {}).get(host, [])])} "$@" &\n' for host in HOSTS)
        script.write_text(f"#!/bin/sh\n{starts}wait\n")
        script.chmod(0o755)
        command = [*hosts.on(1), "env", "COLUMNS=200", "OMP_NUM_THREADS=1", str(FLOWRT), "doctor", "--on", str(script)]
        command += ["--nodes", "3", "--keys", str(keys), "--model", str(model), "--deadline-s", str(DEADLINE_S)]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)

    return run


@pytest.fixture
def network(hosts: Any) -> Iterator[Callable[..., None]]:
    """Changes the network of a host for the duration of a test."""
    undo: list[list[str]] = []

    def change(host: int, apply: str, revert: str) -> None:
        subprocess.run([*hosts.on(host), *apply.split()], check=True, capture_output=True, timeout=20)
        undo.append([*hosts.on(host), *revert.split()])

    yield change
    for command in undo:
        subprocess.run(command, check=True, capture_output=True, timeout=20)


def fault_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("flowrt: ")]


def test_three_healthy_hosts_pass(doctor: Doctor) -> None:
    result = doctor()
    assert (result.returncode, fault_lines(result)) == (0, []), result.stdout + result.stderr
    assert "the same everywhere" in result.stdout


def test_a_different_version_on_one_host_is_reported(doctor: Doctor, tmp_path: Path) -> None:
    other = tmp_path / "other" / "flowrt-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrt\nVersion: 9.9\n")
    result = doctor({2: ["env", f"PYTHONPATH={other.parent}"]})
    assert result.returncode == 1
    (line,) = fault_lines(result)
    assert line.startswith("flowrt: versions: flowrt, all: host1 ")
    assert "host2 9.9" in line
    assert line.endswith("install the same on every node")


def test_a_link_below_the_minimum_rate_is_reported(doctor: Doctor, network: Callable[..., None]) -> None:
    slow = "tc qdisc add dev wire root tbf rate 4mbit burst 16kb latency 400ms"
    network(3, slow, "tc qdisc del dev wire root")
    result = doctor()
    assert result.returncode == 1
    lines = fault_lines(result)
    assert [line.partition(": 0.")[0] for line in lines] == [f"flowrt: lane, host3 to host{other}" for other in (1, 2)]
    assert all("transfers below controller.min_transfer_mb_per_s (1) fail" in line for line in lines), lines


def test_hosts_that_cannot_reach_each_other_are_reported(doctor: Doctor, network: Callable[..., None]) -> None:
    network(3, "ip route add blackhole 10.83.0.2/32", "ip route del blackhole 10.83.0.2/32")
    result = doctor()
    assert result.returncode == 1
    lines = fault_lines(result)
    where = {line.partition(", ")[2].partition(":")[0] for line in lines}
    assert where == {"host2 to host3", "host3 to host2"}, result.stdout
    assert all("does a firewall stand between them?" in line for line in lines), lines


def test_a_host_that_cannot_reach_the_controller_is_reported(hosts: Any, doctor: Doctor) -> None:
    hosts.cut(3)
    try:
        result = doctor()
    finally:
        hosts.repair(3)
    assert result.returncode == 1
    first = fault_lines(result)[0]
    assert first.startswith("flowrt: controller, host3: waited 25 s for the controller at tcp://10.83.0.1:")
    assert "does a firewall close its port?" in first


def test_a_host_without_a_route_to_the_controller_is_reported(doctor: Doctor, network: Callable[..., None]) -> None:
    network(3, "ip route add unreachable 10.83.0.1/32", "ip route del unreachable 10.83.0.1/32")
    result = doctor()
    assert result.returncode == 1
    first = fault_lines(result)[0]
    assert first.startswith(
        "flowrt: controller, host3: host 'host3' has no route to the controller at tcp://10.83.0.1:"
    )
    assert "No route to host" in first
