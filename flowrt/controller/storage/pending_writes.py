"""Write-ahead buffer of the ledger: a commit inserts one row, and a later flush applies all rows to their tables.

A record of a prompt that was dropped, or is unread again without a rollback, also counts its reason: a restarted
controller reads how many prompts its run attempt has dropped.

Commits happen thousands of times a second and block the messages that follow from them; to update three tables in each
would cost several times as much. Opening a ledger applies the rows that its last writer left.
"""

import logging
import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgpack

from flowrt.controller.storage.prompt_words import Record, add_states
from flowrt.errors import FlowError

log = logging.getLogger(__name__)
_ADD_EVENT = "INSERT INTO events (at_s, epoch, prompt, state, step, reason, reward) VALUES (?, ?, ?, ?, ?, ?, ?)"
_SET_PROMPT = (
    "INSERT OR REPLACE INTO prompts (at_s, epoch, prompt, state, step, reason, reward) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_COUNT_REASON = (
    "INSERT INTO dropped_reasons (reason, prompts) VALUES (?, ?) "
    "ON CONFLICT (reason) DO UPDATE SET prompts = prompts + excluded.prompts"
)
_SET_SUMMARY_VALUE = "INSERT OR REPLACE INTO summary_values (name, value, step) VALUES (?, ?, ?)"
_SET_STEP = "INSERT OR REPLACE INTO steps (step, line) VALUES (?, ?)"
_SET_EVALUATION = "INSERT OR REPLACE INTO evaluations (name, version, line) VALUES (?, ?, ?)"
_ADD_ENTRY = "INSERT INTO replay_log (id, kind, entry) VALUES (?, ?, ?)"
_SET_COUNTER = "INSERT OR REPLACE INTO counters (name, value) VALUES (?, ?)"
_SET_ORDER = "INSERT OR REPLACE INTO orders (name, entry) VALUES (?, ?)"
_pack = msgpack.Packer(use_bin_type=True).pack


class PendingWrites(NamedTuple):
    """Rows in the layout of their tables, in the order in which they were added."""

    records: list[Record]
    entries: list[tuple[int, int, bytes]]
    counters: list[tuple[str, int]]
    members: list[tuple[str, str]]
    """Worker and role; an empty role deletes the worker."""
    orders: list[tuple[str, bytes]]
    """Name and entry; an empty entry deletes the order."""
    summary_values: list[tuple[str, float, int]]
    steps: list[tuple[int, str]]
    """The line of metrics.jsonl of each closed step."""
    evaluations: list[tuple[str, int, str]]
    """Data set, version and the line of evaluations.jsonl of each evaluation."""

    def extend(self, other: "PendingWrites") -> None:
        """Append the rows of another buffer."""
        for mine, theirs in zip(self, other, strict=True):
            cast(list[Any], mine).extend(cast(list[Any], theirs))

    def clear(self) -> None:
        """Remove all rows."""
        for rows in self:
            rows.clear()

    @property
    def is_empty(self) -> bool:
        """True if there are no rows."""
        return not any(self)


def no_writes() -> PendingWrites:
    """A new empty buffer."""
    return PendingWrites(
        records=[], entries=[], counters=[], members=[], orders=[], summary_values=[], steps=[], evaluations=[]
    )


def append_pending(db: sqlite3.Connection, writes: PendingWrites) -> None:
    """Insert the writes as one row of ``pending_writes``. Raises sqlite3.Error."""
    db.execute("INSERT INTO pending_writes (data) VALUES (?)", (_pack(writes),))


def apply_pending(db: sqlite3.Connection, writes: PendingWrites) -> None:
    """Apply the writes to their tables and delete all buffered rows, within the caller's transaction.

    Raises sqlite3.Error.
    """
    add_records(db, writes.records)
    reasons = Counter(
        reason.split(";")[0] for _, _, _, state, _, reason, _ in writes.records if state in ("dropped", "unread")
    )
    db.executemany(_COUNT_REASON, reasons.items())
    for name, value, step in writes.summary_values:
        if math.isfinite(value):
            db.execute(_SET_SUMMARY_VALUE, (name, value, step))
        else:  # SQLite stores a NaN as NULL, which the table refuses
            log.warning("number %r is %s, which is not finite: it is left out of the ledger", name, value)
    db.executemany(_SET_STEP, writes.steps)
    db.executemany(_SET_EVALUATION, writes.evaluations)
    db.executemany(_ADD_ENTRY, writes.entries)
    db.executemany(_SET_COUNTER, writes.counters)
    for worker, role in writes.members:
        if role:
            db.execute("INSERT OR REPLACE INTO members (worker, role) VALUES (?, ?)", (worker, role))
        else:
            db.execute("DELETE FROM members WHERE worker = ?", (worker,))
    for name, entry in writes.orders:
        if entry:
            db.execute(_SET_ORDER, (name, entry))
        else:
            db.execute("DELETE FROM orders WHERE name = ?", (name,))
    db.execute("DELETE FROM pending_writes")


def add_records(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Add changes of state to the tables of prompts, within the caller's transaction. Raises sqlite3.Error."""
    db.executemany(_ADD_EVENT, records)
    db.executemany(_SET_PROMPT, {row[1:3]: row for row in records}.values())
    add_states(db, records)


def read_pending(db: sqlite3.Connection) -> PendingWrites:
    """All buffered writes. Raises sqlite3.Error, and FlowError for a row that cannot be decoded."""
    writes = no_writes()
    for number, data in db.execute("SELECT id, data FROM pending_writes ORDER BY id").fetchall():
        try:
            fields: Any = msgpack.unpackb(data, use_list=False)
            writes.extend(PendingWrites(*map(list, fields)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise FlowError(f"pending write {number} of the ledger is damaged: {error}") from error
    return writes
