"""Runs that are preempted at any moment: all ranks leave after the same step, and no step is trained again."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.policies.rank_balancing import Balanced
from flowrt.protocol.messages import Position
from tests.effort import examples
from tests.property.test_core import RUNS
from tests.simulation.interrupted_scenarios import interrupted_scenarios
from tests.simulation.preempted_runs import PreemptedCluster, run_with_preemptions
from tests.simulation.run_invariants import assert_exact
from tests.simulation.scenario import Scenario

TIMED_OUT = "no progress of it for"


@settings(RUNS, max_examples=examples(60))
@given(
    interrupted_scenarios(),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.sampled_from([0, 2]),
)
def test_repeated_preemptions_lose_nothing_and_train_nothing_twice(
    scenario: Scenario, ranks: int, balanced: bool, after: list[int], crashes: int
) -> None:
    # A simulated worker keeps one result of a slot, and after an expiry it may have two open commits of it.
    scenario = replace(scenario, ranks=ranks, checkpoint_every=0, crashes=0 if scenario.expiries else crashes)
    if balanced:
        scenario = replace(scenario, rank_balancing=Balanced(ranks))
    with tempfile.TemporaryDirectory() as directory:
        runs = run_with_preemptions(scenario, after, Path(directory) / "ledger.sqlite")
        try:
            assert_exact(runs, scenario)
            # No execution rolls back what an earlier one has trained, unless that ran out of time to save:
            # an expiring lease takes longer.
            timed_out = [
                cluster.core.ended
                for cluster in runs.clusters
                if cluster.core.ended and TIMED_OUT in cluster.core.ended.reason
            ]
            assert not timed_out or scenario.expiries
            steps = [closed.step for cluster in runs.clusters for closed in cluster.steps]
            assert timed_out or steps == list(range(scenario.steps))
        finally:
            runs.ledger.close()


@pytest.mark.slow
def test_a_preempted_step_is_finished_abandoned_or_not_begun() -> None:
    """The property above covers all of these cases."""
    cases: Counter[str] = Counter()
    for after in range(5, 400, 3):
        cluster = PreemptedCluster(Scenario(seed=after, steps=6, ranks=2, groups_per_step=3), Position(), after)
        before = len(cluster.steps)
        while cluster.actions < after and cluster.core.ended is None:
            before = len(cluster.steps)
            assert cluster.step()
        taken = len(cluster.core.state.window.taken)
        cluster.play()
        ended = cluster.core.ended
        assert ended is not None
        if ended.reason == "preempted":
            cases["nothing to save"] += 1
        elif len(cluster.steps) > before:
            cases["finished"] += 1
        else:
            cases["abandoned" if taken else "not begun"] += 1
    assert min(cases[case] for case in ("nothing to save", "finished", "abandoned", "not begun")) > 2, cases
