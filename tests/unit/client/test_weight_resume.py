"""A fetch of weights that fails goes on with the chunks that are missing, and those that it relays to wait for them."""

import asyncio
from collections.abc import Iterable
from typing import cast

import pytest
import torch

from flowrt.client.weights import WeightTransfers
from flowrt.errors import TransferError
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, LaneTurn, Message, Weights
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights.relay import split_buckets
from flowrt.transport.weights.snapshot import Snapshot
from tests.unit.client.test_failed_tasks import Tasks

WAIT_S = 20.0
MIB = 1024 * 1024
VERSION = Snapshot(3, [torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)])
CHUNKS = len(split_buckets(VERSION.buckets))
WEIGHTS = Weights(
    model="policy",
    version=3,
    base=NO_BASE,
    bucket_bytes=tuple(VERSION.bucket_bytes()),
    checksum=VERSION.checksum(),
)
NEWER = Weights(model="policy", version=4, base=NO_BASE, bucket_bytes=(100,), checksum=0)


class BreakingLanes:
    """Lanes over which the given number of chunks of each turn arrives before it fails; -1: all of them."""

    def __init__(self, *arriving: int) -> None:
        self.arriving = list(arriving)
        self.first = 0
        self.relayed: list[asyncio.Task[list[torch.Tensor]]] = []

    def receive_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        most = self.arriving.pop(0)
        chunks = split_buckets(VERSION.buckets)[self.first :]
        for number, tensor in enumerate(tensors):
            if number == most:
                done.set_exception(TransferError("the lane broke"))
                return done
            tensor.copy_(chunks[number])
        done.set_result(None)
        return done

    def send_each(self, turn: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Task[list[torch.Tensor]]":
        self.relayed.append(asyncio.ensure_future(asyncio.to_thread(list, tensors)))
        return self.relayed[-1]

    def refuse(self, turn: LaneTurn, reason: str) -> None:
        pass


def turn(sequence: int, sender: str = "trainer") -> LaneTurn:
    return LaneTurn(
        sender=sender, receiver="rollout0", kind="weights", incarnation=0, sequence=sequence, transport="shm"
    )


class Receiver:
    def __init__(self, *arriving: int) -> None:
        self.lanes = BreakingLanes(*arriving)
        self.tasks = Tasks()
        self.sent: list[Message] = []
        self.changed = asyncio.Event()
        self.params = WeightTransfers(cast(LaneSet, self.lanes), self._send, self.tasks.spawn, WAIT_S)
        self.params.applied("policy", 0)
        self.sent.clear()

    def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.changed.set()

    async def receive(self, sequence: int, first: int = 0) -> Message:
        """Receive the version; returns how that ended."""
        self.lanes.first = first
        before = len(self.sent)
        self.params.execute(m.ReceiveWeights(turn(sequence), WEIGHTS, first=first))
        async with asyncio.timeout(WAIT_S):
            while not (
                ended := [message for message in self.sent[before:] if not isinstance(message, m.WeightsArriving)]
            ):
                self.changed.clear()
                await self.changed.wait()
        self.tasks.check()
        return ended[0]

    def relay(self) -> "asyncio.Task[list[torch.Tensor]]":
        self.params.execute(m.SendWeights(turn(9), "policy", 3, NO_BASE))
        return self.lanes.relayed[-1]


async def test_the_rest_of_a_version_follows_over_another_lane() -> None:
    receiver = Receiver(5, 3, -1)
    assert await receiver.receive(0) == m.FetchFailed(turn(0), WEIGHTS, "the lane broke", received=5)
    relayed = receiver.relay()
    assert await receiver.receive(1, first=5) == m.FetchFailed(turn(1), WEIGHTS, "the lane broke", received=8)
    assert not relayed.done()
    assert await receiver.receive(2, first=8) == m.WeightsStaged("policy", 3)
    staged = receiver.params.staged("policy")
    assert staged is not None
    assert torch.equal(staged.snapshot.buckets[0], VERSION.buckets[0])
    async with asyncio.timeout(WAIT_S):
        assert torch.equal(torch.cat(await relayed), VERSION.buckets[0])


async def test_an_eighth_is_reported_once_for_each_turn() -> None:
    receiver = Receiver(5, -1)
    await receiver.receive(0)
    await receiver.receive(1, first=5)
    await asyncio.sleep(0)
    reports = [message for message in receiver.sent if isinstance(message, m.WeightsArriving)]
    assert reports == [m.WeightsArriving(turn(0), "policy"), m.WeightsArriving(turn(1), "policy")]


@pytest.mark.parametrize("again", [False, True])
async def test_what_arrived_is_dropped_when_something_else_is_fetched(again: bool) -> None:
    receiver = Receiver(5, -1 if again else 0)
    await receiver.receive(0)
    relayed = receiver.relay()
    if again:
        assert await receiver.receive(1, first=0) == m.WeightsStaged("policy", 3)
    else:
        receiver.params.execute(m.ReceiveWeights(turn(1), NEWER))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(TransferError, match="is fetched in place of the rest"):
            await relayed


async def test_chunks_that_are_not_here_any_more_are_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.client.weights.NO_MEMORY_RETRY_S", 0.0)
    failed = await Receiver().receive(0, first=4)
    assert isinstance(failed, m.FetchFailed)
    assert failed.received == 0
    assert "the first 4 chunks of version 3 are not held here" in failed.reason
