"""Locality-aware dispatch: of the oldest slots, a puller gets those of whose columns it holds the most bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flowrt.controller.policies.dispatch.base import FifoQueue, Puller
from flowrt.controller.state.samples import Slot
from flowrt.errors import ConfigError
from flowrt.protocol.messages import Stage

OVERTAKES_PER_CANDIDATE = 4


@dataclass(frozen=True, slots=True)
class Sticky:
    """Of the ``candidates`` oldest slots that may start, serve the one of which the puller holds the most bytes.

    Ties are served in order of issue, so one candidate is FIFO. A slot is overtaken by at most `most_overtaking` later
    slots; then the next puller that may start it gets it. Raises ConfigError for less than 1 candidate.
    """

    candidates: int

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ConfigError(f"{self.candidates} candidates would never contain a slot; use 1 or more")

    def queue(self, stage: Stage) -> "StickyQueue":  # noqa: ARG002
        return StickyQueue(self)

    @property
    def most_overtaking(self) -> int:
        """The maximum number of later slots that are served before a slot that may start."""
        return OVERTAKES_PER_CANDIDATE * self.candidates


class StickyQueue:
    """Slots in order of issue, with the number of times that each of the oldest slots was overtaken."""

    is_impartial = True

    def __init__(self, policy: Sticky) -> None:
        self._policy = policy
        self._ready = FifoQueue()
        self._overtaken: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._ready

    def add(self, slots: Iterable[Slot]) -> None:
        self._ready.add(slots)

    def discard(self, slot: Slot) -> None:
        self._ready.discard(slot)
        self._overtaken.pop(slot.id, None)

    def take(self, puller: Puller) -> list[Slot]:
        """Fill the room; each slot is chosen from the ``candidates`` oldest that are left."""
        candidates = self._policy.candidates
        oldest = self._ready.take(replace(puller, room=puller.room + candidates - 1))
        bytes_of = [puller.held_bytes(slot) for slot in oldest] if candidates > 1 else [0] * len(oldest)
        taken: list[Slot] = []
        while oldest and len(taken) < puller.room:
            index = self._choose(oldest[:candidates], bytes_of)
            for slot in oldest[:index]:
                self._overtaken[slot.id] = self._overtaken.get(slot.id, 0) + 1
            taken.append(oldest.pop(index))
            del bytes_of[index]
            self._overtaken.pop(taken[-1].id, None)
        self._ready.add(oldest)
        return taken

    def on_generated(self, slot: Slot, tokens: int) -> None:
        pass

    def _choose(self, window: list[Slot], bytes_of: list[int]) -> int:
        """The index of the next slot: one that reached its overtaking limit, else the one with the most bytes."""
        for place, slot in enumerate(window):
            if self._overtaken.get(slot.id, 0) >= self._policy.most_overtaking:
                return place
        return max(range(len(window)), key=lambda place: (bytes_of[place], -place))
