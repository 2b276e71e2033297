"""Simulated runs that are preempted at some moment, save their state, and are resumed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flowrt.controller.events import PreemptRun
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Position
from tests.simulation.cluster import Action, SimulatedCluster
from tests.simulation.resumed_runs import ResumedRuns, newest_checkpoint
from tests.simulation.scenario import Scenario

PREEMPTED = 130
CRASH_PROBABILITY = 0.1


class PreemptedCluster(SimulatedCluster):
    """A cluster that is preempted after ``after`` actions; ``saved`` is the step of its last checkpoint.

    Of the scenario's crashes of the controller, all happen after that.
    """

    def __init__(self, scenario: Scenario, position: Position, after: int) -> None:
        self._crashes = scenario.crashes
        scenario = replace(scenario, crashes=0)
        super().__init__(scenario, position)
        self.saved = position.step
        self._after = after
        self._is_preempted = False

    def play(self) -> "PreemptedCluster":
        """Run to the end.

        Raises AssertionError if no action is possible before it, as in a deadlock of ranks, or if more than the step in
        training is trained after preemption was ordered.
        """
        closed = 0
        while self.core.ended is None:
            if self._is_preempted and self._crashes and self.rng.random() < CRASH_PROBABILITY:
                self._crashes -= 1
                self.crash()
            elif self.actions >= self._after and not self._is_preempted:
                self._is_preempted, closed = True, len(self.steps)
                checkpoint = self.saved = max(self.saved, newest_checkpoint(self))
                self.handle(PreemptRun("preempted", PREEMPTED, checkpoint))
            elif not self.step():
                raise AssertionError(f"preempted after {self._after} actions, no end; {self.describe_waits()}")
        if self._is_preempted:
            assert len(self.steps) <= closed + 1, f"{len(self.steps) - closed} steps were trained after preemption"
        if all(member.finished for member in self.core.state.membership.members() if member.role == "trainer"):
            self.saved = max(self.saved, self._ranks[0].step)  # trainers finish once it is saved
        return self

    def possible(self) -> list[Action]:  # type: ignore[override]
        actions = list(super().possible())
        if all(rank.left for rank in self._ranks) and not self._ranks[0].closed:
            actions.append((1.0, self._save))
        return actions

    def _step_is_complete(self) -> bool:
        return not self._ranks[0].left and super()._step_is_complete()

    def _save(self) -> None:
        """All ranks have left their step: they save the state after the last complete step together."""
        assert len({rank.step for rank in self._ranks}) == 1, "ranks left after different steps"
        first = self._ranks[0]
        first.requests += 1
        if first.step > self.saved:
            first.send(m.CheckpointWritten(first.requests, first.step))
        self._report_finished()


def run_with_preemptions(scenario: Scenario, after: Sequence[int], path: Path) -> ResumedRuns:
    """Run the scenario; each execution but the last is preempted after the given number of actions."""
    runs = ResumedRuns(Ledger(path))
    for number, limit in enumerate([*after, None]):
        position = runs.next_position()
        seeded = replace(scenario, seed=scenario.seed + number)
        if limit is None or runs.checkpoint == scenario.steps:
            runs.add(SimulatedCluster(seeded, position).run(), interrupted=False)
        else:
            cluster = PreemptedCluster(seeded, position, limit).play()
            runs.add(cluster, interrupted=False)
            runs.checkpoint = cluster.saved
    return runs
