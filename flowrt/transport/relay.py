"""Weights passed on while they arrive: a receiver serves the next one piece by piece, as the pieces come in.

A chain of n receivers then takes little longer than one: each piece is n - 1 hops behind, and the first holder sends
the version once.
"""

import threading
from collections.abc import Callable, Generator, Sequence

import torch

from flowrt.errors import TransferError, WaitExpired
from flowrt.waiting import until_true

_SMALLEST_BYTES = 256 * 1024
_LARGEST_BYTES = 16 * 1024 * 1024
_PIECES = 128


def pieces(buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the buckets, in order, of the size in which they travel; both ends cut alike."""
    total = sum(bucket.numel() for bucket in buckets)
    size = min(max(total // _PIECES, _SMALLEST_BYTES), _LARGEST_BYTES)
    return [piece for bucket in buckets for piece in bucket.split(size)]


class Arrival:
    """How many pieces of a version are here. Told and asked by threads of lanes."""

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._count = 0
        self._failure = ""
        self._changed = threading.Condition()

    def receive(
        self, buckets: Sequence[torch.Tensor], landed: Callable[[torch.Tensor], object]
    ) -> Generator[torch.Tensor, None, None]:
        """The pieces to receive into; a lane that asks for the next one has filled the one before.

        ``landed`` is told of each piece, in order, on the lane's thread: it should not take long.
        """
        for piece in pieces(buckets):
            yield piece
            with self._changed:
                self._count += 1
                self._changed.notify_all()
            landed(piece)

    def fail(self, reason: str) -> None:
        """No more will come: whoever passes it on stops too."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def relay(self, buckets: Sequence[torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        """The pieces to send, each as soon as it is here. Raises TransferError when the next does not come."""
        for number, piece in enumerate(pieces(buckets)):
            with self._changed:
                self._until(number)
            yield piece

    def _until(self, number: int) -> None:
        """Wait for a piece, holding the condition."""
        why = ""
        try:
            until_true(
                self._changed,
                lambda: self._failure or self._count > number,
                self._deadline_s,
                f"piece {number} of {self._what}",
                "whoever sends it here",
            )
        except WaitExpired:
            why = f"nothing came for {self._deadline_s:.0f} s"
        if self._count <= number:
            raise TransferError(f"{self._what} cannot be passed on, its own transfer failed: {why or self._failure}")
