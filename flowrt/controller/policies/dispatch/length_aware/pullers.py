"""Statistics of the workers that pull from a queue: rows of each, and the slots it runs."""

from dataclasses import dataclass, field

from flowrt.controller.policies.dispatch.base import Puller
from flowrt.controller.state.samples import Slot
from flowrt.ids import WorkerId


@dataclass(slots=True)
class _Member:
    rows: int = 0  # maximum seen so far
    seen: int = 0  # slots taken from the queue by the time of its last pull
    slots: dict[int, tuple[Slot, bool]] = field(default_factory=dict)  # taken by it, and whether from the tail lane

    def pull(self, room: int, running: int, seen: int) -> bool:
        """Record a pull; returns True if the worker has more rows than at any earlier one."""
        self.seen = seen
        # A parked pull may predate the end of some rows: then the worker has more room than it asks for.
        rows = max(self.rows, running + room)
        has_grown = rows != self.rows
        self.rows = rows
        return has_grown

    def running(self, worker: WorkerId, stage: str) -> dict[int, tuple[Slot, bool]]:
        """The taken slots on which the worker still has a lease; the others are forgotten."""
        self.slots = {
            slot_id: (slot, tail)
            for slot_id, (slot, tail) in self.slots.items()
            if (lease := slot.leases.get(stage)) is not None and lease.worker == worker
        }
        return self.slots


class PullerStats:
    """The workers that pull. A queue does not learn that a worker left, so one without pulls for long is removed.

    A slot counts as running while the worker that took it has a lease on it, so slots must be leased before the next
    take.
    """

    def __init__(self, stage: str, remove_after: int) -> None:
        self._stage = stage
        self._remove_after = remove_after  # slots taken since a worker's last pull
        self._taken = 0
        self._members: dict[WorkerId, _Member] = {}  # least recent pull first
        self.reserved: frozenset[WorkerId] = frozenset()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def rows(self) -> int:
        """Rows of the worker that has the fewest."""
        return min((member.rows for member in self._members.values()), default=0)

    def observe(self, puller: Puller) -> bool:
        """Record a pull; returns True if that changes the workers or their rows."""
        member = self._members.pop(puller.worker, None) or _Member()
        self._members[puller.worker] = member
        changed = member.pull(puller.room, self.running(puller.worker), self._taken)
        oldest = next(iter(self._members))
        if self._taken - self._members[oldest].seen > self._remove_after:
            del self._members[oldest]
            changed = True
        return changed

    def record_taken(self, worker: WorkerId, slots: list[Slot], tail: bool) -> None:
        self._taken += len(slots)
        self._members[worker].slots.update((slot.id, (slot, tail)) for slot in slots)

    def reserve(self, workers: int) -> None:
        """Reserve this number of workers: the same ones each time, as long as all are connected."""
        self.reserved = frozenset(sorted(self._members)[:workers])

    def running(self, worker: WorkerId) -> int:
        return len(self._leased(worker))

    def tail_running(self, worker: WorkerId) -> int:
        return sum(tail for _, tail in self._leased(worker).values())

    def _leased(self, worker: WorkerId) -> dict[int, tuple[Slot, bool]]:
        return self._members[worker].running(worker, self._stage)
