"""The controller's commands depend only on its events, not on the hash seed of Python: runs can be replayed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = 12
SEEDS = ("0", "1")


@pytest.mark.slow
def test_commands_are_the_same_under_any_hash_seed() -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.property.command_digests", str(RUNS)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    first, second = [child.communicate(timeout=600)[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert len(first) == RUNS
    assert all(int(line.split()[1]) > 50 for line in first)
    assert second == first
