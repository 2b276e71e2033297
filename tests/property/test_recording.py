"""The recording of a simulated run replays, in processes with other hash seeds, to the same commands and states.

The runs have faults of every kind: kills, broken lanes, expired leases, lost samples, withdrawals, repeated messages,
and crashes of the controller, each of which begins another term.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.observability.recording_reader import Recordings
from tests.effort import examples
from tests.integration.helpers.forked_flowrt import forks
from tests.simulation.recorded_runs import RecordedCluster

ROOT = Path(__file__).parents[2]
HASH_SEEDS = ("0", "1")
"""This process has a third one."""
pytestmark = pytest.mark.slow


class Replayer:
    """A process with its own hash seed that replays recordings."""

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
    for replayer in started:
        replayer.close()


@settings(max_examples=examples(60), deadline=None)
@example(number=348, which=0)
@given(number=st.integers(0, 10_000), which=st.integers(0, len(HASH_SEEDS) - 1))
def test_a_recording_replays_to_the_same_commands_and_states(
    replayers: list[Replayer], number: int, which: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        cluster = RecordedCluster(number, run_dir).play()
        assert replayers[which].states(run_dir) == cluster.states
        terms = Recordings.of(run_dir).terms
        # A controller that crashes before its first event leaves no recording.
        assert sorted(terms) == sorted({int(key.partition(":")[0]) for key in cluster.states})
        extents = [term.extent() for term in terms.values()]
        assert [(extent.damage, extent.stopped) for extent in extents] == [("", "")] * len(terms)


def test_a_process_that_is_killed_leaves_recordings_that_replay(replayers: list[Replayer], tmp_path: Path) -> None:
    """It is killed while it records, after some complete runs."""
    incomplete = 0
    for whole in (1, 3, 8):
        place = tmp_path / str(whole)
        ours, theirs = os.pipe()
        words = [sys.executable, "-m", "tests.property.record_child", "1000", str(place)]
        pid = forks().start(words, dict(os.environ), theirs)
        os.close(theirs)
        with os.fdopen(ours) as lines:
            complete = [json.loads(lines.readline()) for _ in range(whole)]
            last = place / str(whole) / "recording"
            while not (last.is_dir() and any(path.stat().st_size for path in last.iterdir())):
                assert forks().exit_code(pid, 0.0) is None
            os.kill(pid, signal.SIGKILL)
            forks().exit_code(pid, 60.0)
        for line in complete:
            assert replayers[0].states(Path(line["run_dir"])) == line["states"]
        for run_dir in place.iterdir():
            try:
                recordings = Recordings.of(run_dir)
            except ConfigError:
                continue  # killed before the first block
            states = replayers[1].states(run_dir)
            assert "error" not in states
            incomplete += not all(term.extent().is_complete for term in recordings.terms.values())
    assert incomplete > 0, "every kill came too late or too early"
