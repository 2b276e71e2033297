"""Versions that differ little travel as changes, to whoever has their base, and arrive bit for bit."""

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
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (_, found):
        yield found


def weights(version: int) -> dict[str, torch.Tensor]:
    """bf16 weights of which one in two hundred moves with each version."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ELEMENTS, generator=generator) * 0.02
    moved = torch.arange(ELEMENTS) % 200 < version
    return {"w": (values * (1 + 0.01 * moved)).to(torch.bfloat16)}


class Receiver:
    """A session that takes every version and remembers how it came, and what it used when it was told to fetch it."""

    def __init__(self, session: api.Session) -> None:
        self.session = session
        self.bases: list[int] = []
        self.meanwhile: list[tuple[int, bool]] = []  # the version in use, and whether another was staged
        handle = session._handle

        def receive(event: Event) -> None:
            if isinstance(event, m.ReceiveWeights):
                self.bases.append(event.weights.base)
                [used] = session.params.in_use()
                self.meanwhile.append((used.version, session.params.staged() is not None))
            handle(event)

        session._handle = receive  # type: ignore[method-assign]

    async def take(self, version: int) -> None:
        """Wait for the version, see that it is right, put it into use."""
        async with asyncio.timeout(20):
            staged = await self.session.params.wait_staged()
        assert staged.snapshot.version == version
        found = {"w": torch.zeros(ELEMENTS, dtype=torch.bfloat16)}
        staged.snapshot.restore(found)
        assert torch.equal(found["w"].view(torch.int16), weights(version)["w"].view(torch.int16))
        self.session.params.applied("policy", version)


async def join(address: str, name: str, version: int) -> Receiver:
    """A worker that has read this version from somewhere else."""
    session = await api.connect(address, name, "rollout", 10)
    session.params.applied("policy", version)
    return Receiver(session)


async def test_deltas_go_to_holders_of_the_base_and_snapshots_to_others(address: str) -> None:
    trainer = await api.connect(address, "trainer", "trainer", 10)
    early = await join(address, "early", 0)
    for version in (1, 2, 3):
        await trainer.params.publish("policy", api.Snapshot.take(version, weights(version)))
        await early.take(version)
    assert early.bases == [NO_BASE, 1, 2]  # nobody held version 0 as it was published
    late = await join(address, "late", 0)
    await late.take(3)
    assert late.bases == [NO_BASE]
    # It says that it has version 4, which it did not get from anybody here: changes to it are no use, the whole is.
    await trainer.params.publish("policy", api.Snapshot.take(4, weights(4)))
    await asyncio.gather(early.take(4), late.take(4))
    guest = await join(address, "guest", 4)
    await trainer.params.publish("policy", api.Snapshot.take(5, weights(5)))
    await asyncio.gather(early.take(5), late.take(5), guest.take(5))
    assert (early.bases[-1], late.bases[-1], guest.bases) == (4, 4, [4, NO_BASE])
    for session in (trainer, early.session, late.session, guest.session):
        await session.close()


async def test_dense_changes_are_sent_as_a_snapshot(address: str) -> None:
    trainer = await api.connect(address, "trainer", "trainer", 10)
    one = await join(address, "one", 0)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        values = {"w": torch.randn(ELEMENTS, generator=generator).to(torch.bfloat16)}
        await trainer.params.publish("policy", api.Snapshot.take(version, values))
        async with asyncio.timeout(20):
            staged = await one.session.params.wait_staged()  # the one before is in use: this can only be the next
        assert staged.snapshot.version == version
        one.session.params.applied("policy", version)
    assert one.bases == [NO_BASE, NO_BASE]
    for session in (trainer, one.session):
        await session.close()


def damage_the_base(receiver: Receiver) -> None:
    """A byte of version 1, as it is held here to put changes on, is another one now."""
    receiver.session.params._held["policy", 1, NO_BASE].buckets[0][ELEMENTS // 3] ^= 1


def damage_the_changes(receiver: Receiver) -> None:
    """A byte of each piece that comes next is not the one that was sent."""
    lanes = receiver.session.params._lanes
    receive_each = lanes.receive_each

    def damaging(turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        lanes.receive_each = receive_each  # type: ignore[method-assign]
        return receive_each(turn, damaged(tensors))

    def damaged(incoming: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for piece in incoming:
            yield piece
            piece[piece.numel() // 2] ^= 1

    lanes.receive_each = damaging  # type: ignore[method-assign]


@pytest.mark.parametrize("damage", [damage_the_base, damage_the_changes])
async def test_delta_with_a_wrong_checksum_is_replaced_by_a_snapshot(
    address: str, damage: Callable[[Receiver], None]
) -> None:
    trainer = await api.connect(address, "trainer", "trainer", 10)
    one = await join(address, "one", 0)
    await trainer.params.publish("policy", api.Snapshot.take(1, weights(1)))
    await one.take(1)
    damage(one)
    await trainer.params.publish("policy", api.Snapshot.take(2, weights(2)))
    await one.take(2)
    assert one.bases == [NO_BASE, 1, NO_BASE]
    assert one.meanwhile[1:] == [(1, False), (1, False)]  # until the whole version was here, the old one was used
    await trainer.params.publish("policy", api.Snapshot.take(3, weights(3)))
    await one.take(3)
    assert one.bases[3:] == [2]  # changes are of use again
    for session in (trainer, one.session):
        await session.close()
