"""What goes with the heartbeats of a session: its open waits, and how long a controller may be silent.

That the process is there, ZeroMQ's own threads say, however busy this one is. Heartbeats say that its loop runs.
"""

from time import monotonic

from flowrt.waiting import CONTROLLER, Guard, open_waits

SILENT_BEATS = 30
"""Heartbeats without any word from the controller after which it counts as gone."""
SILENCE = Guard("the silence of the controller")
CLOSE_S = 5.0
MOST_WAITS = 8
LONGEST_WORDS = 160
NOTABLE_S = 2.0
sessions = 0
"""Of this process; where there are several, nobody can say whose wait one is."""


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
