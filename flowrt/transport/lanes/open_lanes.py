"""How many lanes a worker may have open: each takes a descriptor and two threads.

A lane that is to be opened beyond the limit waits until another one is closed. To make room, the lanes that have been
idle for longest are retired: the controller, which numbers the turns of every lane, opens a new incarnation with the
next turn of such a lane, and tells both ends to close the old one.
"""

import threading

from flowrt.errors import TransferError, WaitExpired
from flowrt.runtime.resource_limits import check_descriptor_limit, descriptor_limit
from flowrt.runtime.waits import poll_until_true

MAX_OPEN_LANES = 2048
"""The most in any case: each has two threads."""
DESCRIPTORS_PER_LANE = 2
"""While a lane connects; later one."""
RESERVED_DESCRIPTORS = 512
"""For all else that a worker opens, or half of its limit if that is less."""


def most_open_lanes() -> int:
    """The most lanes that this process may have open. Raises ConfigError if its limit of open files is too low."""
    limit = check_descriptor_limit()
    return min((limit - min(RESERVED_DESCRIPTORS, limit // 2)) // DESCRIPTORS_PER_LANE, MAX_OPEN_LANES)


class OpenLanes:
    """Counts the open lanes of a worker; used by the threads of its lanes and by its event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting = 0
        """Lanes that wait for room."""
        self._open = 0
        self._changed = threading.Condition()

    def take(self, lane: str, deadline_s: float) -> None:
        """Count one more; wait for room first. Raises TransferError if there is none within ``deadline_s`` seconds."""
        with self._changed:
            if self._open >= self.most:
                self._wait(lane, deadline_s)
            self._open += 1

    def _wait(self, lane: str, deadline_s: float) -> None:
        self.waiting += 1
        try:
            has_room = lambda: self._open < self.most  # noqa: E731
            poll_until_true(self._changed, has_room, deadline_s, f"room for lane {lane}", "this worker")
        except WaitExpired:
            raise TransferError(
                f"lane {lane} cannot be opened: all {self.most} lanes that the limit of open files "
                f"({descriptor_limit()}) allows have been busy for {deadline_s:.0f} s; raise it (ulimit -n)"
            ) from None
        finally:
            self.waiting -= 1

    def give_back(self) -> None:
        """Count one less."""
        with self._changed:
            self._open -= 1
            self._changed.notify()
