"""Versions that differ little are sent as deltas to holders of their base, and arrive bit for bit."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from flowrt import api
from flowrt.client.connection import Event
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, LaneTurn

ELEMENTS = 2_000_000
FLOW = api.Dataflow(
    (api.Column("prompt", "int32", "group"),), (api.Stage("rollout", needs=("prompt",), makes=(), generates=True),)
)
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (_, endpoint):
        yield endpoint


def weights(version: int) -> dict[str, torch.Tensor]:
    """bf16 weights of which one in two hundred changes with each version."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ELEMENTS, generator=generator) * 0.02
    changed = torch.arange(ELEMENTS) % 200 < version
    return {"w": (values * (1 + 0.01 * changed)).to(torch.bfloat16)}


class Receiver:
    """A session that takes every version; records its base, and the version in use when it was ordered."""

    def __init__(self, session: api.Session) -> None:
        self.session = session
        self.bases: list[int] = []
        self.in_use: list[tuple[int, bool]] = []  # the version in use, and whether another was staged
        handle = session._handle

        def receive(event: Event) -> None:
            if isinstance(event, m.ReceiveWeights):
                self.bases.append(event.weights.base)
                [used] = session.params.in_use()
                self.in_use.append((used.version, session.params.staged() is not None))
            handle(event)

        session._handle = receive  # type: ignore[method-assign]

    async def take(self, version: int) -> None:
        """Wait for the version, compare its contents, put it into use."""
        async with asyncio.timeout(20):
            staged = await self.session.params.wait_staged()
        assert staged.snapshot.version == version
        target = {"w": torch.zeros(ELEMENTS, dtype=torch.bfloat16)}
        staged.snapshot.restore(target)
        assert torch.equal(target["w"].view(torch.int16), weights(version)["w"].view(torch.int16))
        self.session.params.applied("policy", version)


async def join(address: str, name: str, version: int) -> Receiver:
    """A worker that has loaded this version from another source."""
    session = await api.connect(address, name, "rollout", 60)
    session.params.applied("policy", version)
    return Receiver(session)


async def test_deltas_go_to_holders_of_the_base_and_snapshots_to_others(address: str) -> None:
    trainer = await api.connect(address, "trainer", "trainer", 60)
    early = await join(address, "early", 0)
    for version in (1, 2, 3):
        await trainer.params.publish("policy", api.Snapshot.take(version, weights(version)))
        await early.take(version)
    assert early.bases == [NO_BASE, 1, 2]  # version 0 was never published
    late = await join(address, "late", 0)
    await late.take(3)
    assert late.bases == [NO_BASE]
    # The guest has version 4 from another source: a delta to it fails, and a snapshot follows.
    await trainer.params.publish("policy", api.Snapshot.take(4, weights(4)))
    await asyncio.gather(early.take(4), late.take(4))
    guest = await join(address, "guest", 4)
    await trainer.params.publish("policy", api.Snapshot.take(5, weights(5)))
    await asyncio.gather(early.take(5), late.take(5), guest.take(5))
    assert (early.bases[-1], late.bases[-1], guest.bases) == (4, 4, [4, NO_BASE])
    for session in (trainer, early.session, late.session, guest.session):
        await session.close()


async def test_dense_changes_are_sent_as_a_snapshot(address: str) -> None:
    trainer = await api.connect(address, "trainer", "trainer", 60)
    worker = await join(address, "one", 0)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        values = {"w": torch.randn(ELEMENTS, generator=generator).to(torch.bfloat16)}
        await trainer.params.publish("policy", api.Snapshot.take(version, values))
        async with asyncio.timeout(20):
            staged = await worker.session.params.wait_staged()  # the previous version is in use, so this is the next
        assert staged.snapshot.version == version
        worker.session.params.applied("policy", version)
    assert worker.bases == [NO_BASE, NO_BASE]
    for session in (trainer, worker.session):
        await session.close()


def corrupt_the_base(receiver: Receiver) -> None:
    """Change a byte of the held version 1, the base of the next delta."""
    receiver.session.params._held["policy", 1, NO_BASE].buckets[0][ELEMENTS // 3] ^= 1


def corrupt_the_delta(receiver: Receiver) -> None:
    """Change a byte of each piece of the next transfer."""
    lanes = receiver.session.params._lanes
    receive_each = lanes.receive_each

    def receive_corrupted(turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        lanes.receive_each = receive_each  # type: ignore[method-assign]
        return receive_each(turn, corrupted(tensors))

    def corrupted(incoming: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for piece in incoming:
            yield piece
            piece[piece.numel() // 2] ^= 1

    lanes.receive_each = receive_corrupted  # type: ignore[method-assign]


@pytest.mark.parametrize("corrupt", [corrupt_the_base, corrupt_the_delta])
async def test_delta_with_a_wrong_checksum_is_replaced_by_a_snapshot(
    address: str, corrupt: Callable[[Receiver], None]
) -> None:
    trainer = await api.connect(address, "trainer", "trainer", 60)
    worker = await join(address, "one", 0)
    await trainer.params.publish("policy", api.Snapshot.take(1, weights(1)))
    await worker.take(1)
    corrupt(worker)
    await trainer.params.publish("policy", api.Snapshot.take(2, weights(2)))
    await worker.take(2)
    assert worker.bases == [NO_BASE, 1, NO_BASE]
    assert worker.in_use[1:] == [(1, False), (1, False)]  # version 1 is used until the snapshot has arrived
    await trainer.params.publish("policy", api.Snapshot.take(3, weights(3)))
    await worker.take(3)
    assert worker.bases[3:] == [2]  # deltas are sent again
    for session in (trainer, worker.session):
        await session.close()
