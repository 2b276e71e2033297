"""Recovery after a restart: the workers of the earlier controller that are awaited, and what they are known to hold.

While the controller recovers, requests are parked and no column counts as lost.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flowrt.controller.state.replay import ReplayedSamples
from flowrt.ids import WorkerId
from flowrt.protocol.messages import CheckpointWritten, StepCompleted

Deferrable = StepCompleted | CheckpointWritten
"""Messages that are handled after recovery: a step contains the work of several workers."""


@dataclass(slots=True)
class Recovery:
    """The mode of the controller: recovering while ``is_active``, serving otherwise."""

    replayed: ReplayedSamples | None = None
    claims: Mapping[tuple[str, int], Collection[WorkerId]] = field(default_factory=dict)
    """Workers that held a column according to the replay log, by (column, id of the slot or group)."""
    awaited: dict[WorkerId, str] = field(default_factory=dict)
    """Workers of the earlier controller that have not sent their inventories, and their roles."""
    vacant: list[str] = field(default_factory=list)
    """Roles that were vacant under the earlier controller."""
    returned: set[WorkerId] = field(default_factory=set)
    """Members that rejoined from an earlier controller."""
    unconfirmed: set[WorkerId] = field(default_factory=set)
    """Those of them that have not sent their inventories: they get no work and no weights, also after recovery."""
    deferred: list[tuple[WorkerId, Deferrable]] = field(default_factory=list)
    until_s: float | None = None  # end of the rejoin timeout; None: not begun
    is_active: bool = False

    def begin(self, replayed: ReplayedSamples, members: Mapping[str, str]) -> None:
        """Enter recovery with the samples of an earlier controller and the roles of its members."""
        self.replayed = replayed
        self.is_active = True
        self.claims = replayed.claims
        self.awaited = {WorkerId(worker): role for worker, role in members.items()}

    def join(self, worker: WorkerId, term: int) -> None:
        """Note a worker that rejoined, if it has a ``term``, or a new one, which holds nothing of an earlier worker."""
        if term:
            self.returned.add(worker)
            self.unconfirmed.add(worker)
        else:
            self.returned.discard(worker)
            self.unconfirmed.discard(worker)
            self.awaited.pop(worker, None)

    def leave(self, worker: WorkerId) -> None:
        """Note that a member is gone: its inventory will not come."""
        self.unconfirmed.discard(worker)

    def is_parked(self, worker: WorkerId) -> bool:
        """Whether pulls of the worker wait: for the end of recovery, or for its inventory.

        A slot that a worker was granted before its inventory is handled might be one of which the inventory lists older
        tensors; the order to free these would free the new ones.
        """
        return self.is_active or worker in self.unconfirmed

    def has_returned(self, worker: WorkerId) -> bool:
        """Whether the worker was a member under an earlier controller of the run."""
        return worker in self.returned

    def is_too_late(self, worker: str, term: int) -> bool:
        """Whether the worker rejoins when it is no longer awaited: its work was given to others."""
        return term > 0 and worker not in self.awaited

    def defer(self, worker: WorkerId, message: Deferrable) -> None:
        """Keep a message until recovery has ended."""
        self.deferred.append((worker, message))

    def take_deferred(self) -> list[tuple[WorkerId, Deferrable]]:
        """Remove and return the deferred messages, in order of arrival."""
        deferred = self.deferred
        self.deferred = []
        return deferred

    def complete(self, worker: WorkerId) -> None:
        """Note that the worker has sent its inventory."""
        self.awaited.pop(worker, None)
        self.unconfirmed.discard(worker)

    def is_over(self, now: float, timeout_s: float) -> bool:
        """Whether all awaited workers have returned, or the timeout is over, which starts with the first call."""
        if self.until_s is None:
            self.until_s = now + timeout_s
        return not self.awaited or now >= self.until_s

    def extend_deadline(self, seconds: float) -> None:
        """Extend the rejoin timeout, if it has begun."""
        if self.until_s is not None:
            self.until_s += seconds

    def end(self) -> dict[WorkerId, str]:
        """Leave recovery; returns the workers that did not return, and their roles.

        What an inventory that comes later lists may be made again by then, so no worker is known to hold it any more.
        """
        absent = self.awaited
        self.replayed = None
        self.claims = {}
        self.is_active = False
        self.awaited = {}
        return absent
