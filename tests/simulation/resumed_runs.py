"""A simulated run that is cut short and goes on: all its processes are gone, what was on disk is what is left."""

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
    """What is left of a run with several lives: all clusters, where each began, and the ledger of all."""

    ledger: Ledger
    clusters: list[SimulatedCluster] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    checkpoint: int = 0  # steps of the newest one

    def next_position(self) -> Position:
        """Where the next life goes on."""
        self.positions.append(self.ledger.resume(self.checkpoint, float(len(self.clusters))))
        return self.positions[-1]

    def over(self, cluster: SimulatedCluster, cut_short: bool) -> None:
        """A life has ended. Of one that was cut short all is on disk that a checkpoint waited for, and some more."""
        written = len(cluster.records)
        if cut_short:
            written = cluster.rng.randint(cluster.durable, written)
        for record in cluster.records[:written]:
            self.ledger.add(record, float(len(self.clusters)))
        self.ledger.commit()
        self.clusters.append(cluster)
        self.checkpoint = max(self.checkpoint, newest_checkpoint(cluster))

    def trained(self) -> list[tuple[int, Row]]:
        """(step, row) of all that the last life went on from, or trained itself."""
        ends = [position.step for position in self.positions[1:]]
        rows: list[tuple[int, Row]] = []
        for number, cluster in enumerate(self.clusters):
            taken_back = min(ends[number:], default=cluster.scenario.steps)
            rows += [(step, row) for step, row in cluster.trained if step < taken_back]
        return rows


def live(scenario: Scenario, crashes: Sequence[int], path: Path) -> ResumedRuns:
    """Run the scenario; each of its lives but the last ends when so many things have happened in it."""
    lives = ResumedRuns(Ledger(path))
    for number, most_actions in enumerate([*crashes, None]):
        position = lives.next_position()
        seeded = replace(scenario, seed=scenario.seed + number)
        cluster = SimulatedCluster(seeded, position, lives.ledger.outcomes())
        cluster.run(most_actions)
        lives.over(cluster, cut_short=most_actions is not None)
    return lives


def newest_checkpoint(cluster: SimulatedCluster) -> int:
    """The newest state that the trainer had saved: it gets its name once the ledger is on disk too."""
    trainer = cluster.workers["trainer0"]
    said = [
        event.message
        for event in cluster.log
        if isinstance(event, MessageReceived) and isinstance(event.message, m.CheckpointWritten)
    ]
    unheard = {message.request for message in trainer.inbox if isinstance(message, m.Committed)}
    return max((one.step for one in said if one.request not in unheard), default=0)
