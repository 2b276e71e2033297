"""Two trainer ranks, one of them slow for a good reason: the other waits. Without a reason it is named, in time."""

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.helpers import slow_ranks

pytestmark = pytest.mark.slow
WHERE = ["keeping the model", "writing the state", "writing shards", "reading shards", "completing", "removing"]
RANKS_S = 2.0
SLOW_S = 2.5 * RANKS_S
MEAN = "4 tokens"
"""Of the responses of both ranks."""
Said = Callable[[str, int], tuple[str, float]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What a rank said in the end, and after how many seconds, by case."""
    program = [sys.executable, slow_ranks.__file__, str(tmp_path_factory.mktemp("ranks"))]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    found = {(case, rank): (words, seconds) for case, rank, words, seconds in lines}
    return lambda case, rank: found.get((case, rank), (f"nothing: {ended.stderr[-2000:]}", 0.0))


@pytest.mark.parametrize("where", WHERE)
def test_a_slow_disk_of_one_rank_is_waited_for(said: Said, where: str) -> None:
    for rank in range(2):
        words, seconds = said(where, rank)
        assert words == "checkpoints [2]"
        assert seconds > SLOW_S


def test_barrier_waits_for_the_rank_that_reads_the_model(said: Said) -> None:
    for rank in range(2):
        words, seconds = said("reading the model", rank)
        assert words == MEAN
        assert seconds > SLOW_S


def test_ranks_do_not_wait_for_the_rank_that_writes_the_trained_model(said: Said) -> None:
    words, seconds = said("exporting", 0)
    assert words == "exported"
    assert seconds > SLOW_S
    words, seconds = said("exporting", 1)
    assert words == "exported"
    assert seconds < SLOW_S


def test_lock_step_ranks_wait_for_a_rank_that_waits_for_samples(said: Said) -> None:
    for rank in range(2):
        words, seconds = said("waiting for samples", rank)
        assert words == MEAN
        assert seconds > 2 * RANKS_S


def test_the_timeline_of_a_waiting_rank_names_the_late_one(said: Said) -> None:
    words, seconds = said("late for a call", 0)
    root, waited_s = words.split()
    assert root == "trainer-1"
    assert 0.9 * SLOW_S < float(waited_s) < seconds
    words, _ = said("late for a call", 1)
    assert float(words.split()[-1]) < 0.1 * SLOW_S


@pytest.mark.parametrize(
    ("case", "rank", "words"),
    [
        ("stopped while saving", 1, "the directory of checkpoint 1 with the other ranks: rank 0 did not arrive"),
        # Perhaps the stopped rank had still to pass something on in what all ranks do before they write.
        (
            "stopped while writing shards",
            1,
            "(all shards to be written with the other ranks: rank 0 did not arrive"
            "|checkpoint 1 with the other ranks: rank 0 is unresponsive)",
        ),
        ("hanging in lock step", 0, "a pass with the other ranks: rank 1 did not arrive"),
    ],
)
def test_silent_rank_is_named_before_the_deadline(said: Said, case: str, rank: int, words: str) -> None:
    heard, seconds = said(case, rank)
    assert heard.startswith(f"rank {rank} waited ")
    assert re.search(rf" s for {words}$", heard), heard
    assert RANKS_S <= seconds < 2 * SLOW_S
