"""Unauthenticated connections without a hello or with a foreign protocol are closed, counted and bounded."""

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flowrt import api
from flowrt.errors import EXIT_DISMISSED, RemoteProtocolError, Stopped
from flowrt.net import connection_filter
from flowrt.protocol import messages as m

FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
TIMEOUT_S = 120.0
OLD_ZMTP = b"\x01\x00" + b"\x02\x00x" * 1000
FLOODING_CLIENTS = """
import socket, sys, threading, time
host, _, port = sys.argv[1].removeprefix("tcp://").rpartition(":")
ready = b"\\x05READY" + b"\\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
part = b"\\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
def send():
    peer = socket.create_connection((host, int(port)))
    try:
        peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32))
        peer.sendall(b"\\x04" + bytes([len(ready)]) + ready)
        peer.recv(200)
        for _ in range(120):
            peer.sendall(part)
        peer.recv(1 << 20)
        while peer.recv(1 << 20):
            pass
    except OSError:
        pass
threads = [threading.Thread(target=send) for _ in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


async def wait_disconnected(address: str, data: bytes) -> None:
    """Return when the controller has closed a connection that sends only ``data``; fail after TIMEOUT_S."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("data", [OLD_ZMTP, b"\x01\x00", bytes(range(256)) * 16, b"GET / HTTP/1.0\r\n\r\n"])
async def test_connections_with_a_foreign_protocol_are_closed_and_logged_briefly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", TIMEOUT_S)
        start_s = time.monotonic()
        with caplog.at_level(logging.INFO):
            await asyncio.gather(*(wait_disconnected(address, data) for _ in range(50)))
        assert len(caplog.records) <= 5 + 2 * (time.monotonic() - start_s)
        assert "Traceback" not in caplog.text
        assert server.refused_connections >= 50
        with pytest.raises(RemoteProtocolError):  # answered: the session still works
            await session.pull("no such stage", slots=1)
        await session.close()


async def test_connection_that_never_sends_hello_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_filter, "HELLO_TIMEOUT_S", 0.5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", TIMEOUT_S)
        await wait_disconnected(address, greeting + b"\x04" + bytes([len(ready)]) + ready)
        assert server.refused_connections == 1
        assert server.ended is None
        await asyncio.wait([asyncio.create_task(session.wait_stopped())], timeout=1.0)
        assert server._connections.workers() == ["reader"], "a joined worker has no such limit"
        await session.close()


async def test_unauthenticated_connections_use_bounded_memory(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        before, peak = psutil.Process().memory_info().rss, 0
        with subprocess.Popen([sys.executable, "-c", FLOODING_CLIENTS, address]) as clients:  # noqa: ASYNC220
            end_s = time.monotonic() + TIMEOUT_S
            while clients.poll() is None:
                assert time.monotonic() < end_s, "a client still waits for a closed connection"
                await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.01)
                peak = max(peak, psutil.Process().memory_info().rss - before)
        assert clients.returncode == 0
        assert peak < 600 << 20, f"{peak >> 20} MB at most"
        after = psutil.Process().memory_info().rss - before
        assert after < 100 << 20, f"{after >> 20} MB are kept"
        assert server.refused_connections >= 24
        session = await api.connect(address, "reader", "reader", TIMEOUT_S)
        await session.close()


async def test_a_worker_that_floods_another_with_rendezvous_keys_is_dismissed(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        receiver = await api.connect(address, "receiver", "reader", TIMEOUT_S)
        flooder = await api.connect(address, "flooder", "reader", TIMEOUT_S)
        for _ in range(1000):
            flooder.send(m.RendezvousKey("receiver", "lane", "key", bytes(16 << 10)))
        with pytest.raises(Stopped, match="more rendezvous keys than lanes need") as stopped:
            async with asyncio.timeout(TIMEOUT_S):
                await flooder.wait_stopped()
        assert stopped.value.code == EXIT_DISMISSED
        assert server.ended is None
        await flooder.close()
        await receiver.close()


async def test_a_dismissed_worker_receives_the_reason_when_it_reconnects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        reader = await api.connect(address, "reader", "reader", TIMEOUT_S)
        monkeypatch.setattr(reader._connection._link, "_on_message", lambda _: None)  # the dismissal is lost
        reader.send(m.OfferAccepted(1, 1))
        async with asyncio.timeout(TIMEOUT_S):
            while "reader" in server._connections:
                await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.01)
        reader._connection._lose()
        with pytest.raises(Stopped, match="OfferAccepted, which only the controller says") as stopped:
            async with asyncio.timeout(TIMEOUT_S):
                await reader.wait_stopped()
        assert stopped.value.code == EXIT_DISMISSED
        await reader.close()
        again = await api.connect(address, "reader", "reader", TIMEOUT_S)  # another process may join under its name
        await again.close()


async def test_a_request_with_an_oversized_name_does_not_end_the_run(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        observer = await api.connect(address, "watcher", "observer", TIMEOUT_S)
        observer.send(m.Drain(1, "\0" * 20_000_000))
        with pytest.raises((RemoteProtocolError, Stopped)):
            await observer.pull("no such stage", slots=1)
        assert server.ended is None
        await observer.close()
