"""Runs that are cut short at any moment and go on from what was on disk: nothing lost, nothing trained twice."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.policies.batching import TokenBudget
from tests.effort import examples
from tests.property.test_core import RUNS
from tests.simulation.resumed_runs import live
from tests.simulation.run_invariants import assert_exact
from tests.simulation.scenario import Scenario

FAULTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from([{}, {"kills": 2}, {"broken_lanes": 2, "expiries": 1}])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    return Scenario(
        seed=draw(st.integers(0, 2**32)),
        bound=draw(st.integers(0, 3)),
        strict_issue_order=draw(st.booleans()),
        steps=draw(st.integers(2, 6)),
        groups_per_step=draw(st.integers(1, 3)),
        members=draw(st.integers(1, 2)),
        batcher=draw(st.sampled_from([TokenBudget(1), TokenBudget(60)])),
        ranks=draw(st.integers(1, 2)),
        checkpoint_every=draw(st.integers(1, 3)),
        **draw(FAULTS),
    )


@pytest.mark.slow
@settings(RUNS, max_examples=examples(60))
@given(scenarios(), st.lists(st.integers(1, 400), min_size=1, max_size=3))
def test_every_prompt_is_trained_once_however_often_the_run_is_cut_short(
    scenario: Scenario, crashes: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        lives = live(scenario, crashes, Path(directory) / "ledger.sqlite")
        try:
            assert_exact(lives, scenario)
            if scenario.bound == 0 and scenario.strict_issue_order:
                steps = {(row.epoch, row.prompt): step for step, row in lives.trained()}
                assert [steps[pair] for pair in sorted(steps)] == sorted(steps.values())
        finally:
            lives.ledger.close()


@pytest.mark.slow
def test_some_lives_go_on_from_a_checkpoint_and_some_take_steps_back(tmp_path: Path) -> None:
    """The property above is not about runs that were cut short before anything had happened."""
    resumed = rolled_back = 0
    for seed in range(12):
        scenario = Scenario(seed=seed, bound=seed % 3, steps=6, checkpoint_every=2)
        lives = live(scenario, [150 + 40 * seed], tmp_path / f"{seed}.sqlite")
        assert_exact(lives, scenario)
        resumed += lives.positions[1].step > 0
        rolled_back += len(lives.clusters[0].steps) > lives.positions[1].step
        lives.ledger.close()
    assert resumed > 3
    assert rolled_back > 3
