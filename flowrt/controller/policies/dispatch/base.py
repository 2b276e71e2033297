"""Dispatch protocol and the default policy, FIFO.

A dispatch policy is a value that makes a queue of ready slots for each stage. The default order is that of issue (ids
grow with time), never of completion: an order of completion prefers short answers and biases training.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from operator import lt
from typing import Protocol

from flowrt.controller.state.slots import Slot
from flowrt.ids import WorkerId
from flowrt.protocol.messages import Stage


class Start(Enum):
    """Whether the pulling worker may start on a slot."""

    NOW = "now"
    NOT_YET = "not yet"  # admission: the weights would be too old; then no later slot may start either
    ELSEWHERE = "elsewhere"  # its offer demands newer weights; later slots may start


@dataclass(slots=True)  # hot path: not frozen
class Puller:
    """A pulling worker, and what it may take."""

    worker: WorkerId
    room: int  # slots, at least 1
    may_start: Callable[[Slot], Start] | None  # None: the stage does not generate, so any ready slot may start
    version: int = -1  # version that the worker generates with; -1: the stage does not generate
    is_pinned: bool = False  # whether the worker is pinned to a version for its evaluation


class Queue(Protocol):
    """The slots that are ready for one stage, each at most once. Every method but `take` is O(log n) for each slot."""

    @property
    def is_impartial(self) -> bool:
        """True if, when `take` returns nothing for version v, it returns nothing for any version <= v."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, slot: Slot) -> bool: ...

    def add(self, slots: Iterable[Slot]) -> None:
        """Add slots that became ready; those already in the queue are ignored."""
        ...

    def discard(self, slot: Slot) -> None:
        """Remove a slot that is no longer ready, if it is in the queue."""
        ...

    def take(self, puller: Puller) -> list[Slot]:
        """Remove and return at most ``room`` slots; an empty list keeps the puller waiting."""
        ...

    def on_generated(self, slot: Slot, tokens: int) -> None:
        """Note that a response of ``tokens`` tokens was generated for a slot (generating stages only)."""
        ...


class Dispatch(Protocol):
    """Which worker gets which ready slots?"""

    def queue(self, stage: Stage) -> Queue:
        """A new empty queue for a stage."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """First issued, first served."""

    def queue(self, stage: Stage) -> "FifoQueue":  # noqa: ARG002
        return FifoQueue()


class FifoQueue:
    """Serves slots in order of ids. Slots added in order cost O(1); slots that come back are kept in a heap."""

    is_impartial = True

    def __init__(self) -> None:
        self._ready: dict[int, Slot] = {}
        # Ids that may be ready: an entry whose slot is not in `_ready` is stale. A slot may have several entries.
        self._in_order: deque[int] = deque()
        self._late: list[int] = []

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, slot: Slot) -> bool:
        return slot.id in self._ready

    def add(self, slots: Iterable[Slot]) -> None:
        ready, strict_issue_order = self._ready, self._in_order
        last = strict_issue_order[-1] if strict_issue_order else -1
        slots = tuple(slots)
        ids = [slot.id for slot in slots]
        if len(ids) > 1 and ids[0] > last and all(map(lt, ids, ids[1:])) and ready.keys().isdisjoint(ids):
            ready.update(zip(ids, slots, strict=True))
            strict_issue_order.extend(ids)
            return
        for slot in slots:
            if slot.id in ready:
                continue
            ready[slot.id] = slot
            if slot.id > last:
                last = slot.id
                strict_issue_order.append(last)
            else:
                heapq.heappush(self._late, slot.id)

    def discard(self, slot: Slot) -> None:
        self._ready.pop(slot.id, None)
        if not self._ready:
            self._in_order.clear()
            self._late.clear()

    def take(self, puller: Puller) -> list[Slot]:
        may_start, room = puller.may_start, puller.room
        taken: list[Slot] = []
        if may_start is None and not self._late:
            ready, strict_issue_order = self._ready, self._in_order
            while room == 1 and strict_issue_order:
                slot = ready.pop(strict_issue_order.popleft(), None)
                if slot is not None:
                    return [slot]
            while strict_issue_order and len(taken) < room:
                ids = [strict_issue_order.popleft() for _ in range(min(room - len(taken), len(strict_issue_order)))]
                taken += filter(None, map(ready.pop, ids, repeat(None)))
            return taken
        passed: list[Slot] = []
        while len(taken) < room and (slot := self._pop()) is not None:
            start = Start.NOW if may_start is None else may_start(slot)
            if start is Start.NOW:
                taken.append(slot)
                continue
            passed.append(slot)
            if start is Start.NOT_YET:
                break
        for slot in passed:
            self._ready[slot.id] = slot
            heapq.heappush(self._late, slot.id)
        return taken

    def on_generated(self, slot: Slot, tokens: int) -> None:
        pass

    def _pop(self) -> Slot | None:
        strict_issue_order, late = self._in_order, self._late
        while strict_issue_order or late:
            item = (
                heapq.heappop(late)
                if late and (not strict_issue_order or late[0] < strict_issue_order[0])
                else strict_issue_order.popleft()
            )
            slot = self._ready.pop(item, None)
            if slot is not None:
                return slot
        return None
