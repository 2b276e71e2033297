"""Processes that tests drive line by line (see stream_process.py), and the controller of a stream of rows."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt import api
from flowrt.controller.events import Event, MessageReceived
from flowrt.protocol import messages as m

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.integration.streams.process_server"
ANSWER_S = 30.0
GONE_S = 5.0
CHECKED_ROWS = 500
"""Up to so many live rows every invariant is asserted after every message."""


class Peer:
    """A process of its own: it is told what to do and answers, or is killed, stopped, continued."""

    def __init__(self, pid: int, orders: int, answers: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
        self.pid = pid
        self._orders = orders
        self._answers = answers
        self._transport = transport

    def command(self, do: str, **order: Any) -> None:
        """Give an order; `hear` its answer some time."""
        os.write(self._orders, json.dumps({"do": do, **order}).encode() + b"\n")

    async def answer(self, deadline_s: float = ANSWER_S) -> dict[str, Any]:
        async with asyncio.timeout(deadline_s):
            line = await self._answers.readline()
        assert line, f"process {self.pid} has ended; what it said last is above"
        return dict(json.loads(line))

    async def do(self, do: str, deadline_s: float = ANSWER_S, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its answer, which must be no error."""
        self.command(do, **order)
        answer = await self.answer(deadline_s)
        assert "error" not in answer, answer
        return answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def end(self) -> None:
        """Let it leave as it likes, and wait until it has."""
        os.close(self._orders)
        self._orders = -1
        async with asyncio.timeout(ANSWER_S):
            while await self._answers.readline():
                continue

    def close(self) -> None:
        """Kill it if it is still there."""
        if self._orders >= 0:
            os.close(self._orders)
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._transport.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait(GONE_S)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[socket.socket]:
    """A process with torch in it that forks others."""
    with fork_server_of(PROGRAM) as requests:
        yield requests


@contextlib.contextmanager
def fork_server_of(program: str) -> Iterator[socket.socket]:
    """The process that forks others, started with this module."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        command = [sys.executable, "-m", program, str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        mine.settimeout(ANSWER_S)
        yield mine
        mine.close()
        popen.wait(GONE_S)


Start = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def start(fork_server: socket.socket) -> AsyncIterator[Start]:
    """Start a process of a role and hear its first words; all are killed when the test ends."""
    peers: list[Peer] = []

    async def fork(kind: str, /, **options: Any) -> Peer:
        (theirs_in, mine_out), (mine_in, theirs_out) = os.pipe(), os.pipe()
        request = json.dumps({"role": kind, "options": options}).encode()
        socket.send_fds(fork_server, [request], [theirs_in, theirs_out])
        pid = int(await asyncio.to_thread(fork_server.recv, 100))
        os.close(theirs_in)
        os.close(theirs_out)
        reader = asyncio.StreamReader(limit=1 << 24)
        protocol = asyncio.StreamReaderProtocol(reader)
        file = os.fdopen(mine_in, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        peers.append(Peer(pid, mine_out, reader, transport))
        return peers[-1]

    yield fork
    for peer in peers:
        peer.close()


@pytest.fixture
def session_peer(start: Start) -> Start:
    """Start a process with a session: ``await puppet(address, name)``."""

    async def fork(address: str, name: str, role: str = "reader") -> Peer:
        peer = await start("session_peer", address=address, name=name, role=role)
        assert await peer.answer() == {"here": name}
        return peer

    return fork


class Stream:
    """A controller in the test's own process, with what it was told so far."""

    def __init__(self, server: api.Server, address: str) -> None:
        self.server = server
        self.address = address
        self.core = server._core
        self.table = self.core.state.table
        self.received: list[tuple[str, m.Message]] = []
        self._moved = asyncio.Event()
        plain = self.core.handle

        def handle(event: Event, now: float) -> Any:
            if isinstance(event, MessageReceived):
                self.received.append((event.worker, event.message))
            commands = plain(event, now)
            self._moved.set()
            if self.core.ended is None and len(self.table.slots) <= CHECKED_ROWS:
                self.core.check()
            return commands

        self.core.handle = handle  # type: ignore[method-assign]

    async def until(self, condition: Callable[[], object], deadline_s: float = ANSWER_S) -> None:
        """Return as soon as the condition holds; it is looked at whenever the controller has heard something."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    @property
    def waits(self) -> dict[str, str]:
        """Who waits for what."""
        return {who: what for who, what, _ in self.core.waiting()}

    def assert_empty(self) -> None:
        """No row is left, and nobody waits for one."""
        table = self.table
        assert (table.groups, table.slots, table.leases, self.waits) == ({}, {}, {}, {})
        assert (table.rows.total(), table.bytes.total(), set(table.undone.values())) <= (0, 0, {0})


POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
ROWS = api.Dataflow((api.Column("data", "float32", "group"),), (api.Stage("read", ("data", "tag"), ()),), tags=("tag",))
Run = Callable[..., AbstractAsyncContextManager[Stream]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``async with run(dataflow, lease_s=1.0) as stream``: by default rows with ``data`` and ``tag``, read once."""

    @asynccontextmanager
    async def run(flow: api.Dataflow = ROWS, **settings: Any) -> AsyncIterator[Stream]:
        async with api.controller(flow, api.Settings(**settings), POLICIES, tmp_path) as (server, address):
            yield Stream(server, address)

    return run
