"""Peers that fill the controller's memory or its connection table without sending a valid message."""

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flowrt import api
from flowrt.errors import RemoteProtocolError
from flowrt.net.connection_filter import MAX_UNDELIVERED_BYTES, received_bytes
from flowrt.protocol.codec import MAX_MESSAGE_BYTES

FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
DEADLINE_S = 60.0
ENDLESS_MESSAGE = """
import socket, sys, time
host, _, port = sys.argv[1].removeprefix("tcp://").rpartition(":")
peer = socket.create_connection((host, int(port)))
# ZMTP 3.0 (rfc.zeromq.org/spec/23): the greeting, READY, then parts with the MORE flag.
peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32))
ready = b"\\x05READY" + b"\\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
peer.sendall(b"\\x04" + bytes([len(ready)]) + ready)
part, sent = b"\\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20), 0
try:
    while sent < 4096:
        peer.sendall(part)
        sent += 1
        time.sleep(0.005)  # about 200 MB/s
except OSError:
    print(sent << 20)
else:
    sys.exit("4 GB were sent, and the connection is still open")
"""
MANY_PARTS = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
socket.connect(sys.argv[1])
socket.send_multipart([b"x"] * 300_000)
assert events.poll(20_000), "still connected after 20 s"
print(0, flush=True)
"""
LARGE_BYTES = MAX_MESSAGE_BYTES + (1 << 20)
LARGE_FRAME = MANY_PARTS.replace('[b"x"] * 300_000', f"[bytes({LARGE_BYTES})]")
GREETING = b"\xff" + bytes(8) + b"\x7f"


async def peak_of(address: str, program: str) -> tuple[int, int]:
    """The number that the program prints, and the peak growth of this process, the controller's, meanwhile."""
    before, peak = psutil.Process().memory_info().rss, 0
    command = [sys.executable, "-c", program, address]
    work = asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=DEADLINE_S)
    running = asyncio.create_task(work)
    while not running.done():
        await asyncio.wait([running], timeout=0.02)
        peak = max(peak, psutil.Process().memory_info().rss - before)
    ended = await running
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout), peak


async def test_endless_message_closes_the_connection_and_affects_no_other(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        sent, grown = await peak_of(address, ENDLESS_MESSAGE)
        assert grown < 5 * MAX_UNDELIVERED_BYTES, f"{grown >> 20} MB of {sent >> 20} were kept"
        session = await api.connect(address, "reader", "reader", DEADLINE_S)
        await session.close()
        assert server.ended is None
        assert server.refused_connections == 1


async def test_a_message_of_many_parts_closes_the_connection(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        _, grown = await peak_of(address, MANY_PARTS)
        assert grown < MAX_UNDELIVERED_BYTES
        assert server.refused_messages == 1
        assert server.ended is None


async def test_a_frame_over_the_limit_closes_the_connection_before_it_is_read(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", DEADLINE_S)
        _, grown = await peak_of(address, LARGE_FRAME)
        assert grown < LARGE_BYTES // 2, f"{grown >> 20} MB were kept"
        assert server.refused_messages == 0, "it was received before it was refused"
        with pytest.raises(RemoteProtocolError):  # an answer
            await session.pull("no such stage", slots=1)
        assert server.ended is None
        await session.close()


@pytest.mark.parametrize("data", [b"", GREETING], ids=["nothing", "half a greeting"])
async def test_connection_without_hello_is_closed(tmp_path: Path, data: bytes) -> None:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", DEADLINE_S)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        async with asyncio.timeout(DEADLINE_S):
            await reader.read()  # to its end: the controller's half of the greeting comes first
        writer.close()
        assert server.refused_connections == 1
        with pytest.raises(RemoteProtocolError):
            await session.pull("no such stage", slots=1)
        assert server.ended is None
        await session.close()


async def test_large_delivered_volume_closes_no_connection(tmp_path: Path) -> None:
    """More bytes than a connection may have undelivered, in complete messages: all are processed."""
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", DEADLINE_S)
        backlog = server._link.filter.backlog
        (descriptor,) = backlog._descriptors
        note = "n" * (1 << 20)
        for _ in range(2 * (MAX_UNDELIVERED_BYTES >> 20)):
            session.report({note: 1.0})
            await asyncio.sleep(0)
        with pytest.raises(RemoteProtocolError):  # the last is answered when all before it are read
            await session.pull("no such stage", slots=1)
        assert received_bytes(descriptor) > 2 * MAX_UNDELIVERED_BYTES
        assert backlog.find_excessive() == backlog.find_excessive() == []
        assert server.ended is None
        await session.close()
