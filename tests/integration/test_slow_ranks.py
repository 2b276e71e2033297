"""Two trainer ranks, one of them slow: the other waits while it makes progress, and names it if it hangs."""

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.helpers import slow_ranks

pytestmark = pytest.mark.long
OPERATIONS = ["keeping the model", "writing the state", "writing shards", "reading shards", "completing", "removing"]
RANKS_S = 2.0
SLOW_S = 2.5 * RANKS_S
MEAN = "4 tokens"
"""The mean response length over both ranks."""
Results = Callable[[str, int], tuple[str, float]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The result of each case and rank, and its seconds."""
    program = [sys.executable, slow_ranks.__file__, str(tmp_path_factory.mktemp("ranks"))]
    completed = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)
    assert completed.returncode == 0, completed.stderr
    lines = [json.loads(line) for line in completed.stdout.splitlines()]
    by_case = {(case, rank): (result, seconds) for case, rank, result, seconds in lines}
    return lambda case, rank: by_case.get((case, rank), (f"no result: {completed.stderr[-2000:]}", 0.0))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ranks_wait_for_a_rank_with_a_slow_disk(results: Results, operation: str) -> None:
    for rank in range(2):
        result, seconds = results(operation, rank)
        assert result == "checkpoints [2]"
        assert seconds > SLOW_S


def test_barrier_waits_for_the_rank_that_reads_the_model(results: Results) -> None:
    for rank in range(2):
        result, seconds = results("reading the model", rank)
        assert result == MEAN
        assert seconds > SLOW_S


def test_ranks_do_not_wait_for_the_rank_that_writes_the_trained_model(results: Results) -> None:
    result, seconds = results("exporting", 0)
    assert result == "exported"
    assert seconds > SLOW_S
    result, seconds_of_other = results("exporting", 1)
    assert result == "exported"
    assert seconds_of_other < seconds


def test_lock_step_ranks_wait_for_a_rank_that_waits_for_samples(results: Results) -> None:
    for rank in range(2):
        result, seconds = results("waiting for samples", rank)
        assert result == MEAN
        assert seconds > 2 * RANKS_S


def test_the_timeline_of_a_waiting_rank_names_the_late_rank(results: Results) -> None:
    result, seconds = results("late for a call", 0)
    root, waited_s = result.split()
    assert root == "trainer-1"
    assert 0.9 * SLOW_S < float(waited_s) < seconds
    late, _ = results("late for a call", 1)
    assert float(late.split()[-1]) < float(waited_s)


@pytest.mark.parametrize(
    ("case", "rank", "pattern"),
    [
        ("stopped while saving", 1, "the directory of checkpoint 1 with the other ranks: rank 0 did not arrive"),
        # The rank may be stopped within the collective call that precedes the write.
        (
            "stopped while writing shards",
            1,
            "(all shards to be written with the other ranks: rank 0 did not arrive"
            "|checkpoint 1 with the other ranks: rank 0 is unresponsive)",
        ),
        ("hanging in lock step", 0, "a pass with the other ranks: rank 1 did not arrive"),
    ],
)
def test_unresponsive_rank_is_named(results: Results, case: str, rank: int, pattern: str) -> None:
    message, seconds = results(case, rank)
    assert message.startswith(f"rank {rank} waited ")
    assert re.search(rf" s for {pattern}$", message), message
    assert seconds >= RANKS_S
