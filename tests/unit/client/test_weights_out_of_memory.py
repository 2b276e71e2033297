"""A version that does not fit into this worker's memory: that is said, and neither end of its lane is left waiting."""

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
DEADLINE_S = 10.0


class Lanes(LaneSet):
    """Notes which turns were refused; what is received arrives at once."""

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
async def test_a_version_without_room_is_a_fetch_that_failed(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception] | None
) -> None:
    said: list[Message] = []
    spawned: list[Coroutine[Any, Any, None]] = []
    lanes = Lanes()
    params = WeightTransfers(lanes, said.append, spawned.append, DEADLINE_S)
    if kind is not None:

        def take(size: int) -> torch.Tensor:
            raise kind("none left")

        monkeypatch.setattr(params._memory, "take", take)
    order = fetch(0, (8, TOO_LARGE))
    params.receive(order)
    (work,) = spawned
    assert said == []  # or it would be ordered again at once, without end
    monkeypatch.setattr("flowrt.client.weights.NO_MEMORY_RETRY_S", 0.0)
    async with asyncio.timeout(DEADLINE_S):
        await work
    (failed,) = said
    assert isinstance(failed, FetchFailed)
    assert (failed.turn, failed.weights) == (order.turn, order.weights)
    assert failed.reason.startswith(f"there is no memory here for the {TOO_LARGE + 8} bytes of version 1 of policy: ")
    assert lanes.refused == [order.turn]
    assert params.servable() == ()


async def test_a_version_whose_changes_came_and_that_has_no_room_is_a_fetch_that_failed(
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
