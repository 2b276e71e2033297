"""Priority dispatch with ageing: the most urgent slot first, without starvation.

A slot's rank is ``ageing * group_id - key(slot)``, and the lowest rank is served first. Groups are numbered in order of
issue, so each later group starts with a rank that is higher by ``ageing``. Since all slots age at the same rate their
order never changes while they wait, and a heap with fixed ranks is enough.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flowrt.controller.policies.dispatch.base import Puller, Start
from flowrt.controller.state.slots import Slot
from flowrt.errors import ConfigError
from flowrt.protocol.messages import Stage

SLACK = 64  # stale entries that a heap may have in excess of its number of live entries


class SlotHeap:
    """Slots by fixed rank, ties in order of issue. O(log n) amortised: a discarded slot leaves a stale entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        # An entry of the heap is live if it is the same object: a stale entry of a slot that came back may be equal.
        self._live: dict[int, tuple[tuple[float, int], Slot]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, slot: Slot) -> bool:
        return slot.id in self._live

    def add(self, slot: Slot, rank: float) -> None:
        """Add a slot; low ranks come first. A slot that is already in the heap keeps its rank."""
        if slot.id not in self._live:
            entry = (rank, int(slot.id))
            self._live[slot.id] = (entry, slot)
            heapq.heappush(self._heap, entry)

    def discard(self, slot: Slot) -> float | None:
        """Remove a slot; returns its rank, or None if it was not in the heap."""
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
        """The slot of the lowest rank, without removing it."""
        while self._heap:
            entry = self._heap[0]
            live = self._live.get(entry[1])
            if live is not None and live[0] is entry:
                return live[1]
            heapq.heappop(self._heap)
        return None


@dataclass(frozen=True, slots=True)
class Priority:
    """Most urgent first; a constant ``key`` is FIFO.

    A later group can overtake a slot only if it was issued less than ``spread / ageing`` groups after the slot's own,
    where ``spread`` is the largest difference of their keys. `most_overtaking` is the maximum number of such groups.
    Raises ConfigError for a value out of range. A queue raises ConfigError for a key that is not finite.
    """

    key: Callable[[Slot], float]  # of a slot as it becomes ready; higher is more urgent
    ageing: float  # urgency that a slot gains over each group issued after its own
    max_skips: int = 32  # maximum number of slots that one pull skips because they may not start yet

    def __post_init__(self) -> None:
        if not (self.ageing > 0 and math.isfinite(self.ageing)):
            raise ConfigError(f"ageing is {self.ageing}: the least urgent slot could wait forever; use more than 0")
        if self.max_skips < 1:
            raise ConfigError(f"max_skips is {self.max_skips}: no slot would ever be found; use 1 or more")

    def queue(self, stage: Stage) -> "PriorityQueue":  # noqa: ARG002
        return PriorityQueue(self)

    def most_overtaking(self, spread: float) -> int:
        """The maximum number of later groups served before a slot, if keys exceed its own by at most ``spread``."""
        return max(0, math.ceil(spread / self.ageing) - 1)


class PriorityQueue:
    """The ready slots in two heaps: by rank, and by issue."""

    is_impartial = True

    def __init__(self, policy: Priority) -> None:
        self._policy = policy
        self._by_rank = SlotHeap()
        self._by_issue = SlotHeap()

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._by_rank

    def add(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot not in self._by_rank:
                key = self._policy.key(slot)
                if not math.isfinite(key):
                    raise ConfigError(f"the priority of slot {slot.id} is {key}; let the key return a finite number")
                self._put(slot, self._policy.ageing * slot.group.id - key)

    def discard(self, slot: Slot) -> None:
        self._by_rank.discard(slot)
        self._by_issue.discard(slot)

    def take(self, puller: Puller) -> list[Slot]:
        """Take the most urgent slots that may start.

        If a slot may not start yet, no later slot may either: up to ``max_skips`` later slots are skipped without a
        check, and the pull ends when no older slot is left. After ``max_skips`` skips the rest of the room is filled in
        order of issue, so urgent slots that wait for weights cannot block old slots that may start.
        """
        taken: list[Slot] = []
        passed: list[tuple[Slot, float]] = []
        refused: Slot | None = None
        skips_left = self._policy.max_skips
        while len(taken) < puller.room and (oldest := self._by_issue.first()) is not None:
            if refused is not None and oldest.id > refused.id:
                break
            from_rank = self._by_rank if skips_left > 0 else self._by_issue
            slot = from_rank.first()
            assert slot is not None
            rank = self._remove(slot)
            if refused is not None and slot.id > refused.id:
                start = Start.NOT_YET
            else:
                start = Start.NOW if puller.may_start is None else puller.may_start(slot)
                refused = slot if start is Start.NOT_YET else refused
            if start is Start.NOW:
                taken.append(slot)
            else:
                passed.append((slot, rank))
                skips_left -= start is Start.NOT_YET
        for slot, rank in passed:
            self._put(slot, rank)
        return taken

    def on_generated(self, slot: Slot, tokens: int) -> None:
        pass

    def _put(self, slot: Slot, rank: float) -> None:
        self._by_rank.add(slot, rank)
        self._by_issue.add(slot, 0.0)

    def _remove(self, slot: Slot) -> float:
        self._by_issue.discard(slot)
        rank = self._by_rank.discard(slot)
        assert rank is not None
        return rank
