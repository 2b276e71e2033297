"""Replay log: what a restarted controller reads to rebuild the live groups, in tables of the ledger's file.

Entries are appended. An entry is deleted when every group that was live when it was written has closed, so the log
grows with the number of live groups and not with the length of the run.
"""

import sqlite3

from flowrt.controller.state.replay import (
    CounterSet,
    Entry,
    GroupsClosed,
    GroupsOpened,
    RecoveredState,
    StageCommitted,
    StageUndone,
    WorkerJoined,
    WorkerLeft,
)
from flowrt.controller.storage.pending_writes import PendingWrites
from flowrt.protocol.codec import from_blob, to_blob

# Counters of the log itself, next to those of the controller's state: the number of controllers that this run has had,
# and the step from which it was resumed.
TERM = "term"
RESUMED_FROM = "resumed_from"
_GroupEntry = GroupsOpened | StageCommitted | StageUndone | GroupsClosed
_KINDS: tuple[type[_GroupEntry], ...] = (GroupsOpened, StageCommitted, StageUndone, GroupsClosed)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class ReplayLog:
    """The log of one ledger. ``append`` only adds to pending writes; the other methods write to the database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Start a new term of the run. Raises sqlite3.Error."""
        self._db = db
        self.term = self._counters().get(TERM, 0) + 1
        self._set_counter(TERM, self.term)
        self._next_id = int(db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM replay_log").fetchone()[0])
        self._first_ids: dict[int, int] = {}  # the first entry of each live group, in order

    def append(self, entry: Entry, writes: PendingWrites) -> None:
        """Add an entry to these writes."""
        match entry:
            case CounterSet(name, value):
                writes.counters.append((name, value))
            case WorkerJoined(worker, role):
                writes.members.append((worker, role))
            case WorkerLeft(worker):
                writes.members.append((worker, ""))
            case _:
                self._track_live_groups(self._next_id, entry)
                writes.entries.append((self._next_id, _KIND_NUMBERS[type(entry)], to_blob(entry)))
                self._next_id += 1

    def needed(self, entries: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Those of the entries that are needed to rebuild the live groups."""
        oldest = self._oldest_needed()
        return [entry for entry in entries if entry[0] >= oldest]

    def rewrite_term(self) -> None:
        """Write a value that is known already, to have something to commit. Raises sqlite3.Error."""
        self._set_counter(TERM, self.term)

    def trim(self) -> None:
        """Delete entries that no live group needs. Raises sqlite3.Error."""
        self._db.execute("DELETE FROM replay_log WHERE id < ?", (self._oldest_needed(),))

    def read(self, dropped: dict[str, int]) -> RecoveredState | None:
        """The state left by a controller that did not end its run, or None.

        Args:
            dropped: number of dropped prompts by reason, to become part of that state.

        Raises: FlowError for a damaged entry, IndexError for an unknown kind, sqlite3.Error.
        """
        members = dict(self._db.execute("SELECT worker, role FROM members").fetchall())
        if not members:
            return None
        entries: list[_GroupEntry] = []
        for number, kind, data in self._db.execute("SELECT id, kind, entry FROM replay_log ORDER BY id"):
            entries.append(from_blob(_KINDS[kind], data))
            self._track_live_groups(number, entries[-1])
        return RecoveredState(self._counters(), members, entries, dropped)

    @property
    def resumed_from(self) -> int | None:
        """The step from which the run was resumed; None if it never was."""
        return self._counters().get(RESUMED_FROM)

    def reset(self, step: int) -> None:
        """Delete all entries; the run is resumed after ``step`` trained steps. Raises sqlite3.Error."""
        self.clear()
        self._set_counter(RESUMED_FROM, step)

    def clear(self) -> None:
        """Delete all entries, members and counters except the term. Raises sqlite3.Error."""
        self._db.execute("DELETE FROM replay_log")
        self._db.execute("DELETE FROM members")
        self._db.execute("DELETE FROM counters WHERE name != ?", (TERM,))
        self._first_ids.clear()

    def _oldest_needed(self) -> int:
        return next(iter(self._first_ids.values()), self._next_id)

    def _track_live_groups(self, number: int, entry: _GroupEntry) -> None:
        if isinstance(entry, GroupsOpened):
            self._first_ids.update(dict.fromkeys(range(entry.group, entry.group + len(entry.prompts)), number))
        elif isinstance(entry, GroupsClosed):
            for group in entry.groups:
                self._first_ids.pop(group, None)

    def _counters(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, value FROM counters").fetchall())

    def _set_counter(self, name: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, value))
