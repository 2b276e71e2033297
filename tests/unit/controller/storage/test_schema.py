"""Schema version of the ledger: a file of another version is refused by every reader and writer, and not changed."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flowrt.controller.storage.integrity import check_not_behind_checkpoint, last_step
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.storage.schema import SCHEMA_VERSION
from flowrt.errors import FlowError


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {version}")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_a_new_ledger_has_the_current_version(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchall() == [(SCHEMA_VERSION,)]
    ledger = Ledger(path)
    assert ledger.term == 2
    ledger.close()


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
@pytest.mark.parametrize(
    "use",
    [
        Ledger,
        LedgerReader,
        last_step,
        lambda path: check_not_behind_checkpoint(path, 0, require_intact_wal=False),
    ],
    ids=["ledger", "reader", "last step", "check"],
)
def test_a_ledger_of_another_version_is_refused_and_unchanged(
    use: Callable[[Path], object], version: int, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    set_version(path, version)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(FlowError, match=rf"{path} .*schema version {version}, and this flowrt reads {SCHEMA_VERSION}"):
        use(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_with_foreign_tables_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE notes (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(FlowError, match="schema version 0"):
        Ledger(path)
    assert path.read_bytes() == before
