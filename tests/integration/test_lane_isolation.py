"""Isolation of lanes: a hanging peer delays its own lanes only."""

import asyncio
import signal

import pytest

from tests.integration.helpers import lane_peer as peer
from tests.integration.helpers.lane_pair import Pair, failed, moved, take

DEADLINE_S, TURNS = 8.0, 50
BOTH = (True, False)
SMALL, LARGE = [["int32", [3, 0, 5]]], [["uint8", [40_000_000]]]


@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(lane, marks=pytest.mark.long) for lane in ("gloo", "socket"))]
)
async def test_hanging_peer_does_not_delay_other_lanes(transport: str) -> None:
    hanging = Pair(transport, DEADLINE_S, peer.transports(), 10.0, "hanging")
    other = Pair(transport, DEADLINE_S, {}, 10.0, "other", hanging)
    started = []
    try:
        for pair in (hanging, other):
            await pair.start()
            started.append(pair)
            for sending in BOTH:
                await moved(pair, sending, SMALL)
        hanging.kill(signal.SIGSTOP)
        stuck = [take(hanging, sending, LARGE, sequence=1) for sending in BOTH]
        for sequence in range(1, TURNS + 1):
            await asyncio.gather(*(moved(other, sending, SMALL, sequence, sequence=sequence) for sending in BOTH))
            if sequence == 1:
                assert not any(work.done() for work in stuck)
        for work in stuck:
            await failed(work, "lane .*hanging.* failed")
        for sending in BOTH:
            await moved(other, sending, LARGE, sequence=TURNS + 1)
    finally:
        for pair in started:
            await pair.close()
