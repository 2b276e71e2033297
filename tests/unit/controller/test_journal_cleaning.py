"""At a checkpoint outdated journals of lost workers are deleted, but none of a worker that joins meanwhile."""

import asyncio
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from flowrt import api
from flowrt.controller.server import server as server_module
from flowrt.controller.storage.journals import find_outdated

TIMEOUT_S = 60.0
FLOW = api.Dataflow(
    (api.Column("prompt", "int32", "group"),), (api.Stage("rollout", needs=("prompt",), makes=(), generates=True),)
)
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())


@pytest.mark.parametrize("joins", [False, True])
async def test_a_journal_of_a_worker_that_joins_while_they_are_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    has_read, may_go_on = threading.Event(), threading.Event()

    def slow(run_dir: Path, in_use: Collection[str], may_train: Callable[[int], bool]) -> list[Path]:
        outdated = find_outdated(run_dir, in_use, may_train)
        has_read.set()
        assert may_go_on.wait(TIMEOUT_S)
        return outdated

    monkeypatch.setattr(server_module, "find_outdated", slow)
    path = tmp_path / "journals/1/rollout-0/1.journal"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"flowrt")  # its writer has just begun
    settings = api.Settings(journals="journals/1")
    async with api.controller(FLOW, settings, POLICIES, tmp_path) as (server, address):
        server._clean_journals(5)
        cleaning = server._cleaning
        assert cleaning is not None
        await asyncio.to_thread(has_read.wait, TIMEOUT_S)
        session = await api.connect(address, "rollout-0" if joins else "rollout-1", "rollout", TIMEOUT_S)
        may_go_on.set()
        await cleaning
        await session.close()
    assert path.exists() is joins
