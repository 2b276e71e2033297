"""A checkpoint is complete or absent whenever its writer crashes, and the previous one exists until then."""

import json
from pathlib import Path

import pytest

from tests.integration.helpers.forked_flowrt import run_module

FIRST, LAST = 1, 3


@pytest.mark.slow
def test_a_complete_checkpoint_remains_wherever_the_trainer_crashes(tmp_path: Path) -> None:
    completed = run_module("tests.unit.engines.dying_saver", str(tmp_path), timeout_s=600.0)
    assert completed.returncode == 0, completed.stdout
    crashes = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(crashes) > 10
    for change, _, remaining, ledger_step, weights, after in crashes:
        # Each holds the state after its own steps; the newest is between the first one and that of the ledger.
        assert remaining, f"no checkpoint is left after a crash before change {change}"
        assert weights == [float(step) for step in remaining]
        assert FIRST <= remaining[-1] <= ledger_step
        # The next save removes everything that the crash left behind.
        assert after == [f"step-{remaining[-1] + 1:06}"]
    newest = [remaining[-1] for _, _, remaining, _, _, _ in crashes]
    assert newest == sorted(newest)
    assert set(newest) == set(range(FIRST, LAST + 1))
    assert [code for _, code, *_ in crashes] == [9] * (len(crashes) - 1) + [0]
