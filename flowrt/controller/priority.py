"""Dispatch by urgency, with ageing: the most urgent slot first, but nobody waits for ever.

A slot's rank is ``ageing`` × the number of its group − ``key(slot)``, and the lowest rank is served first. Groups are
numbered in order of issue, so every group that is issued later starts ``ageing`` further back. Since all slots age at
the same pace their order never changes while they wait, and a heap with fixed ranks is enough.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flowrt.controller.dispatch import Puller, Start
from flowrt.controller.slot_heap import SlotHeap
from flowrt.controller.slots import Slot
from flowrt.errors import ConfigError
from flowrt.wire.records import Stage


@dataclass(frozen=True, slots=True)
class Priority:
    """Most urgent first; a constant ``key`` is first issued, first served.

    A slot can be overtaken by a later group only while that group is less than ``spread / ageing`` groups later, where
    ``spread`` is how much more urgent it can be. `most_overtaking` is that number.
    """

    key: Callable[[Slot], float]  # of a slot as it becomes ready; higher is more urgent
    ageing: float  # urgency that a slot gains over each group issued after its own
    look: int = 32  # slots that one pull passes over because they may not start yet

    def __post_init__(self) -> None:
        if not (self.ageing > 0 and math.isfinite(self.ageing)):
            raise ConfigError(f"ageing is {self.ageing}: the least urgent slot could wait for ever; use more than 0")
        if self.look < 1:
            raise ConfigError(f"a look of {self.look} slots would never find one; use 1 or more")

    def queue(self, stage: Stage) -> "PriorityQueue":  # noqa: ARG002 (every stage has the same key)
        return PriorityQueue(self)

    def most_overtaking(self, spread: float) -> int:
        """How many later groups can be served before a slot when no key exceeds its own by more than ``spread``."""
        return max(0, math.ceil(spread / self.ageing) - 1)


class PriorityQueue:
    """The ready slots by rank, and the same slots by issue."""

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
        """The most urgent that may start.

        A slot that may not start yet says that no later one may either: those are passed over unasked, ``look`` of
        them at most, and the pull ends as soon as nothing older is left. Behind a full look the rest of the room is
        filled in order of issue, so urgent slots that wait for weights cannot hide the old ones that may start.
        """
        taken: list[Slot] = []
        passed: list[tuple[Slot, float]] = []
        refused: Slot | None = None
        looks = self._policy.look
        while len(taken) < puller.room and (oldest := self._by_issue.first()) is not None:
            if refused is not None and oldest.id > refused.id:
                break
            from_rank = self._by_rank if looks > 0 else self._by_issue
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
                looks -= start is Start.NOT_YET
        for slot, rank in passed:
            self._put(slot, rank)
        return taken

    def made(self, slot: Slot, tokens: int) -> None:
        pass

    def _put(self, slot: Slot, rank: float) -> None:
        self._by_rank.add(slot, rank)
        self._by_issue.add(slot, 0.0)

    def _remove(self, slot: Slot) -> float:
        self._by_issue.discard(slot)
        rank = self._by_rank.discard(slot)
        assert rank is not None
        return rank
