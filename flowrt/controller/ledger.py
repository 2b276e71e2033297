"""The ledger: each prompt in exactly one state, across any crash. SQLite in the run directory, written in batches.

``prompts`` holds the present state of each prompt of each epoch, ``events`` its life, append only. A run that goes back
to a checkpoint takes back what was trained after it: those prompts are unread again, and their life says why. ``lives``
has a row for each start of a controller, ``notes`` what else has to survive it.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from flowrt.controller.events import Record
from flowrt.controller.log_mover import LogMover
from flowrt.controller.walk import Entry, Remains
from flowrt.controller.walk_book import WalkBook
from flowrt.errors import FlowError
from flowrt.wire.positions import pack
from flowrt.wire.records import Passed, Position

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    epoch INTEGER NOT NULL, prompt INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, at_s REAL NOT NULL, PRIMARY KEY (epoch, prompt)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, epoch INTEGER NOT NULL, prompt INTEGER NOT NULL,
    state TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS lives (after_event INTEGER NOT NULL, step INTEGER NOT NULL, at_s REAL NOT NULL,
    at_unix_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value REAL NOT NULL, step INTEGER NOT NULL) WITHOUT ROWID;
"""
_GO_BACK = (
    "INSERT INTO lives SELECT COALESCE(MAX(id), 0), :step, :at_s, :unix_s FROM events",
    "INSERT INTO events (at_s, epoch, prompt, state, step, reason) "
    "SELECT :at_s, epoch, prompt, 'unread', :step, 'rolled back: ' || state || ' in step ' || step FROM prompts "
    "WHERE state IN ('in_flight', 'ready', 'leased') OR (state IN ('trained', 'dropped') AND step >= :step)",
    "UPDATE prompts SET reason = 'rolled back: ' || state || ' in step ' || step, state = 'unread', "
    "at_s = :at_s, step = :step "
    "WHERE state IN ('in_flight', 'ready', 'leased') OR (state IN ('trained', 'dropped') AND step >= :step)",
    # What was evaluated before the first step is known for good, even if no step was trained.
    "DELETE FROM notes WHERE step >= MAX(:step, 1)",
)
_DROPPED = (
    "SELECT reason FROM events WHERE (state = 'dropped' OR (state = 'unread' AND reason NOT LIKE 'rolled back%')) "
    "AND id > (SELECT COALESCE(MAX(after_event), 0) FROM lives)"
)
_TRAINED_TWICE = """
SELECT COUNT(*) FROM (
    SELECT 1 FROM events LEFT JOIN
        (SELECT epoch, prompt, MAX(id) AS last FROM events WHERE state = 'unread' GROUP BY epoch, prompt)
        USING (epoch, prompt)
    WHERE state = 'trained' AND id > COALESCE(last, 0) GROUP BY epoch, prompt HAVING COUNT(*) > 1
)
"""
"""Of what a run took back, only what it trained since counts."""


OPEN_S = 5.0
LOG_PAGES = 16384
"""Of 4 KiB: a log that grows beyond this is moved within a commit after all."""
SOON = frozenset({"ready", "leased"})
"""States that promise nobody anything: they may be written with what comes next."""
MOST_WAITING = 512
"""Records that may wait for that."""


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
        self._promised = False
        self._mover = LogMover(path)
        self._notes: dict[str, tuple[float, int]] = {}
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=OPEN_S)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
            self._db.executescript(_SCHEMA)
            self._walk = WalkBook(self._db)
            # From here on a lock of somebody else must not hold up the loop on which everybody is served.
            self._db.execute("PRAGMA busy_timeout=0")
        except sqlite3.Error as error:
            raise FlowError(f"ledger {path} cannot be opened: {error}; use another run directory") from error

    def add(self, record: Record, at_s: float) -> None:
        self._buffer.append((at_s, record))
        if record.state not in SOON:
            self._promised = True

    @property
    def is_behind(self) -> bool:
        """Something was added that has to be durable before anybody hears of it."""
        return self._promised or self._walk.is_behind or len(self._buffer) > MOST_WAITING

    @property
    def term(self) -> int:
        """How often a controller has begun here."""
        return self._walk.term

    def keep(self, entry: Entry) -> None:
        """To be written with all that was added, before anybody hears of it."""
        self._walk.add(entry)

    def recall(self) -> Remains | None:
        """What a controller left behind that did not end its run; None when there was none."""
        try:
            return self._walk.recall(Counter(reason.split(";")[0] for (reason,) in self._db.execute(_DROPPED)))
        except sqlite3.Error as error:
            raise FlowError(f"ledger {self._path} cannot be read: {error}") from error

    def trim(self) -> None:
        """Drop what is kept of samples that are not live any more."""
        self._carefully(self._walk.trim)
        self._mover.look()

    def forget_walk(self) -> None:
        """No controller shall come back to this: the run has ended."""
        self.commit()
        self._carefully(self._walk.forget)

    def _carefully(self, act: Callable[[], None]) -> None:
        try:
            act()
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def note(self, name: str, value: float, step: int) -> None:
        """Keep a number of the summary, which became known while ``step`` was in training."""
        self._notes[name] = (value, step)

    def resume(self, step: int, at_s: float) -> Position:
        """A controller starts after so many trained steps: take back what was done since; returns where it goes on."""
        self.commit()
        values = {"step": step, "at_s": at_s, "unix_s": time.time()}
        try:
            self._db.execute("BEGIN")
            for statement in _GO_BACK:
                self._db.execute(statement, values)
            self._walk.forget()
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._refused(error) from error
        return self.position(step)

    def position(self, step: int) -> Position:
        """Where the run is after so many steps."""
        done = self._db.execute("SELECT epoch, prompt FROM prompts WHERE state IN ('trained', 'dropped')").fetchall()
        notes = self._db.execute("SELECT name, value FROM notes ORDER BY name").fetchall()
        return Position(step, pack(done), tuple(notes))

    def passed(self) -> tuple[Passed, ...]:
        """What a source that begins now is not to offer: all that was ever opened, unless it is unread again."""
        self.commit()
        return pack(self._db.execute("SELECT epoch, prompt FROM prompts WHERE state != 'unread'"))

    def persist(self) -> None:
        """As `commit`, and what was committed outlasts the machine too."""
        self.commit()
        try:
            # A commit that syncs the log syncs all that is before it there.
            self._db.execute("PRAGMA synchronous=FULL")
            self._walk.touch()
            self._db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def commit(self) -> None:
        """Write the buffer in one transaction. Raises FlowError, and keeps the buffer, when the disk refuses.

        Raises LedgerBusy while another process has it locked.
        """
        if not (self._buffer or self._notes or self._walk.is_behind):
            return
        rows = [(at_s, r.epoch, r.prompt, r.state, r.step, r.reason) for at_s, r in self._buffer]
        latest = {row[1:3]: row for row in rows}
        try:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO events (at_s, epoch, prompt, state, step, reason) VALUES (?, ?, ?, ?, ?, ?)", rows
            )
            self._db.executemany(
                "INSERT INTO prompts (at_s, epoch, prompt, state, step, reason) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (epoch, prompt) DO UPDATE SET at_s = excluded.at_s, state = excluded.state, "
                "step = excluded.step, reason = excluded.reason",
                latest.values(),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO notes (name, value, step) VALUES (?, ?, ?)",
                [(name, value, step) for name, (value, step) in self._notes.items()],
            )
            self._walk.write()
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._refused(error) from error
        self._buffer.clear()
        self._promised = False
        self._notes.clear()
        self._walk.written()

    def _refused(self, error: sqlite3.Error) -> FlowError:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            return LedgerBusy(f"ledger {self._path} is locked by another process")
        return FlowError(
            f"ledger {self._path} cannot be written: {error}; what it had committed is intact: is the disk full?"
        )

    def account(self, live: Iterable[tuple[int, int]]) -> Account:
        """Compare the ledger with the (epoch, prompt) pairs that are still live on the board.

        A prompt is lost when the ledger has it under way but no live group carries it.
        """
        self.commit()
        states: dict[str, int] = dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())
        under_way = "SELECT epoch, prompt FROM prompts WHERE state NOT IN ('trained', 'dropped', 'unread')"
        unfinished = set(self._db.execute(under_way).fetchall())
        twice = self._db.execute(_TRAINED_TWICE).fetchone()[0]
        return Account(states, len(unfinished - set(live)), int(twice))

    def close(self) -> None:
        self._mover.close()
        self._db.close()
