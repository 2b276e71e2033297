"""A writer of the ledger that is killed at any moment leaves no log that counts as damaged."""

import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.controller.storage.integrity import LEDGER, wal_corruption, wal_path
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader

HEADER, FRAME = 32, 4096 + 24
PROMPTS = 1000
CHILD = Path(__file__).with_name("killed_writer.py")


def frame_count(path: Path) -> int:
    return (wal_path(path).stat().st_size - HEADER) // FRAME


def commit_marks(path: Path) -> list[int]:
    """The numbers of the frames with a commit mark."""
    data = wal_path(path).read_bytes()[HEADER:]
    return [at for at in range(len(data) // FRAME) if struct.unpack_from(">2I", data, at * FRAME)[1]]


@pytest.fixture(scope="module")
def spilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger whose writer was killed in a transaction that exceeded SQLite's cache."""
    path = tmp_path_factory.mktemp("spilled") / LEDGER
    child = subprocess.run([sys.executable, str(CHILD), str(path)], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    marks = commit_marks(path)
    assert frame_count(path) > marks[-1] + 100
    return path


def test_a_transaction_that_was_killed_before_its_commit_is_not_damage(spilled: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(spilled.parent, tmp_path / "run")) / LEDGER
    assert wal_corruption(path) == ""
    with LedgerReader(path) as reader:
        assert reader.states() == {"trained": PROMPTS}
    ledger = Ledger(path)
    assert ledger.account([]).states == {"trained": PROMPTS}
    ledger.close()


def test_a_transaction_that_was_killed_while_its_checksums_were_corrected_is_not_damage(
    spilled: Path, tmp_path: Path
) -> None:
    """SQLite writes the frame with the commit mark before it corrects the checksums of the frames before it."""
    path = Path(shutil.copytree(spilled.parent, tmp_path / "run")) / LEDGER
    with wal_path(path).open("r+b") as file:
        file.seek(HEADER + (frame_count(path) - 1) * FRAME + 4)
        file.write(struct.pack(">I", 1000))
    assert wal_corruption(path) == ""


def test_damage_before_committed_transactions_is_found_in_front_of_an_unfinished_one(
    spilled: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(spilled.parent, tmp_path / "run")) / LEDGER
    marks = commit_marks(path)
    with wal_path(path).open("r+b") as file:
        file.seek(HEADER + marks[-4] * FRAME + 100)
        file.write(os.urandom(100))
    assert wal_corruption(path) == f"from frame {marks[-4] + 1} on, and there are more after that"


def test_a_log_of_which_not_even_the_header_was_written_is_empty(spilled: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(spilled.parent, tmp_path / "run")) / LEDGER
    os.truncate(wal_path(path), 20)
    assert wal_corruption(path) == ""
