"""The controller of a simulation that crashes and comes back: what it left behind, and workers that find it again."""

from collections import Counter

from flowrt.client.requests import ResyncState
from flowrt.controller.events import WorkerConnected
from flowrt.controller.state.replay import (
    CounterSet,
    Entry,
    GroupsClosed,
    GroupsOpened,
    RecoveredState,
    StageCommitted,
    StageUndone,
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
    """A worker that knows what it has to tell a controller that has come back, as a session does."""

    def __init__(self, worker: str, role: str, shared: Shared) -> None:
        self.memory = ResyncState(RENEWABLE)
        self.open: dict[int, m.Pull | m.Offer | m.Commit] = {}
        super().__init__(worker, role, shared)

    def send(self, message: m.Message) -> None:
        match message:
            case m.Pull() | m.Offer() | m.Commit():
                self.open[message.request] = message
            case m.StepCompleted():
                self.memory.step_done(message)
            case m.ReleaseLease():
                self.memory.lease_ended(message.slots, message.leases)
            case m.RoleCompleted():
                self.memory.finished()
        super().send(message)

    def receive(self, message: m.Message) -> None:
        match message:
            case m.Grant(request):
                pull = self.open.pop(request, None)
                assert isinstance(pull, m.Pull), f"{self.id} was granted what it did not ask for, or asked for twice"
                self.memory.granted(pull, message)
            case m.Committed(request):
                commit = self.open.pop(request, None)
                if commit is not None:  # else it was said twice, and this is the answer to the repetition
                    assert isinstance(commit, m.Commit)
                    self.memory.lease_ended(commit.slots, commit.leases)
            case m.OfferAccepted(request) | m.Rejected(request):
                self.open.pop(request, None)
        super().receive(message)

    def come_back(self, term: int) -> None:
        """The connection is cut, and there is a new controller to be told of all that is here."""
        for request in [request for request in self.open if request in self.withdrawn]:
            del self.open[request]
            self.pulling = False
        self.coming.clear()
        for job in list(self.jobs):
            if any(key not in self.have for row in job.rows for key in row.needs):
                self.abandon(job, False, "its tensors were on their way")  # which nobody hears
        self.inbox.clear()
        self.outbox.clear()
        self.expected.clear()
        self.relays.clear()
        self.forms = {form: one for form, one in self.forms.items() if form[0] in self.weights}
        self.outbox.append(WorkerConnected(worker=self.id, role=self.role, host="host", lanes=(), term=term))
        if self.role == "rollout":
            super().send(m.WeightsActivated(MODEL, self.applied))
        for message in [*self.memory.renewals(), *self.memory.repeated_messages(), *self.open.values()]:
            super().send(message)
        mine = self.role == "trainer"
        weights = tuple(one for (_, base), one in self.forms.items() if base == NO_BASE or mine)
        super().send(m.Inventory(self._inventory(), weights))

    def _inventory(self) -> tuple[Part, ...]:
        """What is here for good: not what a commit without an answer brings."""
        found: dict[str, dict[int, int]] = {}
        for (column, item), (length, request) in self.have.items():
            if not isinstance(self.open.get(request), m.Commit):
                found.setdefault(column, {})[item] = length
        return tuple(Part(column, tuple(items), tuple(items.values())) for column, items in found.items())


class Durable:
    """What a ledger would have on disk."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._roles: dict[str, str] = {}
        self._log: list[GroupsOpened | StageCommitted | StageUndone | GroupsClosed] = []
        self.dropped: Counter[str] = Counter()

    def keep(self, entry: Entry) -> None:
        match entry:
            case CounterSet(name, value):
                self._numbers[name] = value
            case WorkerJoined(worker, role):
                self._roles[worker] = role
            case WorkerLeft(worker):
                self._roles.pop(worker, None)
            case _:
                self._log.append(entry)

    def recovered(self) -> RecoveredState:
        return RecoveredState(dict(self._numbers), dict(self._roles), tuple(self._log), dict(self.dropped))
