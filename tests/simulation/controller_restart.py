"""A controller that crashes and restarts in a simulation: its durable state, and workers that rejoin it."""

from collections import Counter

from flowrt.client.requests import ResyncState
from flowrt.controller.events import WorkerConnected
from flowrt.controller.state.controller_restart import (
    CounterSet,
    DrainEnded,
    Entry,
    GroupsClosed,
    GroupsOpened,
    Order,
    RecoveredState,
    RunPreempted,
    StageCommitted,
    StageUndone,
    WorkerDrained,
    WorkerJoined,
    WorkerLeft,
)
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, Part
from tests.simulation.rows import Shared
from tests.simulation.scenario import MODEL
from tests.simulation.worker import Worker

RENEWABLE = ("rollout", "train")


class RejoiningWorker(Worker):
    """A worker that resynchronizes with a restarted controller, as a session does."""

    def __init__(self, worker: str, role: str, shared: Shared) -> None:
        self.resync = ResyncState(RENEWABLE)
        self.open_requests: dict[int, m.Pull | m.Offer | m.Commit] = {}
        super().__init__(worker, role, shared)

    def send(self, message: m.Message) -> None:
        match message:
            case m.Pull() | m.Offer() | m.Commit():
                self.open_requests[message.request] = message
            case m.StepCompleted():
                self.resync.step_done(message)
            case m.ReleaseLease():
                self.resync.lease_ended(message.slots, message.leases)
            case m.RoleCompleted():
                self.resync.finished()
            case m.Drain():
                self.resync.drained(message)
        super().send(message)

    def receive(self, message: m.Message) -> None:
        match message:
            case m.Grant(request):
                pull = self.open_requests.pop(request, None)
                assert isinstance(pull, m.Pull), f"{self.id} was granted a request that is not open"
                self.resync.granted(pull, message)
            case m.Committed(request):
                commit = self.open_requests.pop(request, None)
                if commit is not None:  # else it was sent twice, and this is the second reply
                    assert isinstance(commit, m.Commit)
                    self.resync.lease_ended(commit.slots, commit.leases)
            case m.OfferAccepted(request) | m.Rejected(request):
                self.open_requests.pop(request, None)
        super().receive(message)
        if isinstance(message, m.Stop) and self.terminated:
            self.alive = False  # another worker takes its place

    def reconnect(self, term: int) -> None:
        """Connect to the restarted controller and report the local state."""
        for request in [request for request in self.open_requests if request in self.withdrawn]:
            del self.open_requests[request]
            self.pulling = False
        self.coming.clear()
        for job in list(self.jobs):
            if any(key not in self.have for row in job.rows for key in row.needs):
                self.abandon(job, False, "its tensors were on their way")  # its message is discarded below
        self.inbox.clear()
        self.outbox.clear()
        self.expected.clear()
        self.relays.clear()
        self.kept = None
        self.forms = {form: held for form, held in self.forms.items() if form[0] in self.weights}
        self.outbox.append(WorkerConnected(worker=self.id, role=self.role, host="host", lanes=(), term=term))
        if self.role == "rollout":
            super().send(m.WeightsActivated(MODEL, self.applied))
        for message in [*self.resync.renewals(), *self.resync.repeated_messages(), *self.open_requests.values()]:
            super().send(message)
        is_trainer = self.role == "trainer"
        weights = tuple(held for (_, base), held in self.forms.items() if base == NO_BASE or is_trainer)
        super().send(m.Inventory(self._inventory(), weights))

    def _inventory(self) -> tuple[Part, ...]:
        """The tensors that are here, without those of commits that have no reply yet."""
        parts: dict[str, dict[int, int]] = {}
        for (column, item), (length, request) in self.have.items():
            if not isinstance(self.open_requests.get(request), m.Commit):
                parts.setdefault(column, {})[item] = length
        return tuple(Part(column, tuple(items), tuple(items.values())) for column, items in parts.items())


class DurableState:
    """The restart log that a ledger has on disk."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._roles: dict[str, str] = {}
        self._log: list[GroupsOpened | StageCommitted | StageUndone | GroupsClosed] = []
        self._orders: dict[str, Order] = {}
        self.dropped: Counter[str] = Counter()

    def keep(self, entry: Entry) -> None:
        match entry:
            case CounterSet(name, value):
                self._numbers[name] = value
            case WorkerJoined(worker, role):
                self._roles[worker] = role
            case WorkerLeft(worker):
                self._roles.pop(worker, None)
            case WorkerDrained(worker):
                self._orders[worker] = entry
            case DrainEnded(worker):
                self._orders.pop(worker, None)
            case RunPreempted():
                self._orders[""] = entry
            case _:
                self._log.append(entry)

    def recovered(self) -> RecoveredState:
        return RecoveredState(
            dict(self._numbers), dict(self._roles), tuple(self._log), dict(self.dropped), tuple(self._orders.values())
        )
