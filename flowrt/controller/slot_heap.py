"""Ready slots in order of a number that each is given when it enters; the order of issue settles ties."""

import heapq

from flowrt.controller.slots import Slot

SLACK = 64  # void entries that are tolerated beside as many as there are live ones


class SlotHeap:
    """Every method costs O(log n), amortised: what leaves from the middle stays as a void entry until swept."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        # An entry of the heap is live if it is this very object: an equal one may be left from an earlier stay.
        self._live: dict[int, tuple[tuple[float, int], Slot]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, slot: Slot) -> bool:
        return slot.id in self._live

    def add(self, slot: Slot, rank: float) -> None:
        """Low ranks come first; a slot that is here already keeps the rank it came with."""
        if slot.id not in self._live:
            entry = (rank, int(slot.id))
            self._live[slot.id] = (entry, slot)
            heapq.heappush(self._heap, entry)

    def discard(self, slot: Slot) -> float | None:
        """Remove a slot, if it is here; returns the rank it had."""
        gone = self._live.pop(slot.id, None)
        if gone is None:
            return None
        if self._heap[0] is gone[0]:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry, _ in self._live.values()]
            heapq.heapify(self._heap)
        return gone[0][0]

    def first(self) -> Slot | None:
        """The slot of the lowest rank, which stays."""
        while self._heap:
            entry = self._heap[0]
            live = self._live.get(entry[1])
            if live is not None and live[0] is entry:
                return live[1]
            heapq.heappop(self._heap)
        return None
