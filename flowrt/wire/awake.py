"""Waiting with open eyes for what comes sooner than a core that sleeps wakes up."""

from collections.abc import Callable
from os import sched_yield
from time import monotonic


def watch(look: Callable[[], object], take: Callable[[], object], for_s: float) -> bool:
    """Look for so many seconds at most, letting others run between two looks; True when something came, and was taken.

    A request and its answer wake six threads one after the other, and to wake one on a core that has gone to sleep may
    take longer than its work: a core that is kept awake halves the time of a round trip.
    """
    until_s = monotonic() + for_s
    while not look():
        if monotonic() >= until_s:
            return False
        sched_yield()
    take()
    return True
