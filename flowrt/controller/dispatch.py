"""The dispatch and batcher seams: who gets which ready slots, and when a micro-batch is full.

A ready queue is ordered by issue (ids grow with time), never by completion: whoever picks by completion order
prefers short answers and biases what is trained.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from flowrt.controller.slots import Slot
from flowrt.errors import ConfigError


class ReadyQueue:
    """Ids that are ready for one stage, oldest first; add, discard and take cost O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._ticket_of: dict[int, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._ticket_of)

    def __contains__(self, item: int) -> bool:
        return item in self._ticket_of

    def add(self, item: int) -> None:
        if item not in self._ticket_of:
            self._tickets += 1
            self._ticket_of[item] = self._tickets
            heapq.heappush(self._heap, (item, self._tickets))

    def discard(self, item: int) -> None:
        # Its heap entry stays until it surfaces; the ticket tells that it is void.
        self._ticket_of.pop(item, None)

    def oldest_first(self) -> Iterator[int]:
        """Iterate without removing; stop whenever you like. Do not add while iterating."""
        looked_at: list[tuple[int, int]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._ticket_of.get(entry[0]) == entry[1]:
                    looked_at.append(entry)
                    yield entry[0]
        finally:
            for entry in looked_at:
                if self._ticket_of.get(entry[0]) == entry[1]:
                    heapq.heappush(self._heap, entry)


class MayStart(Protocol):
    """Whether the pulling worker may start on this slot now; the admission policy behind it is not shown."""

    def __call__(self, slot: Slot) -> bool: ...


class Dispatch(Protocol):
    """Who gets which ready slots?"""

    def choose(self, ready: Iterator[Slot], room: int, may_start: MayStart) -> list[Slot]:
        """Pick at most ``room`` of the ready slots (oldest first) for the worker that pulls."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """First issued, first served."""

    def choose(self, ready: Iterator[Slot], room: int, may_start: MayStart) -> list[Slot]:
        chosen: list[Slot] = []
        for slot in ready:
            if len(chosen) >= room:
                break
            # Issue order is training order: if this one may not start yet, no later one may.
            if not may_start(slot):
                break
            chosen.append(slot)
        return chosen


class Batcher(Protocol):
    """When is a micro-batch full?"""

    def full(self, groups: int, tokens: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Full as soon as it holds at least ``tokens`` tokens; the remainder of a step is always full."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a micro-batch of {self.tokens} tokens would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int) -> bool:  # noqa: ARG002 (the seam offers both)
        return tokens >= self.tokens


@dataclass(frozen=True, slots=True)
class GroupCount:
    """Full at a fixed number of groups."""

    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"a micro-batch of {self.groups} groups would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int) -> bool:  # noqa: ARG002
        return groups >= self.groups
