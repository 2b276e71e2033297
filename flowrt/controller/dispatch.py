"""The dispatch seam: who gets which ready slots.

A dispatch policy is a value; for each stage it makes a queue of the slots that are ready. The default is in order of
issue (ids grow with time), never of completion: whoever picks by completion order prefers short answers and biases
what is trained. The other policies are in files of their own: `priority`, `sticky`, `tail`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from operator import lt
from typing import Protocol

from flowrt.controller.slots import Slot
from flowrt.ids import WorkerId
from flowrt.wire.records import Stage


class Start(Enum):
    """Whether the pulling worker may start on a slot."""

    NOW = "now"
    NOT_YET = "not yet"  # admission: the weights would be too old; in issue order no later slot may start either
    ELSEWHERE = "elsewhere"  # it waits for newer weights of its own wish and holds up nobody behind it


@dataclass(slots=True)  # not frozen: one is made for every message, and that takes three times as long
class Puller:
    """Who pulls, and what it may take."""

    worker: WorkerId
    room: int  # slots, at least 1
    may_start: Callable[[Slot], Start] | None  # None: the stage does not generate, so whatever is ready may start
    held_bytes: Callable[[Slot], int]  # of the columns that the stage needs of a slot, those that the worker has


class Queue(Protocol):
    """The slots that are ready for one stage. A slot is in it at most once; every method but `take` is O(log n)."""

    @property
    def is_impartial(self) -> bool:
        """What it has not for one worker, it has not for any other whose weights are no newer."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, slot: Slot) -> bool: ...

    def add(self, slots: Iterable[Slot]) -> None:
        """These have become ready (those already here change nothing)."""
        ...

    def discard(self, slot: Slot) -> None:
        """It is not ready any more, if it was."""
        ...

    def take(self, puller: Puller) -> list[Slot]:
        """Remove at most ``room`` slots and hand them to the puller; an empty list keeps it waiting."""
        ...

    def made(self, slot: Slot, tokens: int) -> None:
        """Somebody has generated ``tokens`` tokens for this slot (generating stages only): learn from it."""
        ...


class Dispatch(Protocol):
    """Who gets which ready slots?"""

    def queue(self, stage: Stage) -> Queue:
        """A fresh, empty queue for a stage."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """First issued, first served."""

    def queue(self, stage: Stage) -> "FifoQueue":  # noqa: ARG002
        return FifoQueue()


class FifoQueue:
    """In order of ids. What comes in order costs O(1); what comes back late goes through a heap."""

    is_impartial = True

    def __init__(self) -> None:
        self._ready: dict[int, Slot] = {}
        # Ids that may be ready: an entry whose slot is not in `_ready` is void. A slot may have several.
        self._in_order: deque[int] = deque()
        self._late: list[int] = []

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, slot: Slot) -> bool:
        return slot.id in self._ready

    def add(self, slots: Iterable[Slot]) -> None:
        ready, in_order = self._ready, self._in_order
        last = in_order[-1] if in_order else -1
        slots = tuple(slots)
        ids = [slot.id for slot in slots]
        if len(ids) > 1 and ids[0] > last and all(map(lt, ids, ids[1:])) and ready.keys().isdisjoint(ids):
            ready.update(zip(ids, slots, strict=True))
            in_order.extend(ids)
            return
        for slot in slots:
            if slot.id in ready:
                continue
            ready[slot.id] = slot
            if slot.id > last:
                last = slot.id
                in_order.append(last)
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
            ready, in_order = self._ready, self._in_order
            while room == 1 and in_order:
                slot = ready.pop(in_order.popleft(), None)
                if slot is not None:
                    return [slot]
            while in_order and len(taken) < room:
                ids = [in_order.popleft() for _ in range(min(room - len(taken), len(in_order)))]
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

    def made(self, slot: Slot, tokens: int) -> None:
        pass

    def _pop(self) -> Slot | None:
        in_order, late = self._in_order, self._late
        while in_order or late:
            item = heapq.heappop(late) if late and (not in_order or late[0] < in_order[0]) else in_order.popleft()
            slot = self._ready.pop(item, None)
            if slot is not None:
                return slot
        return None
