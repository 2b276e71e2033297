"""What was generated survives: samples in journals are taken over after a resume and after the loss of a worker."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.settings import OnLostSample
from flowrt.controller.storage.journals import AFTER_CHECKPOINT
from flowrt.protocol.journals import journals_of
from tests.effort import examples
from tests.property.test_core import RUNS
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.interrupted_scenarios import CRASHES, interrupted_scenarios
from tests.simulation.resumed_runs import run_with_crashes
from tests.simulation.run_invariants import assert_exact, assert_sound
from tests.simulation.scenario import Scenario


@pytest.mark.slow
@settings(RUNS, max_examples=examples(60))
@given(interrupted_scenarios(), CRASHES)
def test_kept_samples_are_trained_at_most_once_and_within_the_bound(scenario: Scenario, crashes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        runs = run_with_crashes(scenario, crashes, Path(directory) / "ledger.sqlite", journals=True)
        try:
            assert_exact(runs, scenario)
            for step, row in runs.trained():
                assert step - scenario.bound <= min(row.spans[::2])
                assert max(row.spans[::2]) <= step
        finally:
            runs.ledger.close()


@pytest.mark.slow
@settings(RUNS, max_examples=examples(40))
@given(interrupted_scenarios(), st.sampled_from(OnLostSample))
def test_workers_take_over_what_lost_workers_have_kept(scenario: Scenario, on_lost_sample: OnLostSample) -> None:
    changed = {"journals": journals_of(1), "on_lost_sample": on_lost_sample, "checkpoint_every": 0}
    assert_sound(SimulatedCluster(_changed(scenario, **changed)).run())


def _changed(scenario: Scenario, **changed: Any) -> Scenario:
    fields = {name: getattr(scenario, name) for name in Scenario.__slots__}
    return Scenario(**{**fields, **changed})


@pytest.mark.slow
def test_complete_samples_and_prefixes_are_taken_over_and_others_discarded(tmp_path: Path) -> None:
    """The properties above also cover runs in which each of these occurs."""
    resumed: Counter[str] = Counter()
    discarded: Counter[str] = Counter()
    lost = 0
    for seed in range(6):
        scenario = Scenario(
            seed=seed, bound=seed % 4, steps=6, checkpoint_every=2, groups_per_step=3, capacity=6, members=3
        )
        (tmp_path / str(seed)).mkdir()
        runs = run_with_crashes(scenario, [150 + 40 * seed], tmp_path / str(seed) / "ledger.sqlite", journals=True)
        runs.ledger.close()
        resumed += runs.clusters[1].shared.taken
        discarded += runs.discarded
        cluster = SimulatedCluster(Scenario(seed=seed, kills=3, steps=6, journals=journals_of(1))).run()
        lost += bool(cluster.shared.taken)
    assert resumed["complete"] > 50
    assert resumed["prefix"] > 3
    assert discarded[AFTER_CHECKPOINT] > 5
    assert lost > 1
