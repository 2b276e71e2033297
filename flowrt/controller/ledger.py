"""The ledger: each prompt in exactly one state, across any crash. SQLite in the run directory, written in batches.

``prompts`` holds the present state of each prompt of each epoch; ``events`` holds its life, append only.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flowrt.controller.events import Record
from flowrt.errors import FlowError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    epoch INTEGER NOT NULL, prompt INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, at_s REAL NOT NULL, PRIMARY KEY (epoch, prompt)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, epoch INTEGER NOT NULL, prompt INTEGER NOT NULL,
    state TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT NOT NULL
);
"""


OPEN_S = 5.0


class LedgerBusy(FlowError):
    """Another process has the ledger locked; nothing is lost, and it can be tried again."""


class Account(NamedTuple):
    """What the ledger says about a run; ``lost`` and ``trained_twice`` must be 0."""

    states: dict[str, int]
    lost: int
    trained_twice: int


class Ledger:
    """The ledger of one run. ``add`` only buffers; ``commit`` makes it all durable at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer: list[tuple[float, Record]] = []
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=OPEN_S)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            # From here on a lock of somebody else must not hold up the loop on which everybody is served.
            self._db.execute("PRAGMA busy_timeout=0")
        except sqlite3.Error as error:
            raise FlowError(f"ledger {path} cannot be opened: {error}; use another run directory") from error

    def add(self, record: Record, at_s: float) -> None:
        self._buffer.append((at_s, record))

    def commit(self) -> None:
        """Write the buffer in one transaction. Raises FlowError, and keeps the buffer, when the disk refuses.

        Raises LedgerBusy while another process has it locked.
        """
        if not self._buffer:
            return
        rows = [(at_s, r.epoch, r.prompt, r.state, r.step, r.reason) for at_s, r in self._buffer]
        try:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO events (at_s, epoch, prompt, state, step, reason) VALUES (?, ?, ?, ?, ?, ?)", rows
            )
            self._db.executemany(
                "INSERT INTO prompts (at_s, epoch, prompt, state, step, reason) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (epoch, prompt) DO UPDATE SET at_s = excluded.at_s, state = excluded.state, "
                "step = excluded.step, reason = excluded.reason",
                rows,
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise LedgerBusy(f"ledger {self._path} is locked by another process") from error
            raise FlowError(
                f"ledger {self._path} cannot be written: {error}; what it had committed is intact: is the disk full?"
            ) from error
        self._buffer.clear()

    def account(self, live: Iterable[tuple[int, int]]) -> Account:
        """Compare the ledger with the (epoch, prompt) pairs that are still live on the board.

        A prompt is lost when the ledger has it under way but no live group carries it.
        """
        self.commit()
        states: dict[str, int] = dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())
        unfinished = set(
            self._db.execute("SELECT epoch, prompt FROM prompts WHERE state NOT IN ('trained', 'dropped')").fetchall()
        )
        twice = self._db.execute(
            "SELECT COUNT(*) FROM (SELECT 1 FROM events WHERE state = 'trained' "
            "GROUP BY epoch, prompt HAVING COUNT(*) > 1)"
        ).fetchone()[0]
        return Account(states, len(unfinished - set(live)), int(twice))

    def close(self) -> None:
        self._db.close()
