"""Simulated runs that are told to end at some moment, save what they have trained, and are gone on with."""

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


class Suspended(SimulatedCluster):
    """Told to end after so many things have happened; the checkpoint that it ends with is ``saved``."""

    def __init__(self, scenario: Scenario, position: Position, after: int) -> None:
        super().__init__(scenario, position)
        self.saved = position.step
        self._after = after

    def play(self) -> "Suspended":
        """Until it has ended. Raises AssertionError when some ranks wait for others, or nobody does anything."""
        while self.core.ended is None:
            if self.actions >= self._after and not self.core.state.preemption.is_ordered:
                kept = self.saved = max(self.saved, newest_checkpoint(self))
                self.handle(PreemptRun("preempted", PREEMPTED, kept))
            elif not self.step():
                raise AssertionError(f"told to end after {self._after} actions, and does not; {self.stuck()}")
        if all(one.finished for one in self.core.state.membership.members() if one.role == "trainer"):
            self.saved = max(self.saved, self._ranks[0].step)  # they finish when that is done
        return self

    def possible(self) -> list[Action]:  # type: ignore[override]
        found = list(super().possible())
        if all(rank.left for rank in self._ranks) and not self._ranks[0].closed:
            found.append((1.0, self._save))
        return found

    def _step_is_complete(self) -> bool:
        return not self._ranks[0].left and super()._step_is_complete()

    def _save(self) -> None:
        """All ranks have left their step: they save the state after the last one, together."""
        assert len({rank.step for rank in self._ranks}) == 1, "ranks left after different steps"
        first = self._ranks[0]
        first.requests += 1
        if first.step > self.saved:
            first.send(m.CheckpointWritten(first.requests, first.step))
        self._say_finished()


def preempted(scenario: Scenario, after: Sequence[int], path: Path) -> ResumedRuns:
    """Run the scenario; each of its lives but the last is told to end when so many things have happened in it."""
    lives = ResumedRuns(Ledger(path))
    for number, actions in enumerate([*after, None]):
        position = lives.next_position()
        alike = replace(scenario, seed=scenario.seed + number)
        if actions is None or lives.checkpoint == scenario.steps:
            lives.over(SimulatedCluster(alike, position).run(), cut_short=False)
        else:
            cluster = Suspended(alike, position, actions).play()
            lives.over(cluster, cut_short=False)
            lives.checkpoint = cluster.saved
    return lives
