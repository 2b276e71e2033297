"""Runs that are interrupted at any moment and resumed from disk: nothing is lost, nothing is trained twice."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.effort import examples
from tests.property.test_core import RUNS
from tests.simulation.interrupted_scenarios import CRASHES, interrupted_scenarios
from tests.simulation.resumed_runs import run_with_crashes
from tests.simulation.run_invariants import assert_exact
from tests.simulation.scenario import Scenario


@pytest.mark.slow
@settings(RUNS, max_examples=examples(60))
@given(interrupted_scenarios(), CRASHES)
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
