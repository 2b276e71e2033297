"""The workers that pull from a queue: how many rows each has and which slots it is running."""

from dataclasses import dataclass, field

from flowrt.controller.dispatch import Puller
from flowrt.controller.slots import Slot
from flowrt.ids import WorkerId


@dataclass(slots=True)
class _Member:
    rows: int = 0  # the most that it was ever seen to have
    seen: int = 0  # slots given out by the time of its last pull
    slots: dict[int, tuple[Slot, bool]] = field(default_factory=dict)  # given to it, and whether from the tail lane


class Crew:
    """Who pulls, seen from a queue. Nobody tells a queue who has gone: who stays silent for long is forgotten.

    A slot that was given to a worker counts as running while that worker has a lease on it, so whoever takes slots
    from the queue leases them before the next take.
    """

    def __init__(self, stage: str, forget_after: int) -> None:
        self._stage = stage
        self._forget_after = forget_after  # slots given out since its last pull
        self._given = 0
        self._members: dict[WorkerId, _Member] = {}  # who has been silent for longest comes first
        self.reserved: frozenset[WorkerId] = frozenset()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def rows(self) -> int:
        """Of one worker; of unequal ones the least."""
        return min((member.rows for member in self._members.values()), default=0)

    def meet(self, puller: Puller) -> bool:
        """Note who pulls; returns whether that changes the crew."""
        member = self._members.pop(puller.worker, None) or _Member()
        self._members[puller.worker] = member
        member.seen = self._given
        # A parked pull may be older than the end of some of its rows: then it has more room than it asks for.
        rows = max(member.rows, self.running(puller.worker) + puller.room)
        changed, member.rows = rows != member.rows, rows
        silent = next(iter(self._members))
        if self._given - self._members[silent].seen > self._forget_after:
            del self._members[silent]
            changed = True
        return changed

    def gave(self, worker: WorkerId, slots: list[Slot], tail: bool) -> None:
        self._given += len(slots)
        self._members[worker].slots.update((slot.id, (slot, tail)) for slot in slots)

    def reserve(self, workers: int) -> None:
        """Set so many workers apart: the same ones every time, as long as all are there."""
        self.reserved = frozenset(sorted(self._members)[:workers])

    def running(self, worker: WorkerId) -> int:
        return len(self._leased(worker))

    def tail_running(self, worker: WorkerId) -> int:
        return sum(tail for _, tail in self._leased(worker).values())

    def _leased(self, worker: WorkerId) -> dict[int, tuple[Slot, bool]]:
        member = self._members[worker]
        member.slots = {
            slot_id: (slot, tail)
            for slot_id, (slot, tail) in member.slots.items()
            if (lease := slot.leases.get(self._stage)) is not None and lease.worker == worker
        }
        return member.slots
