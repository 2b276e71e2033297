"""Hosts as network namespaces with their own addresses and names, connected by a switch; removed after the tests.

As on Debian, each host resolves its own name to 127.0.1.1, and the names of the others to their addresses.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.netns.runs import HOSTS, Run, make_keys_and_model, tiny_model

NETNS_CONFIG = Path("/etc/netns")
"""`ip netns exec NAME` mounts the files of the subdirectory NAME over those of /etc."""
ENTER_HOST = """
hostname "$1"; shift
while [ "$1" != -- ]; do mount -t tmpfs nothing "$1"; shift; done
shift; exec "$@"
"""
"""Shell script; arguments: a host name, directories that are empty on this host, ``--``, and the command."""


class Hosts:
    """Hosts 1 to n with addresses 10.83.0.1 to 10.83.0.n, and the processes started on them."""

    def __init__(self, count: int, ipv6: bool = False) -> None:
        """``ipv6``: the hosts have addresses fd83::N in place of 10.83.0.N, and no IPv4 beyond loopback."""
        self._ipv6 = ipv6
        family = 6 if ipv6 else 4
        # The first is the switch.
        self._names = [f"flowrt-{os.getpid()}-{family}-{number}" for number in range(count + 1)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def create(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        switch = self._names[0]
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(self._names[1:], start=1):
            _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "wire", "netns", name)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            own = [f"{self.address(number)}/64", "nodad"] if self._ipv6 else [f"{self.address(number)}/24"]
            _ip("-n", name, "addr", "add", *own, "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            known = [f"127.0.0.1 localhost\n127.0.1.1 {self.name(number)}\n"]
            known += [f"{self.address(n)} {self.name(n)}\n" for n in range(1, len(self._names)) if n != number]
            (NETNS_CONFIG / name).mkdir(parents=True)
            (NETNS_CONFIG / name / "hosts").write_text("".join(known))

    def address(self, number: int) -> str:
        return f"fd83::{number}" if self._ipv6 else f"10.83.0.{number}"

    def name(self, number: int) -> str:
        return f"host{number}"

    def cut(self, number: int) -> None:
        """Disconnect a host from the switch; its own interface stays up."""
        _ip("-n", self._names[0], "link", "set", f"port{number}", "nomaster")

    def repair(self, number: int) -> None:
        _ip("-n", self._names[0], "link", "set", f"port{number}", "master", "switch")

    def on(self, number: int, *hidden: Path) -> list[str]:
        """The prefix that runs a command on a host where the directories ``hidden`` are empty."""
        inside = [self.name(number), *map(str, hidden), "--"]
        return ["ip", "netns", "exec", self._names[number], "unshare", "--uts", "sh", "-ec", ENTER_HOST, "sh", *inside]

    def start(
        self, number: int, command: list[str], log: Path, environment: Mapping[str, str], hidden: Sequence[Path] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.on(number, *hidden), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def kill_all(self) -> None:
        """Kill all processes on the hosts and their descendants."""
        descendants = []
        for process in self._processes:
            if process.poll() is None:
                descendants += psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=10)
        self._processes.clear()

    def remove(self) -> None:
        self.kill_all()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
            shutil.rmtree(NETNS_CONFIG / name, ignore_errors=True)
        if NETNS_CONFIG.is_dir() and not any(NETNS_CONFIG.iterdir()):
            NETNS_CONFIG.rmdir()


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True, timeout=10)


@contextmanager
def created(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts; skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (package iproute2)")
    try:
        hosts.create()
    except subprocess.CalledProcessError as error:
        hosts.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield hosts
    hosts.remove()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Three hosts."""
    with created(Hosts(3)) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def ipv6_hosts() -> Iterator[Hosts]:
    """Three hosts without IPv4."""
    with created(Hosts(3, ipv6=True)) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def keys_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Keys and a model, under the same path on every host."""
    return make_keys_and_model(tmp_path_factory.mktemp("everywhere"), tiny_model())


@pytest.fixture
def start_run(hosts: Hosts, keys_and_model: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a `Run` of N steps; its processes end and all links are repaired after the test."""

    def start(steps: int, *flags: str, model: tuple[Path, Path] = keys_and_model, **options: Any) -> Run:
        return Run(hosts, tmp_path, *model, steps, *flags, **options)

    yield start
    for number in HOSTS:
        hosts.repair(number)
    hosts.kill_all()
