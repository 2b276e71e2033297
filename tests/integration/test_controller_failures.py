"""A controller with an internal error reports it and ends the run: no worker waits for a deadline."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt import api
from flowrt.controller.core import Core
from flowrt.controller.events import Event, MessageReceived, Tick
from flowrt.controller.storage import ledger
from flowrt.controller.storage.ledger import WalCheckpointer
from flowrt.errors import EXIT_FAILED, Stopped

FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
TIMEOUT_S = 60.0


@pytest.mark.parametrize("kind", [Tick, MessageReceived])
async def test_exception_in_the_core_ends_the_run_with_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Event]
) -> None:
    handle: Callable[..., Any] = Core.handle

    def failing(core: Core, event: Event, now: float) -> Any:
        if isinstance(event, kind) and "reader" in core.state.membership:
            raise KeyError("slot 7")
        return handle(core, event, now)

    monkeypatch.setattr(Core, "handle", failing)
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(Stopped, match=r"the controller failed at .*KeyError\('slot 7'\)"):
                await session.pull("read", slots=1)
        assert server.ended is not None
        assert server.ended.code == EXIT_FAILED
        await session.close()


async def test_exception_outside_the_core_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: WalCheckpointer) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(WalCheckpointer, "check", failing)
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address):
        session = await api.connect(address, "reader", "reader", TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(Stopped, match="the controller failed at a tick"):
                await session.pull("read", slots=1)
        monkeypatch.undo()
        assert server.ended is not None
        await session.close()


def test_thread_exhaustion_only_delays_the_wal_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The write-ahead log is kept, and a later check starts a checkpoint."""

    def failing(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "ledger.sqlite"
    wal = path.with_name("ledger.sqlite-wal")
    wal.write_bytes(bytes(5 << 20))
    checkpointer, started = WalCheckpointer(path), list[str]()
    monkeypatch.setattr(threading.Thread, "start", failing)
    checkpointer.check()
    assert "was not checkpointed: can't start new thread" in caplog.text
    assert wal.stat().st_size == 5 << 20
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    monkeypatch.setattr(ledger, "monotonic", lambda: time.monotonic() + ledger.CHECKPOINT_INTERVAL_S)
    checkpointer.check()
    assert started == ["ledger"]
