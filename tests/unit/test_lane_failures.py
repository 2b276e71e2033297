"""A lane whose transport makes a mistake of any kind: whoever waits for it is told, and so are all behind."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrt.errors import MISTAKES, TransferError
from flowrt.transport.lane import LaneSet
from flowrt.transport.pieces import Run
from flowrt.wire.records import LaneTurn

DEADLINE_S = 1.0
ERRORS = [*(kind("oh dear") for kind in MISTAKES), MemoryError(), OSError(28, "no room"), TransferError("gone")]


class Faulty:
    """A transport and its channel, where calls of these names fail."""

    def __init__(self, error: BaseException, *names: str) -> None:
        self._error, self._names = error, names

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            if name in self._names:
                raise self._error
            return self if name == "open" else None

        return call


async def failing(lanes: LaneSet, sending: bool, sequences: range) -> None:
    """Each of these turns fails with the lane's name."""
    ends = ("here", "there") if sending else ("there", "here")
    turns = [LaneTurn(*ends, "samples", 0, sequence, "faulty") for sequence in sequences]
    row = torch.zeros(4, dtype=torch.uint8)
    works = [lanes.send(one, [Run.of(row)]) if sending else lanes.receive(one, [[4]]) for one in turns]
    async with asyncio.timeout(DEADLINE_S):
        ended = await asyncio.gather(*works, return_exceptions=True)
    for error in ended:
        assert isinstance(error, TransferError)
        assert str(error).startswith(f"lane {ends[0]}>{ends[1]}/samples/0 failed: ")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("where", ["open", "send", "receive"])
async def test_a_mistake_of_a_transport_fails_its_turn_and_all_behind_it(error: BaseException, where: str) -> None:
    lanes = LaneSet("here", {"faulty": Faulty(error, where, "close")}, DEADLINE_S, lambda *_: None)
    await failing(lanes, where != "receive", range(3))
    await failing(lanes, where != "receive", range(3, 4))
    await lanes.close()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_a_mistake_of_a_lane_at_rest_fails_the_turns_that_come(error: BaseException) -> None:
    lanes = LaneSet("here", {"faulty": Faulty(error, "rest")}, DEADLINE_S, lambda *_: None, rest_s=0.001)
    turn = LaneTurn("here", "there", "samples", 0, 0, "faulty")
    async with asyncio.timeout(DEADLINE_S):
        await lanes.send(turn, [])
    await asyncio.to_thread(lanes._lanes["here", "there", "samples"].join, DEADLINE_S)
    await failing(lanes, True, range(1, 3))


async def test_a_turn_of_a_lane_that_was_closed_fails() -> None:
    lanes = LaneSet("here", {"faulty": Faulty(OSError())}, DEADLINE_S, lambda *_: None)
    async with asyncio.timeout(DEADLINE_S):
        await lanes.send(LaneTurn("here", "there", "samples", 0, 0, "faulty"), [])
    await lanes.close()
    await failing(lanes, True, range(1, 2))
