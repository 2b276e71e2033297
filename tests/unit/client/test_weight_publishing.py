"""Training goes on while a version is summed up and compared with the one before it."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrt.client.weights import WeightTransfers
from flowrt.protocol.messages import Message, Publish
from flowrt.ranks.barrier import RankCollectives
from flowrt.roles import trainer
from flowrt.runtime.clock import DrivenClock
from flowrt.runtime.timeline import Timeline
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights.snapshot import Snapshot

WAIT_S = 20.0


async def test_a_trainer_waits_for_the_copy_alone_and_versions_are_offered_in_order() -> None:
    said: list[Message] = []
    spawned: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        spawned.append(asyncio.create_task(work))

    # The thread that sums up is held: nothing can be offered before it is let go.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    held = threading.Event()
    holding = asyncio.get_running_loop().run_in_executor(None, held.wait, WAIT_S)
    params = WeightTransfers(LaneSet("trainer", {}, 1.0, lambda *_: None), said.append, spawn, 1.0)
    async with asyncio.timeout(WAIT_S):
        await params.publish_in_background("policy", version(1))  # returns, though nothing is summed up
        assert said == []
        second = asyncio.create_task(params.publish_in_background("policy", version(2), {1: 0.5}))
        done, _ = await asyncio.wait([second], timeout=0.1)
        assert not done, "the second version waits for the first"
        held.set()
        await holding
        await second
        await params.wait_published()
        await asyncio.gather(*spawned)
    assert [message.forms[0].version for message in said if isinstance(message, Publish)] == [1, 2]
    assert [message.divergence for message in said if isinstance(message, Publish)] == [(), ((1, 0.5),)]


async def test_a_trainer_stops_no_longer_than_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the copy is taken, the thread that would sum it up is held: the trainer goes on, and changes its weights."""
    said: list[Message] = []
    spawned: list[asyncio.Task[None]] = []
    executor, held, take = ThreadPoolExecutor(1), threading.Event(), Snapshot.take
    asyncio.get_running_loop().set_default_executor(executor)

    def take_and_hold(number: int, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        taken = take(number, tensors)
        executor.submit(held.wait, WAIT_S)
        return taken

    monkeypatch.setattr(Snapshot, "take", take_and_hold)
    lanes = LaneSet("trainer", {}, 1.0, lambda *_: None)
    params = WeightTransfers(lanes, said.append, lambda work: spawned.append(asyncio.create_task(work)), WAIT_S)
    session: Any = SimpleNamespace(params=params, timeline=Timeline(DrivenClock()))
    weights = {"w": torch.full((100,), 1.0)}
    engine: Any = SimpleNamespace(parameters=lambda: weights)
    async with asyncio.timeout(WAIT_S / 2):
        await trainer.publish(session, engine, RankCollectives(), 1, is_leader=True, kl={0: 0.5})
        assert said == []
        weights["w"].zero_()
        held.set()
        await params.wait_published()
        await asyncio.gather(*spawned)
    [published] = said
    assert isinstance(published, Publish)
    assert published.forms[0].checksum == version(1).checksum()
    assert published.divergence == ((0, 0.5),)


def version(number: int) -> Snapshot:
    return Snapshot.take(number, {"w": torch.full((100,), float(number))})
