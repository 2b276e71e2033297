"""The recording of a simulated run replays, in processes with other hash seeds, to the same commands and states.

The runs have all that can go wrong: kills, broken lanes, expired leases, lost samples, withdrawals, repeated messages,
and crashes of the controller, each of which begins another term.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.observability.recordings import Recordings
from tests.effort import examples
from tests.simulation.recorded_runs import RecordedCluster

ROOT = Path(__file__).parents[2]
HASH_SEEDS = ("0", "1", "2")


class Replayer:
    """A process with a hash seed of its own, which replays recordings."""

    def __init__(self, hash_seed: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.property.replay_child"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def states(self, run_dir: Path) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{run_dir}\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=20)


@pytest.fixture(scope="module")
def replayers() -> Iterator[list[Replayer]]:
    started = [Replayer(seed) for seed in HASH_SEEDS]
    yield started
    for one in started:
        one.close()


@settings(max_examples=examples(60), deadline=None)
@given(number=st.integers(0, 10_000), which=st.integers(0, len(HASH_SEEDS) - 1))
def test_a_recording_replays_to_the_same_commands_and_states(
    replayers: list[Replayer], number: int, which: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        cluster = RecordedCluster(number, run_dir).play()
        assert replayers[which].states(run_dir) == cluster.states
        extents = [one.extent() for one in Recordings.of(run_dir).terms.values()]
        assert len(extents) == cluster.term
        assert [(one.damage, one.stopped) for one in extents] == [("", "")] * cluster.term
