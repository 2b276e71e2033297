"""A checkpoint is whole or not there, whenever its writer dies, and the one before it is there until then."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("dying_saver.py")
FIRST, LAST = 1, 3


@pytest.mark.slow
def test_whatever_change_a_trainer_dies_before_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    deaths = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(deaths) > 10
    for change, _, left, said, weights, after in deaths:
        # Whole: each holds the state after its own steps. There: never less than before, never more than the ledger.
        assert left, f"nothing is left when it dies before change {change}"
        assert weights == [float(step) for step in left]
        assert FIRST <= left[-1] <= said
        # Whoever goes on from there leaves nothing of it behind.
        assert after == [f"step-{left[-1] + 1:06}"]
    newest = [left[-1] for _, _, left, _, _, _ in deaths]
    assert newest == sorted(newest)
    assert set(newest) == set(range(FIRST, LAST + 1))
    assert [code for _, code, *_ in deaths] == [9] * (len(deaths) - 1) + [0]
