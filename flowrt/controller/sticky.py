"""Dispatch to the owner: of the oldest slots, a puller gets those whose columns it already has."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flowrt.controller.dispatch import FifoQueue, Puller
from flowrt.controller.slots import Slot
from flowrt.errors import ConfigError
from flowrt.wire.records import Stage

PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Sticky:
    """Of the ``look`` oldest slots that may start, the one of which the puller holds the most bytes.

    Equal bytes are settled in order of issue, so a look of 1 is first issued, first served. A slot is overtaken by
    `most_overtaking` later ones at most; then it goes to whoever pulls next and may start it.
    """

    look: int

    def __post_init__(self) -> None:
        if self.look < 1:
            raise ConfigError(f"a look of {self.look} slots would never find one; use 1 or more")

    def queue(self, stage: Stage) -> "StickyQueue":  # noqa: ARG002 (every stage has columns to be moved)
        return StickyQueue(self)

    @property
    def most_overtaking(self) -> int:
        """How many later slots can be served before a slot that may start."""
        return PATIENCE * self.look


class StickyQueue:
    """In order of issue, with a count of how often each of the oldest has been overtaken."""

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
        """As many as there is room for, each chosen from the ``look`` oldest of what is left by then."""
        look = self._policy.look
        oldest = self._ready.take(replace(puller, room=puller.room + look - 1))
        bytes_of = [puller.held_bytes(slot) for slot in oldest] if look > 1 else [0] * len(oldest)
        taken: list[Slot] = []
        while oldest and len(taken) < puller.room:
            place = self._choose(oldest[:look], bytes_of)
            for slot in oldest[:place]:
                self._overtaken[slot.id] = self._overtaken.get(slot.id, 0) + 1
            taken.append(oldest.pop(place))
            del bytes_of[place]
            self._overtaken.pop(taken[-1].id, None)
        self._ready.add(oldest)
        return taken

    def made(self, slot: Slot, tokens: int) -> None:
        pass

    def _choose(self, window: list[Slot], bytes_of: list[int]) -> int:
        """The place of the next slot: one that has been overtaken too often, else the one with the most bytes."""
        for place, slot in enumerate(window):
            if self._overtaken.get(slot.id, 0) >= self._policy.most_overtaking:
                return place
        return max(range(len(window)), key=lambda place: (bytes_of[place], -place))
