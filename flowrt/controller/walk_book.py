"""The walk of live samples in the ledger's file: what a controller that comes back puts together again.

Entries are appended, and go when every group that was live when they were made has left; what is kept grows with the
samples that are live, not with the run.
"""

import sqlite3

from flowrt.controller.walk import Begun, Came, Entry, Left, Made, Reached, Remains, Unmade, Went
from flowrt.wire.blobs import from_blob, to_blob

SCHEMA = """
CREATE TABLE IF NOT EXISTS walk (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, entry BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS crew (worker TEXT PRIMARY KEY, role TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
TERM = "term"
_Walked = Begun | Made | Unmade | Left
_KINDS: tuple[type[_Walked], ...] = (Begun, Made, Unmade, Left)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}


class WalkBook:
    """``add`` only buffers; ``write`` is called within the ledger's transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Opens a new term of the run. Raises sqlite3.Error."""
        self._db = db
        db.executescript(SCHEMA)
        self.term = self._numbers().get(TERM, 0) + 1
        self._set_number(TERM, self.term)
        self._walked: list[tuple[int, int, _Walked]] = []
        self._others: list[Reached | Came | Went] = []
        self._next = int(db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM walk").fetchone()[0])
        self._first: dict[int, int] = {}  # the first entry of each live group, in order

    @property
    def is_behind(self) -> bool:
        return bool(self._walked or self._others)

    def add(self, entry: Entry) -> None:
        """To be written with the next transaction."""
        if isinstance(entry, Reached | Came | Went):
            self._others.append(entry)
            return
        self._note_live(self._next, entry)
        self._walked.append((self._next, _NUMBER_OF[type(entry)], entry))
        self._next += 1

    def write(self) -> None:
        """Raises sqlite3.Error; the buffer is kept until `written`."""
        rows = [(number, kind, to_blob(entry)) for number, kind, entry in self._walked]
        self._db.executemany("INSERT INTO walk (id, kind, entry) VALUES (?, ?, ?)", rows)
        for other in self._others:
            match other:
                case Reached(name, value):
                    self._set_number(name, value)
                case Came(worker, role):
                    self._db.execute("INSERT OR REPLACE INTO crew VALUES (?, ?)", (worker, role))
                case Went(worker):
                    self._db.execute("DELETE FROM crew WHERE worker = ?", (worker,))

    def written(self) -> None:
        """The transaction is complete."""
        self._walked.clear()
        self._others.clear()

    def touch(self) -> None:
        """Write what is known already. Raises sqlite3.Error."""
        self._set_number(TERM, self.term)

    def trim(self) -> None:
        """Drop what no live group needs. Raises sqlite3.Error."""
        oldest = next(iter(self._first.values()), self._next)
        self._db.execute("DELETE FROM walk WHERE id < ?", (oldest,))

    def recall(self, dropped: dict[str, int]) -> Remains | None:
        """What a controller left behind that did not end its run; None when there was none. Raises FlowError."""
        crew = dict(self._db.execute("SELECT worker, role FROM crew").fetchall())
        if not crew:
            return None
        entries: list[_Walked] = []
        for number, kind, data in self._db.execute("SELECT id, kind, entry FROM walk ORDER BY id"):
            entries.append(from_blob(_KINDS[kind], data))
            self._note_live(number, entries[-1])
        return Remains(self._numbers(), crew, entries, dropped)

    def forget(self) -> None:
        """The run has ended, or goes back to a checkpoint: nothing of this is to come back."""
        self._db.execute("DELETE FROM walk")
        self._db.execute("DELETE FROM crew")
        self._db.execute("DELETE FROM numbers WHERE name != ?", (TERM,))
        self._first.clear()

    def _note_live(self, number: int, entry: _Walked) -> None:
        if isinstance(entry, Begun):
            self._first.update(dict.fromkeys(range(entry.group, entry.group + len(entry.prompts)), number))
        elif isinstance(entry, Left):
            for group in entry.groups:
                self._first.pop(group, None)

    def _numbers(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, value FROM numbers").fetchall())

    def _set_number(self, name: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO numbers VALUES (?, ?)", (name, value))
