"""What must not be lost, jotted down: one row a transaction. A moment later all of it is entered where it belongs.

A promise has to be on disk before anybody hears of it, thousands of times a second; to find its place in three tables
each time would cost several times as much. Whoever opens a ledger enters what its last writer had only jotted down.
"""

import sqlite3
from typing import Any, NamedTuple, cast

import msgpack

from flowrt.errors import FlowError

SCHEMA = "CREATE TABLE IF NOT EXISTS jottings (id INTEGER PRIMARY KEY, data BLOB NOT NULL);"
_ADD_EVENT = "INSERT INTO events (at_s, epoch, prompt, state, step, reason) VALUES (?, ?, ?, ?, ?, ?)"
_SET_PROMPT = "INSERT OR REPLACE INTO prompts (at_s, epoch, prompt, state, step, reason) VALUES (?, ?, ?, ?, ?, ?)"
_SET_NOTE = "INSERT OR REPLACE INTO notes (name, value, step) VALUES (?, ?, ?)"
_ADD_ENTRY = "INSERT INTO walk (id, kind, entry) VALUES (?, ?, ?)"
_SET_NUMBER = "INSERT OR REPLACE INTO numbers (name, value) VALUES (?, ?)"
_pack = msgpack.Packer(use_bin_type=True).pack


class Page(NamedTuple):
    """Rows as their tables have them, in the order in which they came."""

    records: list[tuple[float, int, int, str, int, str]]
    entries: list[tuple[int, int, bytes]]
    numbers: list[tuple[str, int]]
    crew: list[tuple[str, str]]
    """A worker and its role; none: it is not in any more."""
    notes: list[tuple[str, float, int]]

    def extend(self, other: "Page") -> None:
        for mine, theirs in zip(self, other, strict=True):
            cast(list[Any], mine).extend(cast(list[Any], theirs))

    def clear(self) -> None:
        for rows in self:
            rows.clear()

    @property
    def is_empty(self) -> bool:
        return not any(self)


def blank() -> Page:
    return Page([], [], [], [], [])


def jot(db: sqlite3.Connection, page: Page) -> None:
    """In the fewest bytes. Raises sqlite3.Error."""
    db.execute("INSERT INTO jottings (data) VALUES (?)", (_pack(page),))


def enter(db: sqlite3.Connection, page: Page) -> None:
    """Where it belongs; what was jotted is not needed any more. Within the caller's transaction; sqlite3.Error."""
    db.executemany(_ADD_EVENT, page.records)
    db.executemany(_SET_PROMPT, {row[1:3]: row for row in page.records}.values())
    db.executemany(_SET_NOTE, page.notes)
    db.executemany(_ADD_ENTRY, page.entries)
    db.executemany(_SET_NUMBER, page.numbers)
    for worker, role in page.crew:
        if role:
            db.execute("INSERT OR REPLACE INTO crew (worker, role) VALUES (?, ?)", (worker, role))
        else:
            db.execute("DELETE FROM crew WHERE worker = ?", (worker,))
    db.execute("DELETE FROM jottings")


def jotted(db: sqlite3.Connection) -> Page:
    """All that was jotted down and not entered. Raises sqlite3.Error, and FlowError for what nobody has jotted."""
    page = blank()
    for number, data in db.execute("SELECT id, data FROM jottings ORDER BY id").fetchall():
        try:
            fields: Any = msgpack.unpackb(data, use_list=False)
            page.extend(Page(*map(list, fields)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise FlowError(f"jotting {number} of the ledger is damaged: {error}") from error
    return page
