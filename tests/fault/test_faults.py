"""Real runs with a process killed, stopped or cut off: a few trials of bench/faults.py, which has hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCH = Path(__file__).parents[2] / "bench" / "faults.py"
# Each found something once. A controller that came back brought groups along that had left; a run that had ended was
# taken for a stuck one; a trainer that was stopped in its first step ended the run; a controller that died before
# anybody had come was started at another address; one that was stopped while it said goodbye left no summary.
SEEDS = ("22", "48", "78", "150", "162", "263", "199", "21", "35", "16", "298")
"""The last four cut a reward off, silence a source and a rollout worker for a while, and kill a trainer in step 4."""
COUNTED = ("lost", "doubled", "hung", "wrong")
TIMED = ("detect_s_p50", "recover_s_p50", "recover_s_max")


def test_no_fault_loses_or_doubles_anything(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    ended = subprocess.run(
        [sys.executable, str(BENCH), "--seeds", *SEEDS, "--json", str(path)],
        timeout=270,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(path.read_text())["metrics"]
    assert {"trials", *COUNTED, *TIMED} <= set(results)
    assert results["trials"] == len(SEEDS)
    assert [results[name] for name in COUNTED] == [0, 0, 0, 0], ended.stdout
    assert all(results[name] > 0 for name in TIMED)
    assert results["recover_s_p50"] <= results["recover_s_max"]
    assert "kill trainer" in ended.stdout
