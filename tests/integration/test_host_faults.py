"""Host faults: a full disk, no free file descriptors, a locked or corrupt ledger, a clock that steps back.

Each gives one clear error and an exit code, and loses nothing that was committed.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt import api
from flowrt.controller.core import Core
from flowrt.controller.events import AppendLedger
from flowrt.controller.server.server import Server
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.storage.run_files import RunFiles
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.controller.storage.sample_store import SAMPLES
from flowrt.errors import ConfigError, FlowError, Stopped
from flowrt.protocol.messages import unpack
from flowrt.recipes.config_io import defaults, to_toml

DEADLINE_S = 60.0


class Controller:
    """A controller process. Its log is read from a pipe, which a full disk does not affect."""

    def __init__(self, directory: Path, bind: str = "tcp://127.0.0.1:0") -> None:
        self.run_dir = directory / "run"
        base = defaults("arithmetic")
        controller_options = dataclasses.replace(base.controller, bind=bind)
        config = directory / "config.toml"
        config.write_text(to_toml(dataclasses.replace(base, run_dir=str(self.run_dir), controller=controller_options)))
        command = [sys.executable, "-m", "flowrt.launcher.controller_main", "--config", str(config)]
        self._popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log_lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        self.log_lines += iter(self._popen.stderr.readline, "")

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        return "".join(self.log_lines)

    async def address(self) -> str:
        path = self.run_dir / "address"
        await self.wait_until(lambda: path.is_file() and path.read_text().endswith("\n"))
        return path.read_text().strip()

    async def wait_until(self, condition: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                assert self._popen.poll() is None, self.log
                await asyncio.sleep(0.02)

    def exit_code(self) -> int:
        code = self._popen.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert "Traceback" not in self.log, self.log
        return code

    def errors(self) -> list[str]:
        return [line for line in self.log_lines if " ERROR " in line]

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._popen.stderr is not None
        self._popen.stderr.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    process = Controller(tmp_path)
    yield process
    process.close()


async def offer(session: api.Session, prompt: int) -> None:
    columns = {"prompt": torch.zeros(3, dtype=torch.int32), "answer": torch.zeros(1, dtype=torch.uint8)}
    assert await session.offer("train", prompt, 0, 2, columns, deadline_s=DEADLINE_S) is not None


@contextlib.asynccontextmanager
async def connected(address: str, name: str) -> AsyncIterator[api.Session]:
    session = await api.connect(address, name, name, DEADLINE_S)
    try:
        yield session
    finally:
        await session.close()


def prompts_of(path: Path) -> dict[int, str]:
    """The prompt states in the ledger, read over another connection."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with LedgerReader(path) as ledger:
        return dict(ledger.query("SELECT prompt, state FROM prompts"))


@pytest.mark.slow
async def test_a_full_disk_stops_the_run_with_one_error(controller: Controller) -> None:
    ledger = controller.run_dir / "ledger.sqlite"
    async with connected(await controller.address(), "source") as source:
        await offer(source, 1)
        await controller.wait_until(lambda: prompts_of(ledger) == {1: "in_flight"})
        resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, (0, 0))  # no file can grow
        await offer(source, 2)
        with pytest.raises(Stopped, match=r"ledger\.sqlite cannot be written: .* is the disk full\?"):
            await asyncio.wait_for(source.wait_stopped(), DEADLINE_S)
    assert controller.exit_code() == 1
    [error] = controller.errors()
    assert "ledger.sqlite cannot be written" in error
    assert prompts_of(ledger) == {1: "in_flight"}
    assert not (controller.run_dir / "summary.json").exists()


MAX_CLOSED = 8
"""Descriptors that were open while they were counted, and closed afterwards: room for as many connections."""


@pytest.mark.slow
async def test_descriptor_exhaustion_refuses_new_connections_and_keeps_open_ones(controller: Controller) -> None:
    address = await controller.address()
    async with connected(address, "source") as source, contextlib.AsyncExitStack() as accepted:
        extra = await api.connect(address, "extra", "extra", DEADLINE_S)
        # Written when the accounting process runs: until then, descriptors are used to start it.
        await controller.wait_until((controller.run_dir / "attribution.jsonl").exists)
        used = set(os.listdir(f"/proc/{controller.pid}/fd"))
        free = next(number for number in itertools.count() if str(number) not in used)
        resource.prlimit(controller.pid, resource.RLIMIT_NOFILE, (free, free))  # a new descriptor gets this number
        names = [f"more-{number}" for number in range(MAX_CLOSED)]
        joining = [asyncio.create_task(api.connect(address, name, "extra", DEADLINE_S)) for name in names]
        await controller.wait_until(lambda: "cannot accept more connections" in controller.log)
        refused = [task for task in joining if not task.done()]
        assert refused
        for task in refused:
            task.cancel()
        for outcome in await asyncio.gather(*joining, return_exceptions=True):
            if isinstance(outcome, api.Session):
                accepted.push_async_callback(outcome.close)
        assert "Too many open files" in controller.log
        assert "ulimit -n" in controller.log
        await offer(source, 1)
        # A closed connection frees its descriptor for a new one.
        await extra.close()
        async with connected(address, "reward"):
            os.kill(controller.pid, signal.SIGINT)
            with pytest.raises(Stopped):
                await asyncio.wait_for(source.wait_stopped(), DEADLINE_S)
    assert controller.exit_code() == 130


def startup_error(controller: Controller) -> str:
    """The one error line of a controller that exits with code 2."""
    assert controller.exit_code() == 2, controller.log
    [line] = controller.errors()
    controller.close()
    return line


@pytest.mark.slow
def test_a_corrupt_ledger_is_rejected_and_not_modified(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ledger = tmp_path / "run" / "ledger.sqlite"
    ledger.write_bytes(b"this is not a database, and it must not be overwritten" * 100)
    before = ledger.read_bytes()
    error = startup_error(Controller(tmp_path))
    assert f"ledger {ledger} cannot be read: file is not a database; it was not changed" in error
    assert ledger.read_bytes() == before


@pytest.mark.slow
def test_a_port_taken_before_startup_is_named_in_the_error(tmp_path: Path, held_port: int) -> None:
    """Another process binds the port between the launcher's check and the start of the controller."""
    error = startup_error(Controller(tmp_path, bind=f"tcp://127.0.0.1:{held_port}"))
    assert f"tcp://127.0.0.1:{held_port} is in use; choose another port" in error


FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
ROW = {"data": [torch.zeros(2, dtype=torch.int32)]}


async def test_a_controller_that_cannot_listen_closes_its_files_and_threads(tmp_path: Path, held_port: int) -> None:
    async def fail_to_listen(run_dir: Path) -> set[str]:
        """The file descriptors that are open after the failure."""
        await asyncio.to_thread(run_dir.mkdir)
        options = api.Observability(samples=api.SampleStore(run_dir / SAMPLES, per_step=32, max_bytes=1 << 30))
        bind_address = f"tcp://127.0.0.1:{held_port}"
        with pytest.raises(ConfigError, match=f"{bind_address} is in use"):
            async with api.controller(FLOW, api.Settings(), POLICIES, run_dir, bind_address, observability=options):
                pass
        return set(os.listdir("/proc/self/fd"))

    before = await fail_to_listen(tmp_path / "first")  # the first failure opens descriptors that this process keeps
    assert await fail_to_listen(tmp_path / "second") == before
    assert not [thread for thread in threading.enumerate() if thread.name == "samples"]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the ledger over a second connection, which SQLite treats like another process."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        yield
        db.execute("ROLLBACK")


async def test_a_locked_ledger_blocks_neither_event_loop_nor_run_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    context = api.controller(FLOW, api.Settings(), POLICIES, tmp_path)
    async with context as (server, address), connected(address, "source") as source:
        with locked(path):
            server.ledger.add(AppendLedger(7, 0, "in_flight", 0), 1.0)
            offering = asyncio.create_task(source.offer_many("rows", [1], tensors=ROW))
            iterations, begin_s = 0, time.monotonic()
            while time.monotonic() - begin_s < 1.5:  # over several commits, none of which may block
                await asyncio.sleep(0.05)
                iterations += 1
            assert iterations >= 5
            assert server.ended is None
            assert prompts_of(path) == {}
        # The offer is answered once it is on disk.
        async with asyncio.timeout(DEADLINE_S):
            assert await offering is not None
        assert prompts_of(path) == {7: "in_flight"}
        assert server.ended is None


async def test_source_that_joins_while_the_ledger_is_locked_is_admitted_afterwards(tmp_path: Path) -> None:
    context = api.controller(FLOW, api.Settings(), POLICIES, tmp_path)
    async with context as (server, address):
        with locked(tmp_path / "ledger.sqlite"):
            server.ledger.add(AppendLedger(7, 0, "trained", 0), 1.0)
            joining = asyncio.create_task(api.connect(address, "source", "source", DEADLINE_S))
            done, _ = await asyncio.wait([joining], timeout=1.0)  # over two attempts
            assert not done
        source = await joining
        assert {epoch: {*of} for epoch, of in unpack(source.welcome.position.passed).items()} == {0: {7}}
        assert server.ended is None
        await source.close()


@pytest.mark.slow
def test_controller_reports_a_locked_ledger_and_leaves_it_unchanged(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.add(AppendLedger(7, 0, "trained", 0), 1.0)
    ledger.commit()
    ledger.flush()
    ledger.close()
    with locked(path):
        error = startup_error(Controller(tmp_path))
    assert (
        f"ledger {path} cannot be opened: database is locked; another process has it locked: stop that process" in error
    )
    assert prompts_of(path) == {7: "trained"}


def test_ledger_that_stays_locked_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    metrics = RunMetrics(tmp_path, 0.0)
    recorder = RunFiles(ledger, metrics)
    ledger.add(AppendLedger(7, 0, "trained", 0), 1.0)
    with locked(path):
        assert not recorder.write(100.0, 30.0)
        assert not recorder.write(129.0, 30.0)
        with pytest.raises(FlowError, match=r"is locked by another process, for 30 s; stop that process"):
            recorder.write(130.0, 30.0)
    assert recorder.write(131.0, 30.0)
    assert prompts_of(path) == {7: "trained"}
    metrics.close()
    ledger.close()


class SteppingClock:
    """A monotonic clock that can be set back."""

    def __init__(self) -> None:
        self.back_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self.back_s


async def test_a_clock_that_steps_back_delays_no_deadline(tmp_path: Path) -> None:
    clock = SteppingClock()
    core = Core(api.Settings(lease_s=1.0, no_progress_timeout_s=4.0), FLOW, POLICIES)
    server = Server(core, "", tmp_path, heartbeat_s=0.5, request_timeout_s=60.0, clock=clock)
    address = server.bind("tcp://127.0.0.1:0")
    async with (
        server.running(),
        connected(address, "source") as source,
        connected(address, "a") as a,
        connected(address, "b") as b,
    ):
        await source.offer_many("rows", [1], tensors=ROW)
        first = await a.pull("read", 1)
        waiting = asyncio.create_task(b.pull("read", 1))
        clock.back_s = 7200.0
        second = await asyncio.wait_for(waiting, DEADLINE_S)  # the lease of the other worker has expired on time
        assert second.slots == first.slots
        clock.back_s = 14400.0
        with pytest.raises(Stopped, match="no progress for"):
            await asyncio.wait_for(source.wait_stopped(), 15.0)
    assert server.ended is not None
    assert server.ended.code == 3
