"""Checks of a ledger's files before they are opened for writing. The checks change no file.

SQLite silently ignores a write-ahead log (WAL) from its first damaged frame on, and then overwrites it. The checks find
such damage before SQLite does so.
"""

import logging
import os
import sqlite3
import struct
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import quote

from flowrt.controller.storage.pending_writes import read_pending
from flowrt.controller.storage.prompt_words import LAST_STEP
from flowrt.controller.storage.schema import check_version, is_empty
from flowrt.errors import FlowError
from flowrt.runtime.host import is_on_network
from flowrt.runtime.waits import CONTROLLER, blocking, join_thread

log = logging.getLogger(__name__)
LEDGER = "ledger.sqlite"
"""File name of the ledger in the run directory."""
BUSY_TIMEOUT_S = 5.0
CHECKED_AT_ONCE_BYTES = 256 << 20
"""A file up to this size is checked as a whole before it is used, which takes up to a second."""
QUICKLY_CHECKED = ("prompt_words", "pending_writes", "replay_log", "members", "orders", "counters", "run_attempts")
"""Tables of a larger file that are checked before it is used; `IntegrityCheck` checks all of it."""
CHECK_AFTER_S = 30.0
"""Seconds after the start at which a large file is checked: not while the workers wait for the controller."""
JOIN_TIMEOUT_S = 10.0
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_BYTE_ORDERS = {0x377F0682: "<", 0x377F0683: ">"}
"""Byte order of the words that the WAL's checksums add up, by its magic number."""
_IF_LOCKED = "another process has it locked: stop that process"
_IF_DAMAGED = "it was not changed: restore it from a copy, or start in another run directory"


def check_integrity(path: Path) -> None:
    """Raises FlowError for an existing file that is damaged or has another schema version."""
    if path.exists():
        try:
            open_read_only(path).close()
        except (sqlite3.Error, FlowError) as error:
            raise open_error(path, error) from error


def open_error(path: Path, error: Exception) -> FlowError:
    """The error for a ledger that cannot be opened, with a way to fix it."""
    is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
    return FlowError(f"ledger {path} cannot be opened: {error}; {_IF_LOCKED if is_busy else _IF_DAMAGED}")


def check_not_behind_checkpoint(path: Path, steps: int, *, require_intact_wal: bool) -> None:
    """Check that the ledger has all steps up to the newest checkpoint.

    Args:
        path: the ledger.
        steps: number of trained steps in the checkpoint.
        require_intact_wal: also refuse damage of the WAL after those steps. Otherwise the damage is logged, and later
            steps are repeated.

    Raises FlowError if steps are missing, the damage is refused, or the ledger cannot be read.
    """
    damage = wal_corruption(path)
    if missing := missing_steps(last_step(path), steps):
        raise FlowError(f"ledger {path} {missing}" + (f" (its write-ahead log is damaged: {damage})" if damage else ""))
    if damage and require_intact_wal:
        raise FlowError(
            f"the write-ahead log of ledger {path} is damaged: {damage}; flowrt resume {path.parent} goes back to the "
            "newest checkpoint, which does not need the damaged part"
        )
    if damage:
        log.warning("the write-ahead log of ledger %s is damaged: %s; those steps are repeated", path, damage)


def missing_steps(last: int | None, steps: int) -> str:
    """Describe the steps that a ledger lacks; empty if it lacks no step.

    Args:
        last: the last trained step in the ledger; None if it has none.
        steps: number of trained steps in the newest checkpoint.
    """
    known = 0 if last is None else last + 1
    if known >= steps:
        return ""
    return f"has {known} steps, and there is a checkpoint after {steps}: a part of it is missing; {_IF_DAMAGED}"


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a ledger read-only, and check the whole file, or of a large one the tables in `QUICKLY_CHECKED`.

    Raises sqlite3.Error if the file is damaged or locked, OSError if it does not exist, and FlowError if it has another
    schema version, or is empty while its write-ahead log is not.
    """
    wal = wal_path(path)
    if not path.stat().st_size and wal.exists() and wal.stat().st_size:
        raise FlowError("it is empty, and its write-ahead log is not")  # SQLite would delete the log
    database = connect_read_only(path)
    try:
        check_version(database)
        is_large = path.stat().st_size > CHECKED_AT_ONCE_BYTES
        for what in QUICKLY_CHECKED if is_large and not is_empty(database) else ("1",):
            _quick_check(database, what)
        return database
    except (sqlite3.Error, FlowError):
        database.close()
        raise


def connect_read_only(path: Path, *, private_index: bool | None = None) -> sqlite3.Connection:
    """Open a SQLite file of a run for reading.

    - A writer has a WAL next to the file. Without one there is no writer, and ``immutable`` leaves no files behind.
    - The index of the WAL is in memory that processes of one host share. On a file system that several hosts share, a
      reader takes no part in it: it makes an index of its own (locking mode EXCLUSIVE) and takes no locks
      (``unix-none``), so that it cannot harm the writer. `wal_start` tells whether the writer began the WAL again.

    Args:
        path: the file.
        private_index: whether to use an index of its own, also in a directory that cannot be written; None: as above.

    Raises sqlite3.Error.
    """
    has_writer = wal_path(path).exists()
    is_private = has_writer and (is_on_network(path) if private_index is None else private_index)
    how = "" if has_writer else "&immutable=1"
    how = "&vfs=unix-none" if is_private else how
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro{how}"
    database = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    if is_private:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first access
    return database


def wal_start(path: Path) -> bytes:
    """The header of the WAL, which changes whenever the writer begins the WAL again; empty if there is none."""
    try:
        with wal_path(path).open("rb") as file:
            return file.read(_WAL_HEADER_BYTES)
    except FileNotFoundError:
        return b""


def _quick_check(database: sqlite3.Connection, what: str) -> None:
    """Check the pages of the whole file (1) or of a table. Raises sqlite3.Error for damage."""
    [(result,)] = database.execute(f"PRAGMA quick_check({what})").fetchall()
    if result != "ok":
        raise sqlite3.DatabaseError(" ".join(result.split()))


class IntegrityCheck:
    """Check of a large ledger on a thread, while the run goes on: `open_read_only` checks only the tables it reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None
        self._stop = threading.Event()
        self.damage = ""
        """What is damaged, as a sentence; empty if nothing is, or the check goes on."""

    def start(self) -> None:
        """Start the check, if the file is large."""
        try:
            if self._path.stat().st_size <= CHECKED_AT_ONCE_BYTES:
                return
            self._thread = threading.Thread(target=self._check, name="integrity", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self._thread = None
            log.warning("ledger %s was not checked as a whole: %s", self._path, error)

    def stop(self) -> None:
        """Interrupt the check."""
        self._stop.set()
        if self._db is not None:
            self._db.interrupt()
        if self._thread is not None and not join_thread(self._thread, JOIN_TIMEOUT_S):
            log.warning("the check of the ledger has not ended after %.0f s: is the disk stuck?", JOIN_TIMEOUT_S)

    def _check(self) -> None:
        if blocking(partial(self._stop.wait, CHECK_AFTER_S), CHECK_AFTER_S, "the start of the run", CONTROLLER):
            return
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)) as database:
                self._db = database
                _quick_check(database, "1")
                self._db = None
        except sqlite3.Error as error:
            self._db = None
            code = getattr(error, "sqlite_errorcode", None)  # missing for damage that the check has found
            if code in (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_BUSY):
                log.info("ledger %s was not checked as a whole: %s", self._path, error)
            else:
                self.damage = f"ledger {self._path} is damaged: {error}; restore it from a copy"


def with_pending_writes(database: sqlite3.Connection) -> sqlite3.Connection:
    """The ledger, of which ``prompts`` and ``events`` show the pending writes too, as temporary views.

    Raises sqlite3.Error, and FlowError if a pending write is damaged.
    """
    records = read_pending(database).records
    if not records:
        return database
    [(last,)] = database.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchall()
    database.execute("PRAGMA temp_store = MEMORY")
    database.executescript(_PENDING)
    events = [(last + number, *record) for number, record in enumerate(records, 1)]
    database.executemany("INSERT INTO new_events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", events)
    database.executemany(
        "INSERT OR REPLACE INTO changed_prompts (at_s, epoch, prompt, state, step, reason, reward) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        records,
    )
    return database


_PENDING = """
CREATE TEMP TABLE new_events AS SELECT * FROM main.events LIMIT 0;
CREATE TEMP TABLE changed_prompts (
    epoch INTEGER, prompt INTEGER, state TEXT, step INTEGER, reason TEXT, reward REAL, at_s REAL,
    PRIMARY KEY (epoch, prompt)
) WITHOUT ROWID;
CREATE TEMP VIEW events AS SELECT * FROM main.events UNION ALL SELECT * FROM new_events;
CREATE TEMP VIEW prompts AS SELECT * FROM changed_prompts UNION ALL SELECT * FROM main.prompts AS before
WHERE NOT EXISTS (SELECT 1 FROM changed_prompts AS c WHERE c.epoch = before.epoch AND c.prompt = before.prompt);
"""
"""Temporary views have precedence over the tables of the file."""


def last_step(path: Path) -> int | None:
    """The last trained step in the ledger; None if it has none. Raises FlowError if the ledger cannot be read."""
    if not path.exists():
        return None
    try:
        with closing(open_read_only(path)) as database:
            if is_empty(database):
                return None
            steps = [step for (step,) in database.execute(LAST_STEP)]
            steps += [step for _, _, _, state, step, *_ in read_pending(database).records if state == "trained"]
    except (sqlite3.Error, FlowError) as error:
        raise FlowError(f"ledger {path} cannot be read: {error}; {_IF_DAMAGED}") from error
    return max(steps, default=None)


def wal_path(path: Path) -> Path:
    """The write-ahead log that SQLite keeps next to the ledger."""
    return path.with_name(f"{path.name}-wal")


def ledger_bytes(run_dir: Path) -> int:
    """Size of the ledger and its write-ahead log; 0 if there is none."""
    path = run_dir / LEDGER
    return sum(file.stat().st_size for file in (path, wal_path(path)) if file.exists())


def wal_corruption(path: Path) -> str:
    """Describe damage within the ledger's write-ahead log; empty if the log is intact or missing.

    A missing or unfinished end is not damage: a power failure or a killed writer leaves such a log, and its remaining
    frames are complete and in order.
    """
    try:
        with wal_path(path).open("rb") as file:
            header = file.read(_WAL_HEADER_BYTES)
            frames = file.read()
            file.seek(0)
            if file.read(_WAL_HEADER_BYTES) != header:
                return ""  # a live writer has just restarted it
    except FileNotFoundError:
        return ""
    if len(header) < _WAL_HEADER_BYTES:
        return ""  # the writer was killed, or the disk was full, before the first frame
    if struct.unpack_from(">I", header)[0] not in _BYTE_ORDERS:
        return "its header is not that of a write-ahead log"
    magic, _, page_bytes, _, *salts = struct.unpack(">6I", header[:_FRAME_HEADER_BYTES])
    order = _BYTE_ORDERS[magic]
    sums = _checksum(order, header[:_FRAME_HEADER_BYTES], (0, 0))
    if sums != struct.unpack(">2I", header[_FRAME_HEADER_BYTES:]):
        return "its header is not that of a write-ahead log"
    return _frame_corruption(frames, _FRAME_HEADER_BYTES + page_bytes, tuple(salts), order, sums)


def _frame_corruption(
    frames: bytes, frame_bytes: int, salts: tuple[int, ...], order: str, sums: tuple[int, int]
) -> str:
    """Describe a bad frame that is followed by committed transactions of this log; empty if there is none.

    The checksum of a frame covers all frames before it. Frames left by an earlier log have other salts. The last frame
    of a transaction has a commit mark, the size of the database in pages.

    A transaction that exceeds SQLite's cache is written in parts, and pages that change again are overwritten in their
    frames; the checksums of the frames after them are corrected only after the frame with the commit mark was written.
    A writer that is killed in between leaves bad frames with at most one commit mark, that of the transaction itself.
    """
    first_bad = marks = 0
    for number in range(len(frames) // frame_bytes):
        frame = frames[number * frame_bytes : (number + 1) * frame_bytes]
        _, pages, *frame_salts = struct.unpack_from(">4I", frame)
        is_current = tuple(frame_salts) == salts
        if not first_bad:
            if is_current:
                sums = _checksum(order, frame[_FRAME_HEADER_BYTES:], _checksum(order, frame[:8], sums))
            if not (is_current and sums == struct.unpack_from(">2I", frame, 16)):
                first_bad = number + 1
        if first_bad and is_current and pages:
            marks += 1
            if marks > 1:
                return f"from frame {first_bad} on, and there are more after that"
    return ""


def _checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Continue the two checksums over these bytes. Source: "Checksum Algorithm" in SQLite's file format."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second
