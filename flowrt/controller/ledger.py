"""The ledger: each prompt in exactly one state, across any crash. SQLite in the run directory, written in batches.

``prompts`` holds the present state of each prompt of each epoch, ``events`` its life, append only. A run that goes back
to a checkpoint takes back what was trained after it: those prompts are unread again, and their life says why. ``lives``
has a row for each start of a controller, ``notes`` what else has to survive it.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flowrt.controller import jottings, walk_book
from flowrt.controller.events import Record
from flowrt.controller.jottings import blank
from flowrt.controller.ledger_file import BUSY_S, check_whole, not_opened
from flowrt.controller.log_mover import LogMover
from flowrt.controller.walk import Entry, Remains
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
    """The ledger of one run. ``add`` only buffers; ``commit`` makes it all durable at once, ``settle`` legible too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._page, self._jotted = blank(), blank()  # what was added since, and what was since all was entered
        self._promised = False
        self._mover = LogMover(path)
        check_whole(path)
        with suppress(OSError):  # SQLite says it too, and its words are those that `not_opened` tells
            path.touch(mode=0o600)  # SQLite would let everybody read it, and gives its log the rights of this file
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
            self._db.executescript(_SCHEMA + jottings.SCHEMA + walk_book.SCHEMA)
            self._db.execute("BEGIN IMMEDIATE")
            jottings.enter(self._db, jottings.jotted(self._db))
            self._db.execute("COMMIT")
            self._walk = walk_book.WalkBook(self._db)
            # From here on a lock of somebody else must not hold up the loop on which everybody is served.
            self._db.execute("PRAGMA busy_timeout=0")
        except (sqlite3.Error, FlowError) as error:
            raise not_opened(path, error) from error

    def add(self, record: Record, at_s: float) -> None:
        row = (at_s, record.epoch, record.prompt, record.state, record.step, record.reason)
        self._page.records.append(row)
        if record.state not in SOON:
            self._promised = True

    def is_behind(self) -> bool:
        """Something was added that has to be durable before anybody hears of it."""
        return self._promised or len(self._page.records) > MOST_WAITING

    @property
    def term(self) -> int:
        """How often a controller has begun here."""
        return self._walk.term

    @property
    def began(self) -> int | None:
        """The step from which the run was resumed, however many controllers it has had since; None: nobody has said."""
        return self._walk.began

    def keep(self, entry: Entry) -> None:
        """To be written with all that was added, before anybody hears of it."""
        self._walk.add(entry, self._page)
        self._promised = True

    def recall(self) -> Remains | None:
        """What a controller left behind that did not end its run; None when there was none."""
        try:
            return self._walk.recall(Counter(reason.split(";")[0] for (reason,) in self._db.execute(_DROPPED)))
        except (sqlite3.Error, FlowError, IndexError) as error:
            raise FlowError(
                f"ledger {self._path} cannot be read: {error}; flowrt resume {self._path.parent} goes back to the "
                "newest checkpoint"
            ) from error

    def trim(self) -> None:
        """Enter what was jotted down; drop what is kept of samples that are not live any more."""
        self.settle()
        self._mover.look()

    def forget_walk(self) -> None:
        """No controller shall come back to this: the run has ended."""
        self.settle()
        self._carefully(self._walk.forget)

    def _carefully(self, act: Callable[[], None]) -> None:
        try:
            act()
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def note(self, name: str, value: float, step: int) -> None:
        """Keep a number of the summary, which became known while ``step`` was in training."""
        self._page.notes.append((name, value, step))

    def resume(self, step: int, at_s: float) -> Position:
        """A controller starts after so many trained steps: take back what was done since; returns where it goes on."""
        self.settle()
        values = {"step": step, "at_s": at_s, "unix_s": time.time()}
        try:
            self._db.execute("BEGIN")
            for statement in _GO_BACK:
                self._db.execute(statement, values)
            self._walk.begin(step)
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
        self.settle()
        try:
            return pack(self._db.execute("SELECT epoch, prompt FROM prompts WHERE state != 'unread'"))
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def persist(self) -> None:
        """As `commit`, and what was committed outlasts the machine too."""
        self.settle()
        try:
            # A commit that syncs the log syncs all that is before it there.
            self._db.execute("PRAGMA synchronous=FULL")
            self._walk.touch()
            self._db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def commit(self) -> None:
        """Make all that was added durable, in one transaction. Raises FlowError, and keeps it, when the disk refuses.

        Raises LedgerBusy while another process has it locked.
        """
        if self._page.is_empty:
            return
        try:
            jottings.jot(self._db, self._page)
        except sqlite3.Error as error:
            raise self._refused(error) from error
        self._jotted.extend(self._page)
        self._page.clear()
        self._promised = False

    def settle(self) -> None:
        """As `commit`, with everything in its place: tables that can be asked."""
        if self._page.is_empty and self._jotted.is_empty:
            return
        entries = self._walk.needed([*self._jotted.entries, *self._page.entries])
        both = blank()
        both.extend(self._jotted)
        both.extend(self._page)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            jottings.enter(self._db, both._replace(entries=entries))
            self._walk.trim()  # together: what says that a group has left goes no sooner than what says that it came
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._refused(error) from error
        self._jotted.clear()
        self._page.clear()
        self._promised = False

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
        self.settle()
        states: dict[str, int] = dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())
        under_way = "SELECT epoch, prompt FROM prompts WHERE state NOT IN ('trained', 'dropped', 'unread')"
        unfinished = set(self._db.execute(under_way).fetchall())
        twice = self._db.execute(_TRAINED_TWICE).fetchone()[0]
        return Account(states, len(unfinished - set(live)), int(twice))

    def close(self) -> None:
        self._mover.close()
        self._db.close()
