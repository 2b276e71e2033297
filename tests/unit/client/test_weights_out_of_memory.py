"""A version that does not fit into memory: the failure is reported, and no end of its lane keeps waiting."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from flowrt.client.weights import WeightTransfers
from flowrt.errors import TransferError
from flowrt.protocol.messages import NO_BASE, FetchFailed, LaneTurn, Message, ReceiveWeights, Weights
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights.snapshot import Snapshot

TOO_LARGE = 1 << 50
DEADLINE_S = 120.0


class Lanes(LaneSet):
    """Records the refused turns; every transfer arrives at once."""

    def __init__(self) -> None:
        super().__init__("r", {}, DEADLINE_S, lambda *_: None)
        self.refused: list[LaneTurn] = []

    def refuse(self, turn: LaneTurn, reason: str) -> None:
        self.refused.append(turn)

    def receive_each(self, turn: LaneTurn, tensors: Any) -> "asyncio.Future[None]":
        for tensor in tensors:
            tensor.fill_(0)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def fetch(sequence: int, sizes: tuple[int, ...]) -> ReceiveWeights:
    return ReceiveWeights(
        LaneTurn(sender="t", receiver="r", kind="weights", incarnation=0, sequence=sequence, transport="shm"),
        Weights(model="policy", version=1, base=NO_BASE, bucket_bytes=sizes, checksum=1),
    )


@pytest.mark.parametrize("kind", [OSError, MemoryError, RuntimeError, None])
async def test_a_version_that_does_not_fit_into_memory_is_a_failed_fetch(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception] | None
) -> None:
    sent: list[Message] = []
    spawned: list[Coroutine[Any, Any, None]] = []
    lanes = Lanes()
    params = WeightTransfers(lanes, sent.append, spawned.append, DEADLINE_S)
    if kind is not None:

        def take(size: int) -> torch.Tensor:
            raise kind("none left")

        monkeypatch.setattr(params._memory, "take", take)
    order = fetch(0, (8, TOO_LARGE))
    params.receive(order)
    (work,) = spawned
    assert sent == []  # an immediate report would be followed by an immediate retry
    monkeypatch.setattr("flowrt.client.weights.NO_MEMORY_RETRY_S", 0.0)
    async with asyncio.timeout(DEADLINE_S):
        await work
    (failed,) = sent
    assert isinstance(failed, FetchFailed)
    assert (failed.turn, failed.weights) == (order.turn, order.weights)
    assert failed.reason.startswith(f"there is no memory here for the {TOO_LARGE + 8} bytes of version 1 of policy: ")
    assert lanes.refused == [order.turn]
    assert params.servable() == ()


async def test_a_delta_of_a_version_that_does_not_fit_into_memory_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = WeightTransfers(Lanes(), lambda _: None, lambda work: work.close(), DEADLINE_S)
    await params.publish("policy", Snapshot.take(0, {"w": torch.zeros(100)}))

    def take(size: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(params._memory, "take", take)
    with pytest.raises(TransferError, match="no memory here for the 400 bytes of version 1 of policy"):
        await params._apply_delta(
            Weights(model="policy", version=1, base=0, bucket_bytes=(8,), checksum=1),
            [torch.zeros(8, dtype=torch.uint8)],
        )
