"""The ledger: each prompt in exactly one state, across any crash. SQLite in the run directory, written in batches.

``prompts`` holds the present state of each prompt of each epoch; ``events`` holds its life, append only.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flowrt.controller.events import Record
from flowrt.errors import FlowError
from flowrt.wire.changes import Position

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    epoch INTEGER NOT NULL, prompt INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, at_s REAL NOT NULL, PRIMARY KEY (epoch, prompt)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, epoch INTEGER NOT NULL, prompt INTEGER NOT NULL,
    state TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO run VALUES ('term', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1;
"""


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
        self.term = 0  # how often a controller has begun here
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self.term = self._number("term")
        except sqlite3.Error as error:
            raise FlowError(f"ledger {path} cannot be opened: {error}; use another run directory") from error

    def _number(self, name: str) -> int:
        row = self._db.execute("SELECT value FROM run WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def add(self, record: Record, at_s: float) -> None:
        self._buffer.append((at_s, record))

    @property
    def is_behind(self) -> bool:
        """Something was added that is not durable."""
        return bool(self._buffer)

    def commit(self) -> None:
        """Write the buffer in one transaction. Raises FlowError, and keeps the buffer, when the disk refuses."""
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
            raise FlowError(f"ledger {self._path} cannot be written: {error}") from error
        self._buffer.clear()

    def account(self, live: Iterable[tuple[int, int]]) -> Account:
        """Compare the ledger with the (epoch, prompt) pairs that are still live on the board.

        A prompt is lost when the ledger has it under way but no live group carries it.
        """
        self.commit()
        states: dict[str, int] = dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())
        unfinished = set(
            self._db.execute(
                "SELECT epoch, prompt FROM prompts WHERE state NOT IN ('trained', 'dropped', 'unread')"
            ).fetchall()
        )
        twice = self._db.execute(
            "SELECT COUNT(*) FROM (SELECT 1 FROM events WHERE state = 'trained' "
            "GROUP BY epoch, prompt HAVING COUNT(*) > 1)"
        ).fetchone()[0]
        return Account(states, len(unfinished - set(live)), int(twice))

    def opened(self) -> Position:
        """Every prompt that was opened and is not unread again, for whoever goes on offering."""
        self.commit()
        runs: list[list[int]] = []
        for epoch, prompt in self._db.execute(
            "SELECT epoch, prompt FROM prompts WHERE state != 'unread' ORDER BY epoch, prompt"
        ):
            if runs and runs[-1][0] == epoch and sum(runs[-1][1:]) == prompt:
                runs[-1][2] += 1
            else:
                runs.append([epoch, prompt, 1])
        epochs, starts, counts = zip(*runs, strict=True) if runs else ((), (), ())
        return Position(0, epochs, starts, counts)

    def close(self) -> None:
        self._db.close()
