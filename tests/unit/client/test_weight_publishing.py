"""Training continues while the checksum and the delta of a version are computed."""

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
from flowrt.recipes.config import RunConfig
from flowrt.roles.trainer import Trainer
from flowrt.runtime.clock import DrivenClock
from flowrt.runtime.progress import Progress
from flowrt.runtime.timeline import Timeline
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights.snapshot import Snapshot

WAIT_S = 20.0


async def test_publishing_waits_only_for_the_copy_and_versions_are_sent_in_order() -> None:
    sent: list[Message] = []
    spawned: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        spawned.append(asyncio.create_task(work))

    # The checksum thread is blocked: nothing can be published before it is released.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    release = threading.Event()
    blocked = asyncio.get_running_loop().run_in_executor(None, release.wait, WAIT_S)
    params = WeightTransfers(LaneSet("trainer", {}, 1.0, lambda *_: None), sent.append, spawn, 1.0)
    async with asyncio.timeout(WAIT_S):
        await params.publish_in_background("policy", version(1))  # returns before the checksum is computed
        assert sent == []
        second = asyncio.create_task(params.publish_in_background("policy", version(2), {1: 0.5}))
        done, _ = await asyncio.wait([second], timeout=0.1)
        assert not done, "the second version waits for the first"
        release.set()
        await blocked
        await second
        await params.wait_published()
        await asyncio.gather(*spawned)
    assert [message.forms[0].version for message in sent if isinstance(message, Publish)] == [1, 2]
    assert [message.divergence for message in sent if isinstance(message, Publish)] == [(), ((1, 0.5),)]


async def test_a_trainer_may_change_its_weights_once_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum thread is blocked after the copy; the trainer continues and changes its weights."""
    sent: list[Message] = []
    spawned: list[asyncio.Task[None]] = []
    executor, release, take = ThreadPoolExecutor(1), threading.Event(), Snapshot.take
    asyncio.get_running_loop().set_default_executor(executor)

    def take_and_block(number: int, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        taken = take(number, tensors)
        executor.submit(release.wait, WAIT_S)
        return taken

    monkeypatch.setattr(Snapshot, "take", take_and_block)
    lanes = LaneSet("trainer", {}, 1.0, lambda *_: None)
    params = WeightTransfers(lanes, sent.append, lambda work: spawned.append(asyncio.create_task(work)), WAIT_S)
    session: Any = SimpleNamespace(params=params, timeline=Timeline(DrivenClock()), progress=Progress())
    weights = {"w": torch.full((100,), 1.0)}
    engine: Any = SimpleNamespace(parameters=lambda: weights)
    async with asyncio.timeout(WAIT_S / 2):
        await Trainer(session, RunConfig(), engine, RankCollectives()).publish(1, kl={0: 0.5})
        assert sent == []
        weights["w"].zero_()
        release.set()
        await params.wait_published()
        await asyncio.gather(*spawned)
    [published] = sent
    assert isinstance(published, Publish)
    assert published.forms[0].checksum == version(1).checksum()
    assert published.divergence == ((0, 0.5),)


def version(number: int) -> Snapshot:
    return Snapshot.take(number, {"w": torch.full((100,), float(number))})
