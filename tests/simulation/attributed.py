"""A simulated run whose time is attributed: workers with leases are busy, and the core reports why the others wait."""

from dataclasses import dataclass, field
from typing import Any

from flowrt.controller.attribution.account import StepAccount, TimeAccount
from flowrt.controller.attribution.causes import Interval
from flowrt.controller.events import Event, MessageReceived, WorkerConnected
from flowrt.ids import TRAINER, WorkerId
from flowrt.protocol import messages as m
from flowrt.simulation.cluster import ClusterPlan, ClusterSimulation

PATIENCE_S = 3.0


@dataclass
class AttributedRun:
    """The steps of a run, and the seconds of each worker."""

    steps: list[StepAccount] = field(default_factory=list)
    workers: int = 0
    wall_s: float = 0.0

    def shares(self, role: str) -> dict[str, float]:
        """The share of each kind in the time of a role."""
        total: dict[str, float] = {}
        for step in self.steps:
            for kind, seconds in step.seconds[role].items():
                total[kind] = total.get(kind, 0.0) + seconds
        whole = sum(total.values())
        return {kind: seconds / whole for kind, seconds in total.items()}

    def first_root(self, role: str, kind: str) -> str:
        """The root with the most seconds of a cause."""
        roots: dict[str, float] = {}
        for step in self.steps:
            for (of, cause, root), seconds in step.roots.items():
                if (of, cause) == (role, kind):
                    roots[root] = roots.get(root, 0.0) + seconds
        return max(roots, key=lambda root: roots[root])


class AttributedSimulation(ClusterSimulation):
    """A `ClusterSimulation` that collects the waits of its core as the server does."""

    def __init__(self, plan: ClusterPlan) -> None:
        super().__init__(plan)
        self.account = TimeAccount(0.0, 0, PATIENCE_S)
        self.account.training_started(0.0)
        self.found = AttributedRun()
        self._busy_since_s: dict[WorkerId, float] = {}
        self._closed = 0

    def _handle(self, event: Event) -> None:
        if isinstance(event, WorkerConnected):
            self.account.joined(event.worker, event.role, self.now_s)
            self.found.workers += 1
        super()._handle(event)
        self._record_busy(event)
        for at_s, closed in self.steps[self._closed :]:
            self.account.close_step(closed.step, at_s)
        self._closed = len(self.steps)
        self._collect_waits()

    def _record_busy(self, event: Event) -> None:
        """A trainer is busy between its pulls, every other worker while it has leases."""
        held = {lease.worker for lease in self.core.state.table.leases.values() if lease.stage != "train"}
        if self.core.state.requests.first(WorkerId(TRAINER)) is None and self.steps_begun:
            held.add(WorkerId(TRAINER))
        for worker in [busy for busy in self._busy_since_s if busy not in held]:
            since_s = self._busy_since_s.pop(worker)
            if self.now_s > since_s:
                span = Interval("work", since_s, self.now_s, self.now_s - since_s)
                self.account.add_spans(worker, (span,))
        for worker in sorted(held):
            self._busy_since_s.setdefault(worker, self.now_s)
        if isinstance(event, MessageReceived) and isinstance(event.message, m.Pull):
            self.steps_begun = True

    steps_begun = False

    def _collect_waits(self, at_end: bool = False) -> None:
        self.account.add_waits(self.core.waits.take())
        waits = self.core.waits.open_waits(self.now_s)
        if at_end:
            self.found.steps += self.account.finish(self.now_s, waits)

    def attribute(self) -> AttributedRun:
        """Run to the end and attribute all of it."""
        self.run()
        for worker, since_s in self._busy_since_s.items():
            self.account.add_spans(worker, (Interval("work", since_s, self.now_s, self.now_s - since_s),))
        self._collect_waits(at_end=True)
        self.found.wall_s = self.now_s
        return self.found


def attribute(plan: ClusterPlan) -> AttributedRun:
    """Attribute a simulated run."""
    return AttributedSimulation(plan).attribute()


def lines(run: AttributedRun) -> list[dict[str, Any]]:
    """The lines of attribution.jsonl."""
    return [step.as_json(0.0) for step in run.steps]
