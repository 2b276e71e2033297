"""Staging of received versions: their order, reuse of memory, and pinning."""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, cast

import pytest
import torch

from flowrt.client.weights import WeightTransfers
from flowrt.protocol.messages import NO_BASE, EvictVersion, LaneTurn, Message, ReceiveWeights, Weights, WeightsStaged
from flowrt.transport.devices import SideStream
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights import snapshot as snapshots
from flowrt.transport.weights.snapshot import Snapshot

WAIT_S = 20.0
GPU = torch.device("cuda", 0)


class InstantLanes:
    """Lanes over which every transfer arrives at once; each byte is the number of the version."""

    def receive_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        for tensor in tensors:
            tensor.fill_(turn.sequence)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def order(version: int, size: int) -> ReceiveWeights:
    """An order to receive a version of ``size`` bytes, each equal to its number."""
    turn = LaneTurn(
        sender="trainer", receiver="rollout0", kind="weights", incarnation=0, sequence=version, transport="shm"
    )
    checksum = Snapshot(version, [torch.full((size,), version, dtype=torch.uint8)]).checksum()
    return ReceiveWeights(
        turn, Weights(model="policy", version=version, base=NO_BASE, bucket_bytes=(size,), checksum=checksum)
    )


@pytest.mark.parametrize("in_use", [True, False])
async def test_an_older_version_that_arrives_late_does_not_replace_a_newer_one(in_use: bool) -> None:
    sent: list[Message] = []
    spawned: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        spawned.append(asyncio.create_task(work))

    params = WeightTransfers(cast(LaneSet, InstantLanes()), sent.append, spawn, WAIT_S)
    params.applied("policy", 0)
    for version in (2, 1):
        params.receive(order(version, 100))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*spawned)
        if in_use and version == 2:
            params.applied("policy", 2)
    assert [message.version for message in sent if isinstance(message, WeightsStaged)] == [2, 1]
    staged = params.staged("policy")
    assert (staged is None) if in_use else (staged is not None and staged.snapshot.version == 2)
    assert {weights.version for weights in params.servable()} == {1, 2}


async def test_memory_of_evicted_versions_is_reused_unless_it_is_referenced() -> None:
    spawned: list[asyncio.Task[None]] = []
    params = WeightTransfers(
        cast(LaneSet, InstantLanes()), lambda _: None, lambda work: spawned.append(asyncio.create_task(work)), WAIT_S
    )
    params.applied("policy", 0)
    addresses, kept = [], []
    for version in range(1, 7):
        params.receive(order(version, 100_000))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*spawned)
        staged = params.staged("policy")
        assert staged is not None
        assert staged.snapshot.buckets[0].eq(version).all()
        addresses.append(staged.snapshot.buckets[0].data_ptr())
        kept += [staged.snapshot] if version == 3 else []
        params.applied("policy", version)
        params.evict(EvictVersion("policy", version - 1))
        spawned.clear()
        del staged
    assert addresses[2] == addresses[0]
    assert addresses[2] not in addresses[3:]
    assert len(set(addresses)) == 3
    assert kept[0].buckets[0].eq(3).all()


async def test_buckets_for_a_device_are_pinned_before_staging_not_during_the_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: dict[int, torch.Tensor] = {}
    threads: list[int] = []

    def pin(bucket: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == GPU
        if bucket.data_ptr() in pinned:
            return bucket
        copy = bucket.clone()
        pinned[copy.data_ptr()] = copy
        threads.append(threading.get_ident())
        return copy

    monkeypatch.setattr(snapshots, "device_of", lambda _: GPU)
    monkeypatch.setattr(snapshots, "SideStream", lambda _: SideStream(torch.device("cpu")))
    monkeypatch.setattr(snapshots, "for_device", pin)
    model = {"w": torch.zeros(100, dtype=torch.uint8)}
    sent: list[tuple[Message, int]] = []
    spawned: list[asyncio.Task[None]] = []
    params = WeightTransfers(
        cast(LaneSet, InstantLanes()),
        lambda message: sent.append((message, len(pinned))),
        lambda work: spawned.append(asyncio.create_task(work)),
        WAIT_S,
    )
    params.set_device("policy", GPU)
    params.applied("policy", 0)
    for version in (1, 2, 3):
        params.receive(order(version, 100))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*spawned)
        staged = params.staged("policy")
        assert staged is not None
        staged.snapshot.restore(model)
        assert model["w"].eq(version).all()
        params.applied("policy", version)
        assert len(pinned) == version
    assert [count for message, count in sent if isinstance(message, WeightsStaged)] == [1, 2, 3]
    assert threading.get_ident() not in threads
    assert params.servable()[-1].version == 3
