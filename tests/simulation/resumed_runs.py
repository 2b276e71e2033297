"""A simulated run that is interrupted and resumed: all its processes end, and only what is on disk remains."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowrt.controller.events import MessageReceived
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.storage.journals import FoundSamples, read_journals
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol import messages as m
from flowrt.protocol.codec import to_blob
from flowrt.protocol.journals import KIND, SampleKey, SamplePart, journals_of
from flowrt.protocol.messages import Position, unpack
from flowrt.runtime.record_file import RecordWriter
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.rows import Row, Written
from tests.simulation.scenario import Scenario

Journals = dict[str, dict[SampleKey, Written]]


@dataclass(slots=True)
class ResumedRuns:
    """The executions of an interrupted run: the cluster of each, where each began, and their common ledger."""

    ledger: Ledger
    run_dir: Path | None = None  # for journals
    clusters: list[SimulatedCluster] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    checkpoint: int = 0  # steps of the newest one
    journals: Journals = field(default_factory=dict)  # by the file that they are written to
    discarded: Counter[str] = field(default_factory=Counter)

    def next_position(self) -> Position:
        """Where the next execution begins."""
        self.positions.append(self.ledger.resume(self.checkpoint, float(len(self.clusters))))
        return self.positions[-1]

    def find_kept(self, scenario: Scenario) -> FoundSamples:
        """What the journals of earlier executions have, as the controller reads it."""
        assert self.run_dir is not None
        starts, passed = self.ledger.starts(), unpack(self.positions[-1].passed)
        samples = read_journals(
            self.run_dir, starts, passed, lambda oldest: StrictLag(scenario.bound).may_train(starts[-1], oldest)
        )
        self.discarded.update(samples.discarded)
        for sample in samples.kept:
            written = self.journals[sample.journal][SampleKey(sample.epoch, sample.prompt, sample.member, 0)]
            later = self.positions[int(sample.journal.split("/")[1]) :]
            newest = min(position.step for position in later)
            assert max(written.spans[::2]) <= newest, f"{sample} has tokens of versions that are gone"
            assert sample.prompt not in passed.get(sample.epoch, ()), f"{sample} is of a prompt that is trained"
        return samples

    def write(self, journals: Journals) -> None:
        """Write the journals of an execution to disk."""
        if self.run_dir is None:
            return
        for name, samples in journals.items():
            path = self.run_dir / name / "0.journal"
            if not samples or path.exists() or f"{journals_of(len(self.positions))}/" not in name:
                continue  # of an earlier execution
            path.parent.mkdir(parents=True)
            writer = RecordWriter(path, KIND)
            for key, sample in samples.items():
                tokens = sum(sample.spans[1::2])
                part = SamplePart(*key, 0, 0, tokens, sample.spans, sample.is_complete, False, ())
                writer.append(to_blob(part), [])
            writer.close()
            self.journals[f"{name}/0.journal"] = samples

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
        self.write(cluster.shared.journals)

    def trained(self) -> list[tuple[int, Row]]:
        """(step, row) of all training that no later execution rolled back."""
        ends = [position.step for position in self.positions[1:]]
        rows: list[tuple[int, Row]] = []
        for number, cluster in enumerate(self.clusters):
            rolled_back_to = min(ends[number:], default=cluster.scenario.steps)
            rows += [(step, row) for step, row in cluster.trained if step < rolled_back_to]
        return rows


def run_with_crashes(scenario: Scenario, crashes: Sequence[int], path: Path, *, journals: bool = False) -> ResumedRuns:
    """Run the scenario; each execution but the last ends after the given number of actions.

    ``journals``: rollout workers keep what they generate, and a resumed run takes it over.
    """
    runs = ResumedRuns(Ledger(path), path.parent)
    for number, max_actions in enumerate([*crashes, None]):
        position = runs.next_position()
        kept = runs.find_kept(scenario) if journals else FoundSamples()
        seeded = replace(scenario, seed=scenario.seed + number, journals=journals_of(number + 1) if journals else "")
        cluster = SimulatedCluster(seeded, position, runs.ledger.outcomes(), kept.kept)
        cluster.shared.journals.update(runs.journals)
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
    return max((checkpoint.step for checkpoint in written if checkpoint.request not in unconfirmed), default=0)
