"""Lanes whose transport raises any error: its turn fails, and so do all later ones."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrt.errors import PROGRAMMING_ERRORS, TransferError
from flowrt.protocol.messages import LaneTurn
from flowrt.transport.lanes.channel import ColumnRun
from flowrt.transport.lanes.lane import LaneSet

DEADLINE_S = 60.0
ERRORS = [
    *(kind("injected fault") for kind in PROGRAMMING_ERRORS),
    MemoryError(),
    OSError(28, "no room"),
    TransferError("gone"),
]


class Faulty:
    """A transport and its channel, on which the calls of these names raise."""

    def __init__(self, error: BaseException, *names: str) -> None:
        self._error, self._names = error, names

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            if name in self._names:
                raise self._error
            return self if name == "open" else None

        return call


async def assert_turns_fail(lanes: LaneSet, sending: bool, sequences: range) -> None:
    """Assert that each of these turns fails with the name of the lane."""
    ends = ("here", "there") if sending else ("there", "here")
    turns = [LaneTurn(*ends, "samples", 0, sequence, "faulty") for sequence in sequences]
    row = torch.zeros(4, dtype=torch.uint8)
    works = [lanes.send(turn, [ColumnRun.of(row)]) if sending else lanes.receive(turn, [[4]]) for turn in turns]
    async with asyncio.timeout(DEADLINE_S):
        ended = await asyncio.gather(*works, return_exceptions=True)
    for error in ended:
        assert isinstance(error, TransferError)
        assert str(error).startswith(f"lane {ends[0]}>{ends[1]}/samples/0 failed: ")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("where", ["open", "send", "receive"])
async def test_error_of_a_transport_fails_its_turn_and_later_ones(error: BaseException, where: str) -> None:
    lanes = LaneSet("here", {"faulty": Faulty(error, where, "close")}, DEADLINE_S, lambda *_: None)
    await assert_turns_fail(lanes, where != "receive", range(3))
    await assert_turns_fail(lanes, where != "receive", range(3, 4))
    await lanes.close()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_error_of_an_idle_lane_fails_later_turns(error: BaseException) -> None:
    lanes = LaneSet("here", {"faulty": Faulty(error, "on_idle")}, DEADLINE_S, lambda *_: None, idle_s=0.001)
    turn = LaneTurn(sender="here", receiver="there", kind="samples", incarnation=0, sequence=0, transport="faulty")
    async with asyncio.timeout(DEADLINE_S):
        await lanes.send(turn, [])
    await asyncio.to_thread(lanes._lanes["here", "there", "samples"].join, DEADLINE_S)
    await assert_turns_fail(lanes, True, range(1, 3))


async def test_turn_of_a_closed_lane_fails() -> None:
    lanes = LaneSet("here", {"faulty": Faulty(OSError())}, DEADLINE_S, lambda *_: None)
    async with asyncio.timeout(DEADLINE_S):
        await lanes.send(
            LaneTurn(sender="here", receiver="there", kind="samples", incarnation=0, sequence=0, transport="faulty"), []
        )
    await lanes.close()
    await assert_turns_fail(lanes, True, range(1, 2))
