"""Runs that are interrupted at any moment and resumed from disk: nothing is lost, nothing is trained twice."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.policies.batching import TokenBudget
from tests.effort import examples
from tests.property.test_core import RUNS
from tests.simulation.resumed_runs import run_with_crashes
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
def test_repeated_interruptions_lose_no_prompt_and_train_none_twice(scenario: Scenario, crashes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runs = run_with_crashes(scenario, crashes, Path(directory) / "ledger.sqlite")
        try:
            assert_exact(runs, scenario)
            if scenario.bound == 0 and scenario.strict_issue_order:
                steps = {(row.epoch, row.prompt): step for step, row in runs.trained()}
                assert [steps[pair] for pair in sorted(steps)] == sorted(steps.values())
        finally:
            runs.ledger.close()


@pytest.mark.slow
def test_some_runs_resume_from_a_checkpoint_and_some_roll_back_steps(tmp_path: Path) -> None:
    """The property above also covers runs that were interrupted after their first checkpoint."""
    resumed = rolled_back = 0
    for seed in range(12):
        scenario = Scenario(seed=seed, bound=seed % 3, steps=6, checkpoint_every=2)
        runs = run_with_crashes(scenario, [150 + 40 * seed], tmp_path / f"{seed}.sqlite")
        assert_exact(runs, scenario)
        resumed += runs.positions[1].step > 0
        rolled_back += len(runs.clusters[0].steps) > runs.positions[1].step
        runs.ledger.close()
    assert resumed > 3
    assert rolled_back > 3
