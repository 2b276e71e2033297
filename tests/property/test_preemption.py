"""Runs that are told to end at any moment: all ranks leave after the same step, and no step is trained again."""

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
from tests.property.test_resume_properties import scenarios
from tests.simulation.preempted_runs import Suspended, preempted
from tests.simulation.run_invariants import assert_exact
from tests.simulation.scenario import Scenario

LATE = "no end of it within"


@settings(RUNS, max_examples=examples(60))
@given(scenarios(), st.integers(1, 3), st.booleans(), st.lists(st.integers(1, 300), min_size=1, max_size=3))
def test_what_was_trained_is_trained_once_however_often_the_run_is_told_to_end(
    scenario: Scenario, ranks: int, balanced: bool, after: list[int]
) -> None:
    scenario = replace(scenario, ranks=ranks, checkpoint_every=0)
    if balanced:
        scenario = replace(scenario, sharing=Balanced(ranks))
    with tempfile.TemporaryDirectory() as directory:
        lives = preempted(scenario, after, Path(directory) / "ledger.sqlite")
        try:
            assert_exact(lives, scenario)
            # No life takes anything back that the one before it has trained, but where all of its time was gone:
            # a lease that expires takes longer than there is to save.
            late = [one.core.ended for one in lives.clusters if one.core.ended and LATE in one.core.ended.reason]
            assert not late or scenario.expiries
            steps = [closed.step for cluster in lives.clusters for closed in cluster.steps]
            assert late or steps == list(range(scenario.steps))
        finally:
            lives.ledger.close()


@pytest.mark.slow
def test_steps_are_finished_and_left_begun_and_not() -> None:
    """The property above is about all of these: steps that are finished first, and steps that are given up."""
    ways: Counter[str] = Counter()
    for after in range(5, 400, 3):
        cluster = Suspended(Scenario(seed=after, steps=6, ranks=2, groups_per_step=3), Position(), after)
        before = len(cluster.steps)
        while cluster.actions < after and cluster.core.ended is None:
            before = len(cluster.steps)
            assert cluster.step()
        taken = len(cluster.core.state.window.taken)
        cluster.play()
        ended = cluster.core.ended
        assert ended is not None
        if ended.reason == "preempted":
            ways["nothing to save"] += 1
        elif len(cluster.steps) > before:
            ways["finished"] += 1
        else:
            ways["given up" if taken else "not begun"] += 1
    assert min(ways[one] for one in ("nothing to save", "finished", "given up", "not begun")) > 2, ways
