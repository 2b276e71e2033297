"""Heartbeats of a session: signs of life, reports of work and of waits, and the verdict on a controller that is silent.

That the process is there, ZeroMQ's own threads say, however busy this one is. Heartbeats say that its loop runs.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from flowrt.errors import WaitExpired
from flowrt.waiting import CONTROLLER, Guard, open_waits, pause

SILENT_BEATS = 30
"""Heartbeats without any word from the controller after which it counts as gone."""
SILENCE = Guard("the silence of the controller")
CLOSE_S = 5.0
MOST_WAITS = 8
LONGEST_WORDS = 160
NOTABLE_S = 2.0
sessions = 0
"""Of this process; where there are several, nobody can say whose wait one is."""


async def beat(beat_s: float, address: str, heard_s: Callable[[], float], say: Callable[[], None]) -> WaitExpired:
    """``say`` something every ``beat_s`` seconds; returns what happened when the controller has not answered for long.

    Judged by beats that were really sent: a loop that was itself held up must not blame the controller.
    """
    loop = asyncio.get_running_loop()
    while True:
        asked_s = loop.time()
        say()
        await pause(beat_s)
        if loop.time() - asked_s < 2 * beat_s and asked_s - heard_s() > SILENT_BEATS * beat_s:
            return WaitExpired(f"controller {address} not heard of for {SILENT_BEATS * beat_s:.0f} s")


def notable_waits() -> tuple[tuple[str, str, float, float], ...]:
    """What this process has waited for from others for a while, oldest first; the controller knows its own turns."""
    if sessions > 1:
        return ()
    now = monotonic()
    waits = [one for one in open_waits() if one.turn != CONTROLLER and now - one.since_s > NOTABLE_S]
    return tuple(
        (one.what[:LONGEST_WORDS], one.turn[:LONGEST_WORDS], now - one.since_s, one.limit_s)
        for one in waits[:MOST_WAITS]
    )
