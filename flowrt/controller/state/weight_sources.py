"""The workers from which a version of the weights can be fetched, best first.

A worker that is still receiving a version relays it, so receivers form a chain or a tree below the holders:

- A chain of n receivers is the fastest for few: each link carries the version once, and the last receiver is n chunks
  behind the first. But every receiver waits for all links ahead of it.
- In a tree, in which each worker sends to two, a transfer takes twice as long; but no receiver waits for more than
  log2(n) links, and a link or worker that is slow or fails delays those below it only.
"""

import heapq
from typing import NamedTuple

from flowrt.ids import WorkerId

MAX_CHAIN = 16
"""Up to this number of receivers, a version is spread in a chain."""
SLACK = 64
"""Entries that are no longer valid and that a heap may have in excess of its number of sources."""


def fan_out(receivers: int) -> int:
    """To how many receivers a worker sends at once before a worker further from the holders does."""
    return 1 if receivers <= MAX_CHAIN else 2


class SourceRank(NamedTuple):
    """Order of sources, smallest first: not a suspect, not at its fan-out, close to a holder, fewest receivers, not the
    publisher (whose link all would share).
    """

    suspect: bool
    excess: int  # receivers above the fan-out, with one more
    depth: int  # transfers between a holder and this worker
    load: int
    publisher: bool
    worker: WorkerId


class Sources:
    """The sources of one form of a version. Each change costs O(log n)."""

    def __init__(self) -> None:
        self._rank: dict[WorkerId, SourceRank] = {}
        self._heap: list[SourceRank] = []  # an entry that is not the rank of its worker is no longer valid

    def __contains__(self, worker: object) -> bool:
        return worker in self._rank

    def set(self, rank: SourceRank) -> None:
        """Add a source, or change its rank."""
        if self._rank.get(rank.worker) == rank:
            return
        self._rank[rank.worker] = rank
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._rank) + SLACK:
            self._heap = list(self._rank.values())
            heapq.heapify(self._heap)

    def discard(self, worker: WorkerId) -> None:
        """Remove a source, if it is one."""
        self._rank.pop(worker, None)

    def best(self) -> WorkerId | None:
        """The first source; None if there is none."""
        while self._heap:
            first = self._heap[0]
            if self._rank.get(first.worker) == first:
                return first.worker
            heapq.heappop(self._heap)
        return None
