"""Hosts as namespaces: addresses and names of their own; joined by a switch, gone when the tests are.

As Debian's installer has it, each host finds its own name at 127.0.1.1, and the names of the others where they are.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.netns.runs import HOSTS, Run, make_keys_and_model, tiny

NAMED = Path("/etc/netns")
"""`ip netns exec NAME` puts what lies there under NAME over the files of /etc."""
BEGIN = """
hostname "$1"; shift
while [ "$1" != -- ]; do mount -t tmpfs nothing "$1"; shift; done
shift; exec "$@"
"""
"""A shell's words: a name, directories that this host does not share (empty here), ``--``, and the command itself."""


class Hosts:
    """Hosts 1 to n as 10.83.0.1 to 10.83.0.n, and the processes that were started on them."""

    def __init__(self, count: int) -> None:
        self._names = [f"flowrt-{os.getpid()}-{number}" for number in range(count + 1)]  # the first is the switch
        self._processes: list[subprocess.Popen[bytes]] = []

    def plug_in(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        switch = self._names[0]
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(self._names[1:], start=1):
            _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "wire", "netns", name)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            known = [f"127.0.0.1 localhost\n127.0.1.1 {self.name(number)}\n"]
            known += [f"{self.address(n)} {self.name(n)}\n" for n in range(1, len(self._names)) if n != number]
            (NAMED / name).mkdir(parents=True)
            (NAMED / name / "hosts").write_text("".join(known))

    def address(self, number: int) -> str:
        return f"10.83.0.{number}"

    def name(self, number: int) -> str:
        return f"host{number}"

    def cut(self, number: int) -> None:
        """Nothing gets to that host or from it any more; its own interface does not notice."""
        _ip("-n", self._names[0], "link", "set", f"port{number}", "nomaster")

    def mend(self, number: int) -> None:
        _ip("-n", self._names[0], "link", "set", f"port{number}", "master", "switch")

    def on(self, number: int, *lacking: Path) -> list[str]:
        """Words that run a command on a host, which has ``lacking`` empty: what others write there it never sees."""
        inside = [self.name(number), *map(str, lacking), "--"]
        return ["ip", "netns", "exec", self._names[number], "unshare", "--uts", "sh", "-ec", BEGIN, "sh", *inside]

    def start(
        self, number: int, words: list[str], log: Path, environment: Mapping[str, str], lacking: Sequence[Path] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.on(number, *lacking), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Kill what still runs on the hosts, and whatever that has started."""
        family = []
        for process in self._processes:
            if process.poll() is None:
                family += psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        for left in family:
            try:
                left.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=10)
        self._processes.clear()

    def unplug(self) -> None:
        self.end()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
            shutil.rmtree(NAMED / name, ignore_errors=True)
        if NAMED.is_dir() and not any(NAMED.iterdir()):
            NAMED.rmdir()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Three hosts."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (package iproute2)")
    hosts = Hosts(3)
    try:
        hosts.plug_in()
    except subprocess.CalledProcessError as error:
        hosts.unplug()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield hosts
    hosts.unplug()


@pytest.fixture(scope="session")
def keys_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What every host has: keys, and a model under the same path."""
    return make_keys_and_model(tmp_path_factory.mktemp("everywhere"), tiny())


@pytest.fixture
def begin(hosts: Hosts, keys_and_model: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Begins a `Run` of so many steps; its processes end with the test, and all links are whole again."""

    def start(steps: int, *flags: str, model: tuple[Path, Path] = keys_and_model, **more: Any) -> Run:
        return Run(hosts, tmp_path, *model, steps, *flags, **more)

    yield start
    for number in HOSTS:
        hosts.mend(number)
    hosts.end()
