"""A version that comes late: it never takes the place of a newer one."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, cast

import pytest
import torch

from flowrt.client.weights import WeightTransfers
from flowrt.protocol.messages import NO_BASE, EvictVersion, LaneTurn, Message, ReceiveWeights, Weights, WeightsStaged
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights import snapshot as snapshots
from flowrt.transport.weights.snapshot import Snapshot

WAIT_S = 20.0
GPU = torch.device("cuda", 0)


class Delivered:
    """Lanes over which everything comes at once: each byte is the version's number."""

    def receive_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        for tensor in tensors:
            tensor.fill_(turn.sequence)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def order(version: int, size: int) -> ReceiveWeights:
    """To receive a version of ``size`` bytes, each of them its number."""
    turn = LaneTurn(
        sender="trainer", receiver="rollout0", kind="weights", incarnation=0, sequence=version, transport="shm"
    )
    checksum = Snapshot(version, [torch.full((size,), version, dtype=torch.uint8)]).checksum()
    return ReceiveWeights(
        turn, Weights(model="policy", version=version, base=NO_BASE, bucket_bytes=(size,), checksum=checksum)
    )


@pytest.mark.parametrize("in_use", [True, False])
async def test_an_older_version_that_was_ordered_while_a_newer_one_came_is_held_but_not_used(in_use: bool) -> None:
    said: list[Message] = []
    spawned: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        spawned.append(asyncio.create_task(work))

    params = WeightTransfers(cast(LaneSet, Delivered()), said.append, spawn, WAIT_S)
    params.applied("policy", 0)
    for version in (2, 1):
        params.receive(order(version, 100))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*spawned)
        if in_use and version == 2:
            params.applied("policy", 2)
    assert [one.version for one in said if isinstance(one, WeightsStaged)] == [2, 1]
    staged = params.staged("policy")
    assert (staged is None) if in_use else (staged is not None and staged.snapshot.version == 2)
    assert {one.version for one in params.servable()} == {1, 2}


async def test_memory_of_old_versions_is_used_again_unless_somebody_looks_at_it() -> None:
    spawned: list[asyncio.Task[None]] = []
    params = WeightTransfers(
        cast(LaneSet, Delivered()), lambda _: None, lambda work: spawned.append(asyncio.create_task(work)), WAIT_S
    )
    params.applied("policy", 0)
    places, kept = [], []
    for version in range(1, 7):
        params.receive(order(version, 100_000))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*spawned)
        staged = params.staged("policy")
        assert staged is not None
        assert staged.snapshot.buckets[0].eq(version).all()
        places.append(staged.snapshot.buckets[0].data_ptr())
        kept += [staged.snapshot] if version == 3 else []
        params.applied("policy", version)
        params.evict(EvictVersion("policy", version - 1))
        spawned.clear()
        del staged
    assert places[2] == places[0]
    assert places[2] not in places[3:]
    assert len(set(places)) == 3
    assert kept[0].buckets[0].eq(3).all()


async def test_what_a_device_reads_is_pinned_before_it_is_staged_not_within_the_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second version on: the first swap shows where the model is."""
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
    monkeypatch.setattr(snapshots, "copying", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(snapshots, "for_device", pin)
    model = {"w": torch.zeros(100, dtype=torch.uint8)}
    said: list[tuple[Message, int]] = []
    spawned: list[asyncio.Task[None]] = []
    params = WeightTransfers(
        cast(LaneSet, Delivered()),
        lambda one: said.append((one, len(pinned))),
        lambda work: spawned.append(asyncio.create_task(work)),
        WAIT_S,
    )
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
    assert [count for one, count in said if isinstance(one, WeightsStaged)] == [0, 2, 3]
    assert [thread == threading.get_ident() for thread in threads] == [True, False, False]
    assert params.servable()[-1].version == 3
