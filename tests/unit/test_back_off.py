"""A supervisor waits longer each time before it starts again what has died, then gives up; old deaths are forgotten."""

import asyncio
import sys
from pathlib import Path

import pytest
from flowrt.launch import supervisor as module
from flowrt.launch.processes import Children
from flowrt.launch.supervisor import Supervisor

from flowrt.recipes.config import SupervisorConfig


async def test_each_start_waits_twice_as_long_until_there_were_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module, "pause", noted)
    children, said = Children(tmp_path, {}), list[str]()
    child = await children.start("reward", [sys.executable, "-c", "raise SystemExit(3)"])
    supervisor = Supervisor(children, SupervisorConfig(restarts=3, backoff_s=0.25, window_s=300.0), said.append)
    assert await asyncio.wait_for(child.process.wait(), 30) == 3
    assert [await supervisor.is_due(child) for _ in range(4)] == [True, True, True, False]
    assert waits == [0.25, 0.5, 1.0]
    assert all("reward left with exit code 3: it is started again in" in line for line in said)
    forgetful = Supervisor(children, SupervisorConfig(restarts=1, backoff_s=0.25, window_s=0.0), said.append)
    assert [await forgetful.is_due(child) for _ in range(3)] == [True, True, True], "no death is young enough to count"
