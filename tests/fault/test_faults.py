"""Real runs with a process killed, stopped or cut off: a few trials of bench/faults.py, which has hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCH = Path(__file__).parents[2] / "bench" / "faults.py"
TRIALS = 3


def test_no_fault_loses_or_doubles_anything(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    ended = subprocess.run(
        [sys.executable, str(BENCH), "--trials", str(TRIALS), "--json", str(path)],
        timeout=270,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(path.read_text())
    assert results["trials"] == TRIALS
    assert [results[name] for name in ("lost", "doubled", "hung", "wrong")] == [0, 0, 0, 0], ended.stdout
    assert results["recover_s_max"] > 0
