"""Pipelined relay of weights: a receiver forwards each chunk to the next receivers as soon as it has arrived.

- A chain of n receivers takes little longer than one: the last is n - 1 chunks behind the first, and the publisher
  sends the version once.
- Who relays to whom is decided by the controller (`flowrt.controller.state.weight_sources`).
- A transfer that breaks can go on, from the first chunk that has not arrived, over another lane; relays of it wait
  meanwhile.
"""

import threading
from collections.abc import Callable, Generator, Sequence

import torch

from flowrt.errors import TransferError, WaitExpired
from flowrt.runtime.waits import poll_until_true

_MIN_CHUNK_BYTES = 256 * 1024
_MAX_CHUNK_BYTES = 16 * 1024 * 1024
_CHUNKS = 128


def split_buckets(buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the buckets, in order, of one chunk each. Sender and receiver split the same sizes the same way."""
    total = sum(bucket.numel() for bucket in buckets)
    size = min(max(total // _CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    return [chunk for bucket in buckets for chunk in bucket.split(size)]


class PipelinedReceive:
    """A version that is being received, and the number of chunks that have arrived. Shared by the threads of lanes."""

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._count = 0
        self._attempt = 0
        self._failure = ""
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """The number of chunks that have arrived."""
        return self._count

    def receive(
        self, buckets: Sequence[torch.Tensor], on_chunk: Callable[[torch.Tensor], object]
    ) -> Generator[torch.Tensor, None, None]:
        """Yield the chunks to receive into, from the first that has not arrived; the caller has filled a chunk when it
        asks for the next one.

        ``on_chunk`` is called with each filled chunk, in order, on the lane's thread; it must return quickly. An
        earlier generator, of a lane that was given up, ends.
        """
        with self._changed:
            self._attempt += 1
            attempt, first = self._attempt, self._count
        for chunk in split_buckets(buckets)[first:]:
            yield chunk
            with self._changed:
                if self._attempt != attempt:
                    return
                self._count += 1
                on_chunk(chunk)
                self._changed.notify_all()

    def pause(self) -> int:
        """End the generator of `receive`, whose lane has failed; returns the number of chunks that have arrived."""
        with self._changed:
            self._attempt += 1
            return self._count

    def fail(self, reason: str) -> None:
        """Fail the transfer, and all its relays."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def relay(self, buckets: Sequence[torch.Tensor], first: int = 0) -> Generator[torch.Tensor, None, None]:
        """Yield the chunks to send, from the chunk ``first`` on, each when it has arrived.

        Raises TransferError if the next chunk does not arrive within the deadline, and after `fail`.
        """
        for number, chunk in enumerate(split_buckets(buckets)[first:], first):
            with self._changed:
                self._wait_chunk(number)
            yield chunk

    def _wait_chunk(self, number: int) -> None:
        """Wait for a chunk; the caller holds the condition. Raises TransferError."""
        timeout = ""
        try:
            poll_until_true(
                self._changed,
                lambda: self._failure or self._count > number,
                self._deadline_s,
                f"chunk {number} of {self._what}",
                "its sender",
            )
        except WaitExpired:
            timeout = f"nothing arrived for {self._deadline_s:.0f} s"
        if self._count <= number:
            raise TransferError(f"{self._what} cannot be relayed, its own transfer failed: {timeout or self._failure}")
