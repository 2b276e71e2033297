"""Processes that tests control line by line (see stream_process.py), and the controller of a stream of rows."""

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
ANSWER_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 60.0
MAX_CHECKED_ROWS = 500
"""With at most this number of live rows, every invariant is asserted after every message."""


class Peer:
    """A process that receives commands and answers them; a test can kill, stop and continue it."""

    def __init__(
        self, pid: int, command_fd: int, answers: asyncio.StreamReader, transport: asyncio.BaseTransport
    ) -> None:
        self.pid = pid
        self._command_fd = command_fd
        self._answers = answers
        self._transport = transport

    def command(self, do: str, **arguments: Any) -> None:
        """Send a command; read its answer later with `answer`."""
        os.write(self._command_fd, json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def answer(self, deadline_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        async with asyncio.timeout(deadline_s):
            line = await self._answers.readline()
        assert line, f"process {self.pid} has ended; its last output is above"
        return dict(json.loads(line))

    async def do(self, do: str, deadline_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer, which must be no error."""
        self.command(do, **arguments)
        answer = await self.answer(deadline_s)
        assert "error" not in answer, answer
        return answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def end(self) -> None:
        """Close its standard input and wait until it has exited."""
        os.close(self._command_fd)
        self._command_fd = -1
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while await self._answers.readline():
                continue

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._command_fd >= 0:
            os.close(self._command_fd)
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._transport.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait(EXIT_TIMEOUT_S)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[socket.socket]:
    """A process with torch loaded that forks others."""
    with fork_server_of(PROGRAM) as requests:
        yield requests


@contextlib.contextmanager
def fork_server_of(program: str) -> Iterator[socket.socket]:
    """A fork server that runs this module."""
    parent_end, child_end = socket.socketpair()
    with parent_end, child_end:
        command = [sys.executable, "-m", program, str(child_end.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        popen = subprocess.Popen(command, pass_fds=[child_end.fileno()], env=environment, cwd=ROOT)
        child_end.close()
        parent_end.settimeout(ANSWER_TIMEOUT_S)
        yield parent_end
        parent_end.close()
        popen.wait(EXIT_TIMEOUT_S)


Start = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def start(fork_server: socket.socket) -> AsyncIterator[Start]:
    """Start a process of a role; all are killed when the test ends."""
    peers: list[Peer] = []

    async def fork(kind: str, /, **options: Any) -> Peer:
        (child_in, parent_out), (parent_in, child_out) = os.pipe(), os.pipe()
        request = json.dumps({"role": kind, "options": options}).encode()
        socket.send_fds(fork_server, [request], [child_in, child_out])
        pid = int(await asyncio.to_thread(fork_server.recv, 100))
        os.close(child_in)
        os.close(child_out)
        reader = asyncio.StreamReader(limit=1 << 24)
        protocol = asyncio.StreamReaderProtocol(reader)
        file = os.fdopen(parent_in, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        peers.append(Peer(pid, parent_out, reader, transport))
        return peers[-1]

    yield fork
    for peer in peers:
        peer.close()


@pytest.fixture
def session_peer(start: Start) -> Start:
    """Start a process with a session: ``await session_peer(address, name)``."""

    async def fork(address: str, name: str, role: str = "reader") -> Peer:
        peer = await start("session_peer", address=address, name=name, role=role)
        assert await peer.answer() == {"connected": name}
        return peer

    return fork


class Stream:
    """A controller in the process of the test, with the messages that it has received."""

    def __init__(self, server: api.Server, address: str) -> None:
        self.server = server
        self.address = address
        self.core = server._core
        self.table = self.core.state.table
        self.received: list[tuple[str, m.Message]] = []
        self._event_handled = asyncio.Event()
        original = self.core.handle

        def handle(event: Event, now: float) -> Any:
            if isinstance(event, MessageReceived):
                self.received.append((event.worker, event.message))
            commands = original(event, now)
            self._event_handled.set()
            if self.core.ended is None and len(self.table.slots) <= MAX_CHECKED_ROWS:
                self.core.check()
            return commands

        self.core.handle = handle  # type: ignore[method-assign]

    async def until(self, condition: Callable[[], object], deadline_s: float = ANSWER_TIMEOUT_S) -> None:
        """Return as soon as the condition holds; it is checked after every event that the controller handles."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                self._event_handled.clear()
                await self._event_handled.wait()

    def expire_leases(self, worker: str) -> None:
        """Let the leases of a worker end at the next tick."""
        for lease in self.table.leases.values():
            if lease.worker == worker:
                lease.deadline_s = 0.0

    @property
    def waits(self) -> dict[str, str]:
        """What each waiting worker waits for."""
        return {worker: what for worker, what, _ in self.core.waiting()}

    def assert_empty(self) -> None:
        """No row is left, and no worker waits for one."""
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
