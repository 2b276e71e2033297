"""The ledger: each prompt in exactly one state, across any crash. SQLite in the run directory, written in batches.

- ``prompts`` has the current state of each prompt of each epoch, ``events`` its history, append only. ``reward`` is the
  mean reward of a group that was trained, or dropped by the group filter. ``prompt_words`` has sets of prompts by state
  as bitmaps: a start, a resume and the summary read these, and of ``prompts`` only what is unfinished or rolled back.
- A run that is resumed from a checkpoint rolls back all work after the checkpoint: those prompts become ``unread``
  again, with an event that says why.
- ``run_attempts`` has a row for each start or resume of the run, ``summary_values`` the numbers of its summary.
- A commit appends one row of pending writes, which a later flush applies to the tables.
- A restarted controller reads the restart log to rebuild the live groups. An entry is deleted when every group that was
  live when it was written has closed, so the log grows with the live groups and not with the length of the run.
- SQLite's write-ahead log (WAL) is checkpointed on a thread. Within a commit, SQLite would sync the disk while all
  workers wait: 30 to 60 ms for every 4 MB.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from flowrt.controller.events import AppendLedger
from flowrt.controller.state.controller_restart import (
    CounterSet,
    DrainEnded,
    Entry,
    GroupEntry,
    GroupsClosed,
    GroupsOpened,
    Order,
    RecoveredState,
    RunPreempted,
    StageCommitted,
    StageUndone,
    WorkerDrained,
    WorkerJoined,
    WorkerLeft,
)
from flowrt.controller.state.reward_history import Outcome
from flowrt.controller.storage.integrity import (
    BUSY_TIMEOUT_S,
    IntegrityCheck,
    check_integrity,
    open_error,
    wal_path,
)
from flowrt.controller.storage.pending_writes import (
    PendingWrites,
    add_records,
    append_pending,
    apply_pending,
    no_writes,
    read_pending,
)
from flowrt.controller.storage.prompt_words import (
    UNFINISHED,
    count,
    finished,
    not_unread,
)
from flowrt.controller.storage.schema import create_tables, is_empty
from flowrt.errors import FlowError
from flowrt.protocol.codec import from_blob, to_blob
from flowrt.protocol.messages import Passed, Position
from flowrt.runtime.waits import join_thread

log = logging.getLogger(__name__)
Result = TypeVar("Result")
# ---- the restart log

# Counters of the log itself, in addition to those of the controller's state: the number of controllers that this run
# has had, and the step from which the run was resumed.
TERM = "term"
RESUMED_FROM = "resumed_from"
# Names of orders: preemption of the run, and of each worker that drains.
PREEMPT = "preempt"
DRAIN = "drain "
_KINDS: tuple[type[GroupEntry], ...] = (GroupsOpened, StageCommitted, StageUndone, GroupsClosed)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class RestartLog:
    """The log of one ledger, in its table ``replay_log``.

    ``append`` only adds to pending writes; the other methods write to the database.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        """Start a new term of the run. Raises sqlite3.Error."""
        self._db = db
        self.term = self._counters().get(TERM, 0) + 1
        self._set_counter(TERM, self.term)
        self._next_id = int(db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM replay_log").fetchone()[0])
        self._first_ids: dict[int, int] = {}  # the first entry of each live group, in order

    def append(self, entry: Entry, writes: PendingWrites) -> None:
        """Add an entry to ``writes``."""
        match entry:
            case CounterSet(name, value):
                writes.counters.append((name, value))
            case WorkerJoined(worker, role):
                writes.members.append((worker, role))
            case WorkerLeft(worker):
                writes.members.append((worker, ""))
            case WorkerDrained(worker):
                writes.orders.append((DRAIN + worker, to_blob(entry)))
            case DrainEnded(worker):
                writes.orders.append((DRAIN + worker, b""))
            case RunPreempted():
                writes.orders.append((PREEMPT, to_blob(entry)))
            case _:
                self._track_live_groups(self._next_id, entry)
                writes.entries.append((self._next_id, _KIND_NUMBERS[type(entry)], to_blob(entry)))
                self._next_id += 1

    def needed(self, entries: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        """The entries, of these rows (id, kind, data), that are needed to rebuild the live groups."""
        oldest = self._oldest_needed()
        return [entry for entry in entries if entry[0] >= oldest]

    def rewrite_term(self) -> None:
        """Write the unchanged term, so that there is a transaction to commit. Raises sqlite3.Error."""
        self._set_counter(TERM, self.term)

    def trim(self) -> None:
        """Delete entries that no live group needs. Raises sqlite3.Error."""
        self._db.execute("DELETE FROM replay_log WHERE id < ?", (self._oldest_needed(),))

    def read(self, dropped: dict[str, int]) -> RecoveredState | None:
        """The state left by a controller that did not end its run; None if there is none.

        Args:
            dropped: number of dropped prompts by reason, which becomes part of the state.

        Raises: FlowError for a damaged entry, IndexError for an unknown kind, sqlite3.Error.
        """
        members = dict(self._db.execute("SELECT worker, role FROM members").fetchall())
        if not members:
            return None
        entries: list[GroupEntry] = []
        for number, kind, data in self._db.execute("SELECT id, kind, entry FROM replay_log ORDER BY id"):
            entries.append(from_blob(_KINDS[kind], data))
            self._track_live_groups(number, entries[-1])
        orders: list[Order] = []
        for name, data in self._db.execute("SELECT name, entry FROM orders ORDER BY name"):
            orders.append(from_blob(RunPreempted, data) if name == PREEMPT else from_blob(WorkerDrained, data))
        return RecoveredState(self._counters(), members, entries, dropped, tuple(orders))

    @property
    def resumed_from(self) -> int | None:
        """The step from which the run was resumed; None if it never was."""
        return self._counters().get(RESUMED_FROM)

    def reset(self, step: int) -> None:
        """Delete all entries; the run is resumed after ``step`` trained steps. Raises sqlite3.Error."""
        self.clear()
        self._set_counter(RESUMED_FROM, step)

    def clear(self) -> None:
        """Delete all entries, members, orders, and counters except the term. Raises sqlite3.Error."""
        self._db.execute("DELETE FROM replay_log")
        self._db.execute("DELETE FROM members")
        self._db.execute("DELETE FROM orders")
        self._db.execute("DELETE FROM counters WHERE name != ?", (TERM,))
        self._first_ids.clear()

    def _oldest_needed(self) -> int:
        return next(iter(self._first_ids.values()), self._next_id)

    def _track_live_groups(self, number: int, entry: GroupEntry) -> None:
        if isinstance(entry, GroupsOpened):
            self._first_ids.update(dict.fromkeys(range(entry.group, entry.group + len(entry.prompts)), number))
        elif isinstance(entry, GroupsClosed):
            for group in entry.groups:
                self._first_ids.pop(group, None)

    def _counters(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, value FROM counters").fetchall())

    def _set_counter(self, name: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, value))


# ---- the ledger

CHECKPOINT_AT_BYTES = 4 << 20
CHECKPOINT_INTERVAL_S = 5.0  # the WAL file never shrinks, so its length does not tell whether it was checkpointed
JOIN_TIMEOUT_S = 10.0
MAX_WAL_PAGES = 16384  # of 4 KiB: beyond this, SQLite checkpoints within a commit
DEFERRABLE_STATES = frozenset({"ready", "leased"})
"""States on which no message depends: their records may be written with the next commit."""
MAX_DEFERRED = 512


_ROLLED_BACK = (
    # Two queries, because each has an index.
    "SELECT epoch, prompt, state, step FROM prompts WHERE state IN ('in_flight', 'ready', 'leased') UNION ALL "
    "SELECT epoch, prompt, state, step FROM prompts WHERE state IN ('trained', 'dropped') AND step >= :step"
)
_ROLLBACK = (
    "INSERT INTO run_attempts SELECT COALESCE(MAX(id), 0), :step, :at_s, :unix_s FROM events",
    "DELETE FROM dropped_reasons",
    # Evaluations before the first step stay valid, even if no step was trained.
    "DELETE FROM summary_values WHERE step >= MAX(:step, 1)",
    "DELETE FROM steps WHERE step >= :step",
    # A version is made by the steps before it.
    "DELETE FROM evaluations WHERE version > :step",
)


class WalCheckpointer:
    """Checkpoints a long WAL on a thread with its own connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = wal_path(path)
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    def check(self) -> None:
        """Start a checkpoint, unless the WAL is short or one is running."""
        if monotonic() < self._next_s or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            if self._wal.stat().st_size < CHECKPOINT_AT_BYTES:
                return
            self._next_s = monotonic() + CHECKPOINT_INTERVAL_S
            self._thread = threading.Thread(target=self._checkpoint, name="ledger", daemon=True)
            self._thread.start()
        except FileNotFoundError:
            return
        except (OSError, RuntimeError) as error:  # no more threads, for example: the next poll tries again
            self._thread = None
            log.warning("the write-ahead log of ledger %s was not checkpointed: %s", self._path, error)

    def close(self) -> None:
        """Wait for a running checkpoint."""
        if self._thread is not None and not join_thread(self._thread, JOIN_TIMEOUT_S):
            log.warning("the ledger's checkpoint has not ended after %.0f s: is the disk stuck?", JOIN_TIMEOUT_S)

    def _checkpoint(self) -> None:
        """Checkpoint once. A failure loses nothing: all data stays in the WAL. If the disk fails, a commit raises."""
        try:
            db = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        except sqlite3.Error as error:
            log.warning("the write-ahead log of ledger %s was not checkpointed: %s", self._path, error)
            return
        try:
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            log.warning("the write-ahead log of ledger %s was not checkpointed: %s", self._path, error)
        finally:
            db.close()


class LedgerBusy(FlowError):
    """Another process has the ledger locked. The records stay buffered, and the call can be repeated."""


class Account(NamedTuple):
    """Number of prompts by state; ``lost`` and ``trained_twice`` are 0 unless there is a bug."""

    states: dict[str, int]
    lost: int
    trained_twice: int


class Ledger:
    """The ledger of one run. ``add`` only buffers; ``commit`` makes records durable, ``flush`` also fills the tables.

    All methods that write raise LedgerBusy while another process has the ledger locked, and FlowError when a write
    fails; the records stay buffered. Methods that read the tables flush first, unless they say otherwise, and so may
    raise too.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the ledger, and begin a new term of the run.

        Raises FlowError if the file is damaged, locked, or of another schema version.
        """
        self._path = path
        self._uncommitted = no_writes()
        self._unapplied = no_writes()  # committed since the last flush
        self._commit_needed = False
        self._checkpointer = WalCheckpointer(path)
        self._integrity = IntegrityCheck(path)
        check_integrity(path)
        with suppress(OSError):  # if this fails, SQLite fails too, and its error is reported below
            path.touch(mode=0o600)  # SQLite would make it readable for all users; the WAL gets the rights of this file
        self._file = (0, 0)
        with suppress(OSError):
            self._file = (path.stat().st_dev, path.stat().st_ino)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={MAX_WAL_PAGES}")
            if is_empty(self._db):
                create_tables(self._db)
            self._db.execute("BEGIN IMMEDIATE")
            apply_pending(self._db, read_pending(self._db))
            self._db.execute("COMMIT")
            self._restart_log = RestartLog(self._db)
            # From here on, the event loop must not wait for a lock of another process.
            self._db.execute("PRAGMA busy_timeout=0")
        except (sqlite3.Error, FlowError) as error:
            raise open_error(path, error) from error
        self._integrity.start()

    def add(self, record: AppendLedger, at_s: float) -> None:
        """Buffer a change of a prompt's state; ``at_s``: seconds on the controller's clock."""
        row = (at_s, record.epoch, record.prompt, record.state, record.step, record.reason, record.reward)
        self._uncommitted.records.append(row)
        if record.state not in DEFERRABLE_STATES:
            self._commit_needed = True

    def needs_commit(self) -> bool:
        """True if something buffered has to be durable before any message that follows from it is sent."""
        return self._commit_needed or len(self._uncommitted.records) > MAX_DEFERRED

    @property
    def term(self) -> int:
        """The number of controllers that this run has had."""
        return self._restart_log.term

    @property
    def resumed_from(self) -> int | None:
        """The step from which the run was resumed, across restarts of the controller; None if it never was."""
        return self._restart_log.resumed_from

    @property
    def run_attempt(self) -> int:
        """Number of starts and resumes of this run, at least 1, without restarts of its controller. Does not flush."""
        [(count,)] = self._rows("SELECT COUNT(*) FROM run_attempts")
        return max(int(count), 1)

    def starts(self) -> list[int]:
        """The step at which each start or resume of this run began, in order. Does not flush."""
        return [int(step) for (step,) in self._rows("SELECT step FROM run_attempts ORDER BY rowid")]

    def append_restart_log(self, entry: Entry) -> None:
        """Buffer an entry of the restart log; it needs a commit."""
        self._restart_log.append(entry, self._uncommitted)
        self._commit_needed = True

    def recover(self) -> RecoveredState | None:
        """The state left by a controller that did not end its run; None if there is none. Does not flush.

        Raises FlowError if it is damaged.
        """
        try:
            return self._restart_log.read(
                dict(self._db.execute("SELECT reason, prompts FROM dropped_reasons").fetchall())
            )
        except (sqlite3.Error, FlowError, IndexError) as error:
            raise self._read_error(error) from error

    def compact(self) -> None:
        """Flush, delete entries that no live group needs, and start a checkpoint of a long WAL on its thread."""
        self.flush()
        self._checkpointer.check()

    def clear_restart_log(self) -> None:
        """Flush, and delete the restart log: the run has ended, and no controller will read it."""
        self.flush()
        try:
            self._restart_log.clear()
        except sqlite3.Error as error:
            raise self._write_error(error) from error

    def add_summary_value(self, name: str, value: float, step: int) -> None:
        """Buffer a number of the summary that was reported while ``step`` was in training."""
        self._uncommitted.summary_values.append((name, value, step))

    def add_step(self, step: int, line: str) -> None:
        """Buffer the line of metrics.jsonl of a closed step, from which the file can be rewritten."""
        self._uncommitted.steps.append((step, line))

    def add_evaluation(self, name: str, version: int, line: str) -> None:
        """Buffer the line of evaluations.jsonl of an evaluation."""
        self._uncommitted.evaluations.append((name, version, line))
        self._commit_needed = True

    def evaluation_lines(self) -> dict[tuple[str, int], str]:
        """The line of evaluations.jsonl of each evaluation, by data set and version, in order of versions."""
        self.flush()
        rows = self._rows("SELECT name, version, line FROM evaluations ORDER BY version, name")
        return {(name, version): line for name, version, line in rows}

    def step_lines(self, steps: int) -> list[str]:
        """The lines of metrics.jsonl of the first ``steps`` steps. Raises FlowError if a step is missing."""
        self.flush()
        query = "SELECT step, line FROM steps WHERE step < ? ORDER BY step"
        lines = dict(self._rows(query, steps))
        missing = next((step for step in range(steps) if step not in lines), None)
        if missing is not None:
            raise FlowError(
                f"ledger {self._path} has no metrics of step {missing}: it is damaged; restore it from a copy, or "
                "start in another run directory"
            )
        return list(lines.values())

    def check_present(self) -> None:
        """Raises FlowError if the file was removed or replaced: all that is written to it would be lost at exit.

        Also raises it if the check of a large file, which goes on while the run does, has found damage.
        """
        if damage := self._integrity.damage:
            raise FlowError(damage)
        try:
            status = self._path.stat()
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != self._file:
            raise FlowError(
                f"ledger {self._path} was removed or replaced during the run; its content is lost: start in another "
                "run directory"
            )

    def resume(self, step: int, at_s: float) -> Position:
        """Roll back all work after ``step`` trained steps; returns the position to resume from.

        ``at_s``: seconds on the controller's clock.
        """
        self.flush()
        values = {"step": step, "at_s": at_s, "unix_s": time.time()}
        try:
            self._db.execute("BEGIN")
            for statement in _ROLLBACK:
                self._db.execute(statement, values)
            undone = self._db.execute(_ROLLED_BACK, values).fetchall()
            add_records(
                self._db,
                [
                    (at_s, epoch, prompt, "unread", step, f"rolled back: {state} in step {of_step}", None)
                    for epoch, prompt, state, of_step in undone
                ],
            )
            self._restart_log.reset(step)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._write_error(error) from error
        return self.position(step)

    def position(self, step: int) -> Position:
        """The position of the run, of which ``step`` steps are trained. Does not flush."""
        numbers = self._rows("SELECT name, value FROM summary_values ORDER BY name")
        return Position(step, self._read(finished), tuple(numbers))

    def outcomes(self) -> list[Outcome]:
        """The mean rewards of all groups that were trained or filtered and not rolled back, in order of steps."""
        self.flush()
        query = "SELECT step, epoch, prompt, reward FROM prompts WHERE reward IS NOT NULL ORDER BY step, epoch, prompt"
        return [Outcome(*row) for row in self._rows(query)]

    def passed(self) -> tuple[Passed, ...]:
        """Prompts that a new source must not offer, by epoch: all in the ledger that are not unread."""
        self.flush()
        return self._read(not_unread)

    def persist(self) -> None:
        """Flush and sync the disk, so that a power failure cannot undo the flush."""
        self.flush()
        try:
            # A commit that syncs the WAL also syncs all earlier commits in it.
            self._db.execute("PRAGMA synchronous=FULL")
            self._restart_log.rewrite_term()
            self._db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error as error:
            raise self._write_error(error) from error

    def commit(self) -> None:
        """Make the buffered records durable in one transaction: they survive a crash of the process, not the host."""
        if self._uncommitted.is_empty:
            return
        try:
            append_pending(self._db, self._uncommitted)
        except sqlite3.Error as error:
            raise self._write_error(error) from error
        self._unapplied.extend(self._uncommitted)
        self._uncommitted.clear()
        self._commit_needed = False

    def flush(self) -> None:
        """Commit, and apply all pending writes to the tables, so that queries find them."""
        if self._uncommitted.is_empty and self._unapplied.is_empty:
            return
        entries = self._restart_log.needed([*self._unapplied.entries, *self._uncommitted.entries])
        writes = no_writes()
        writes.extend(self._unapplied)
        writes.extend(self._uncommitted)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            apply_pending(self._db, writes._replace(entries=entries))
            self._restart_log.trim()  # same transaction: a group's closing is never deleted before its opening
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._write_error(error) from error
        self._unapplied.clear()
        self._uncommitted.clear()
        self._commit_needed = False

    def _rows(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises FlowError if the file cannot be read, LedgerBusy while it is locked."""
        return self._read(lambda db: db.execute(query, values).fetchall())

    def _read(self, read: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of a function that reads the file. Raises as `_rows`."""
        try:
            return read(self._db)
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise self._write_error(error) from error
            raise self._read_error(error) from error

    def _read_error(self, error: Exception) -> FlowError:
        return FlowError(
            f"ledger {self._path} cannot be read: {error}; flowrt resume {self._path.parent} goes back to the newest "
            "checkpoint"
        )

    def _write_error(self, error: sqlite3.Error) -> FlowError:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            return LedgerBusy(f"ledger {self._path} is locked by another process")
        return FlowError(
            f"ledger {self._path} cannot be written: {error}; all earlier commits are intact: is the disk full?"
        )

    def account(self, live: Iterable[tuple[int, int]]) -> Account:
        """Compare the ledger with the (epoch, prompt) pairs of the live groups.

        A prompt is lost when the ledger has it in flight, ready or leased and it has no live group.
        """
        self.flush()
        unfinished = self._rows(UNFINISHED)
        words = self._rows("SELECT trained, dropped, unread, trained_twice FROM prompt_words")
        counts = count(words, (state for _, _, state in unfinished))
        lost = {(epoch, prompt) for epoch, prompt, _ in unfinished} - set(live)
        return Account(counts.states, len(lost), counts.trained_twice)

    def close(self) -> None:
        """Close the database without a commit; wait for a running checkpoint."""
        self._checkpointer.close()
        self._integrity.stop()
        self._db.close()
