"""Connections survive a link that is cut for some seconds: its silence is not taken for stopped processes."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.net.curve_keys import write_keys

SERVER = """
import asyncio, sys
from pathlib import Path
from flowrt.net.curve_keys import controller_keys
from flowrt.net.link import ServerLink
async def main():
    def on_message(peer, message):
        link.filter.on_joined(peer, link.source())  # else the filter closes the connection as unknown
        print("received", peer.hex(), flush=True)
    link = ServerLink(on_message, lambda peer, error: None, lambda: print("left", flush=True),
        controller_keys(Path(sys.argv[3])))
    Path(sys.argv[2]).write_text(link.bind(sys.argv[1]))
    while True:
        link.filter.close_stopped()
        await asyncio.sleep(0.1)
asyncio.run(main())
"""
PEERS = """
import asyncio, sys
from pathlib import Path
from flowrt.protocol import messages as m
from flowrt.net.curve_keys import worker_keys
from flowrt.net.link import ClientLink
async def main():
    links = []
    for _ in range(int(sys.argv[3])):
        links.append(ClientLink(lambda message: None, lambda error: None, worker_keys(Path(sys.argv[2]), "peer")))
        links[-1].connect(sys.argv[1])
        links[-1].send(m.Heartbeat())
        await asyncio.sleep(0.15)  # silent connections are probed every second, at different times
    while True:
        for link in links:
            link.send(m.Heartbeat())
        await asyncio.sleep(0.5)
asyncio.run(main())
"""
COUNT = 12
SHORT_S, LONG_S = 4.3, 6.5
STABLE_S = 2 * LONG_S + 3

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def log(hosts: Any, tmp_path: Path) -> Iterator[Path]:
    """The log of a server on host 1 about its peers on hosts 2 and 3."""
    log, address, keys = tmp_path / "server.log", tmp_path / "address", tmp_path / "keys"
    write_keys(keys, ["peer"])
    hosts.start(1, [sys.executable, "-c", SERVER, f"tcp://{hosts.address(1)}:0", str(address), str(keys)], log, {})
    wait_until(lambda: address.is_file() and address.read_text() != "", 60.0, log)
    for host in (2, 3):
        command = [sys.executable, "-c", PEERS, address.read_text(), str(keys), str(COUNT)]
        hosts.start(host, command, tmp_path / f"peers-{host}.log", {})
    yield log
    for host in (2, 3):
        hosts.repair(host)
    hosts.kill_all()


def test_peers_behind_repaired_links_are_kept(hosts: Any, log: Path) -> None:
    wait_until(lambda: len(peers(log)) == 2 * COUNT, 60.0, log)
    hosts.cut(2)
    hosts.cut(3)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() - began_s > SHORT_S, 60.0, log)
    hosts.repair(2)
    wait_until(lambda: time.monotonic() - began_s > LONG_S, 60.0, log)
    hosts.repair(3)
    lines_before = lines(log)
    wait_until(lambda: time.monotonic() - began_s > STABLE_S, 60.0, log)
    assert "left" not in lines(log), lines(log)
    lines_since = lines(log)[len(lines_before) :]
    assert len(set(lines_since)) == len(peers(log)) == 2 * COUNT, "all peers send again over their previous connections"


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines()


def peers(log: Path) -> set[str]:
    return {line for line in lines(log) if line.startswith("received")}


def wait_until(condition: Any, deadline_s: float, log: Path) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"after {deadline_s:.0f} s: {lines(log)[-20:] if log.exists() else 'no log'}"
        time.sleep(0.05)
