"""Laws of the wait-for graph: a knot is exactly what nobody can untie, and a run that goes on has none."""

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.diagnostics.wait_graph import Edge, find_deadlocks
from flowrt.controller.events import Command, Event
from flowrt.ids import CONTROLLER
from tests.effort import examples
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.scenario import Scenario
from tests.simulation.worker import Worker

NAMES = "abcde"
turns = st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES)), max_size=len(NAMES))


def edges_of(graph: dict[str, set[str]]) -> list[Edge]:
    return [
        Edge(who=who, what="it", blocked_on=tuple(sorted(turn)), age_s=1.0, limit_s=2.0, blocks=True)
        for who, turn in graph.items()
    ]


@given(turns, st.sets(st.sampled_from(NAMES)))
def test_a_knot_is_the_largest_set_in_which_each_waits_only_for_the_others(
    graph: dict[str, set[str]], at_work: set[str]
) -> None:
    blocked = [who for who, turn in graph.items() if turn and who not in at_work]
    stuck = [
        set(some)
        for size in range(len(blocked) + 1)
        for some in itertools.combinations(blocked, size)
        if all(graph[who] <= set(some) for who in some)
    ]
    found = find_deadlocks(edges_of(graph), at_work)
    assert {who for knot in found for who in knot} == set().union(*stuck)
    for knot in found:
        assert all(graph[who] <= set(knot) for who in knot)
    assert len({who for knot in found for who in knot}) == sum(map(len, found))


@given(turns, st.sampled_from(NAMES))
def test_somebody_who_begins_to_work_never_ties_a_knot(graph: dict[str, set[str]], who: str) -> None:
    before = {one for knot in find_deadlocks(edges_of(graph), ()) for one in knot}
    after = {one for knot in find_deadlocks(edges_of(graph), (who,)) for one in knot}
    assert after <= before - {who}


class Watched(SimulatedCluster):
    """Looks at the graph after every event."""

    looks = 0

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        graph = self.core.wait_graph(self.clock.now(), 600.0)
        # A trainer that asks for its next step with a version still to publish would be taken for one that waits.
        if not any(self._is_about_to_act(worker) for worker in self.workers.values()):
            self.looks += 1
            assert not graph.deadlocks, f"{graph.deadlocks} in a run that goes on: {graph.sentences(20)}"
        members = {member.id for member in self.core.state.membership.members()}
        for edge in graph.waits:
            assert edge.who in members
            assert set(edge.blocked_on) <= members | {CONTROLLER}
        assert len(json.dumps(graph.as_json())) < 20_000
        return commands

    @staticmethod
    def _is_about_to_act(worker: Worker) -> bool:
        return bool(worker.outbox or worker.inbox or worker.unpublished is not None)


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6), st.integers(0, 2), st.integers(0, 2), st.integers(1, 2))
def test_a_run_that_goes_on_has_no_knot(seed: int, bound: int, kills: int, ranks: int) -> None:
    scenario = Scenario(seed=seed, bound=bound, kills=kills, ranks=ranks, evals=2, broken_lanes=1, steps=3)
    cluster = Watched(scenario)
    cluster.run()
    assert cluster.looks
