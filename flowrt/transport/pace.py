"""How slow a transfer may be: a lane that trickles has failed as much as one that hangs."""

from time import monotonic

from flowrt.errors import TransferError

LEAST_BYTES_PER_S = 1e6


class Pace:
    """The limits of one lane, and how far the transfer that it is at has come. Told by the lane's own thread.

    Nothing may take longer than ``deadline_s`` to move, and beyond that time a transfer has to move
    ``bytes_per_s`` on average: it ends within ``deadline_s`` + its bytes / ``bytes_per_s``, however it trickles.
    """

    def __init__(self, lane: str, deadline_s: float, bytes_per_s: float = LEAST_BYTES_PER_S) -> None:
        self.deadline_s = deadline_s
        self._lane = lane
        self._bytes_per_s = bytes_per_s
        self._begun_s = 0.0
        self._moved = 0

    def begin(self) -> None:
        """The next transfer is due."""
        self._begun_s, self._moved = monotonic(), 0

    def moved(self, size: int) -> None:
        """So many bytes more. Raises TransferError when they are too few for the time."""
        self._moved += size
        took_s = monotonic() - self._begun_s
        if took_s > self.deadline_s + self._moved / self._bytes_per_s:
            raise TransferError(
                f"lane {self._lane} is too slow: {self._moved / 1e6:.1f} MB moved in {took_s:.0f} s, and after "
                f"{self.deadline_s:.0f} s {self._bytes_per_s / 1e6:.3g} MB/s are wanted; mend the link, or lower "
                "controller.lane_mb_per_s"
            )
