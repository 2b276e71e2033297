"""Properties of the wait-for graph: deadlocks are found exactly, and a run that makes progress has none."""

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
graphs = st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES)), max_size=len(NAMES))


def edges_of(graph: dict[str, set[str]]) -> list[Edge]:
    return [
        Edge(who=worker, what="it", blocked_on=tuple(sorted(waits_for)), age_s=1.0, limit_s=2.0, blocks=True)
        for worker, waits_for in graph.items()
    ]


@given(graphs, st.sets(st.sampled_from(NAMES)))
def test_deadlocks_are_the_largest_set_that_waits_only_for_itself(
    graph: dict[str, set[str]], working: set[str]
) -> None:
    blocked = [worker for worker, waits_for in graph.items() if waits_for and worker not in working]
    closed_sets = [
        set(subset)
        for size in range(len(blocked) + 1)
        for subset in itertools.combinations(blocked, size)
        if all(graph[worker] <= set(subset) for worker in subset)
    ]
    deadlocks = find_deadlocks(edges_of(graph), working)
    assert {worker for deadlock in deadlocks for worker in deadlock} == set().union(*closed_sets)
    for deadlock in deadlocks:
        assert all(graph[worker] <= set(deadlock) for worker in deadlock)
    assert len({worker for deadlock in deadlocks for worker in deadlock}) == sum(map(len, deadlocks))


@given(graphs, st.sampled_from(NAMES))
def test_a_worker_that_begins_to_work_creates_no_deadlock(graph: dict[str, set[str]], worker: str) -> None:
    before = {member for deadlock in find_deadlocks(edges_of(graph), ()) for member in deadlock}
    after = {member for deadlock in find_deadlocks(edges_of(graph), (worker,)) for member in deadlock}
    assert after <= before - {worker}


class GraphCheckingCluster(SimulatedCluster):
    """Checks the wait-for graph after every event."""

    checks = 0

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        graph = self.core.wait_graph(self.clock.now(), 600.0)
        # A trainer that pulls for its next step before it publishes a version would count as waiting.
        if not any(self._is_about_to_act(worker) for worker in self.workers.values()):
            self.checks += 1
            assert not graph.deadlocks, f"{graph.deadlocks} in a run that makes progress: {graph.sentences(20)}"
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
def test_a_run_that_makes_progress_has_no_deadlock(seed: int, bound: int, kills: int, ranks: int) -> None:
    scenario = Scenario(seed=seed, bound=bound, kills=kills, ranks=ranks, evals=2, broken_lanes=1, steps=3)
    cluster = GraphCheckingCluster(scenario)
    cluster.run()
    assert cluster.checks
