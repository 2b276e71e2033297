"""The walk of live samples in the ledger's file: what a controller that comes back puts together again.

Entries are appended, and go when every group that was live when they were made has left; what is kept grows with the
samples that are live, not with the run.
"""

import sqlite3

from flowrt.controller.jottings import Page
from flowrt.controller.walk import Begun, Came, Entry, Left, Made, Reached, Remains, Unmade, Went
from flowrt.wire.blobs import from_blob, to_blob

SCHEMA = """
CREATE TABLE IF NOT EXISTS walk (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, entry BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS crew (worker TEXT PRIMARY KEY, role TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
TERM, BEGAN = "term", "began"
"""Numbers of the book itself: how many controllers there were, and the step from which they all go on."""
_Walked = Begun | Made | Unmade | Left
_KINDS: tuple[type[_Walked], ...] = (Begun, Made, Unmade, Left)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}


class WalkBook:
    """``add`` only adds to a page of the ledger."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Opens a new term of the run. Raises sqlite3.Error."""
        self._db = db
        self.term = self._numbers().get(TERM, 0) + 1
        self._set_number(TERM, self.term)
        self._next = int(db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM walk").fetchone()[0])
        self._first: dict[int, int] = {}  # the first entry of each live group, in order

    def add(self, entry: Entry, page: Page) -> None:
        """To be written with this page."""
        match entry:
            case Reached(name, value):
                page.numbers.append((name, value))
            case Came(worker, role):
                page.crew.append((worker, role))
            case Went(worker):
                page.crew.append((worker, ""))
            case _:
                self._note_live(self._next, entry)
                page.entries.append((self._next, _NUMBER_OF[type(entry)], to_blob(entry)))
                self._next += 1

    def needed(self, entries: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Those without which a live group could not be put together again."""
        oldest = self._oldest()
        return [entry for entry in entries if entry[0] >= oldest]

    def touch(self) -> None:
        """Write what is known already. Raises sqlite3.Error."""
        self._set_number(TERM, self.term)

    def trim(self) -> None:
        """Drop what no live group needs. Raises sqlite3.Error."""
        self._db.execute("DELETE FROM walk WHERE id < ?", (self._oldest(),))

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

    @property
    def began(self) -> int | None:
        return self._numbers().get(BEGAN)

    def begin(self, step: int) -> None:
        """The run goes on after so many steps; nothing of what was before is to come back. Raises sqlite3.Error."""
        self.forget()
        self._set_number(BEGAN, step)

    def forget(self) -> None:
        """Nothing of this is to come back."""
        self._db.execute("DELETE FROM walk")
        self._db.execute("DELETE FROM crew")
        self._db.execute("DELETE FROM numbers WHERE name != ?", (TERM,))
        self._first.clear()

    def _oldest(self) -> int:
        return next(iter(self._first.values()), self._next)

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
