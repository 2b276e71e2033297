"""A simulated run that is interrupted and resumed: all its processes end, and only what is on disk remains."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowrt.controller.events import MessageReceived
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Position
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.rows import Row
from tests.simulation.scenario import Scenario


@dataclass(slots=True)
class ResumedRuns:
    """The executions of an interrupted run: the cluster of each, where each began, and their common ledger."""

    ledger: Ledger
    clusters: list[SimulatedCluster] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    checkpoint: int = 0  # steps of the newest one

    def next_position(self) -> Position:
        """Where the next execution begins."""
        self.positions.append(self.ledger.resume(self.checkpoint, float(len(self.clusters))))
        return self.positions[-1]

    def add(self, cluster: SimulatedCluster, interrupted: bool) -> None:
        """Add an execution. An interrupted one has on disk all that a checkpoint waited for, and some more."""
        written = len(cluster.records)
        if interrupted:
            written = cluster.rng.randint(cluster.durable, written)
        for record in cluster.records[:written]:
            self.ledger.add(record, float(len(self.clusters)))
        self.ledger.commit()
        self.clusters.append(cluster)
        self.checkpoint = max(self.checkpoint, newest_checkpoint(cluster))

    def trained(self) -> list[tuple[int, Row]]:
        """(step, row) of all training that no later execution rolled back."""
        ends = [position.step for position in self.positions[1:]]
        rows: list[tuple[int, Row]] = []
        for number, cluster in enumerate(self.clusters):
            rolled_back_to = min(ends[number:], default=cluster.scenario.steps)
            rows += [(step, row) for step, row in cluster.trained if step < rolled_back_to]
        return rows


def run_with_crashes(scenario: Scenario, crashes: Sequence[int], path: Path) -> ResumedRuns:
    """Run the scenario; each execution but the last ends after the given number of actions."""
    runs = ResumedRuns(Ledger(path))
    for number, max_actions in enumerate([*crashes, None]):
        position = runs.next_position()
        seeded = replace(scenario, seed=scenario.seed + number)
        cluster = SimulatedCluster(seeded, position, runs.ledger.outcomes())
        cluster.run(max_actions)
        runs.add(cluster, interrupted=max_actions is not None)
    return runs


def newest_checkpoint(cluster: SimulatedCluster) -> int:
    """The step of the newest checkpoint of the trainer, which is complete once the ledger is on disk too."""
    trainer = cluster.workers["trainer0"]
    written = [
        event.message
        for event in cluster.log
        if isinstance(event, MessageReceived) and isinstance(event.message, m.CheckpointWritten)
    ]
    unconfirmed = {message.request for message in trainer.inbox if isinstance(message, m.Committed)}
    return max((one.step for one in written if one.request not in unconfirmed), default=0)
