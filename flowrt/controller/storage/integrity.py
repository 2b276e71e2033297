"""Checks of a ledger's files before they are opened for writing. The checks change no file.

SQLite silently ignores a write-ahead log (WAL) from its first damaged frame on, and then overwrites it. The checks find
such damage before SQLite does so.
"""

import logging
import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from flowrt.controller.storage.pending_writes import apply_pending, read_pending
from flowrt.controller.storage.schema import check_version, is_empty
from flowrt.errors import FlowError

log = logging.getLogger(__name__)
LEDGER = "ledger.sqlite"
"""File name of the ledger in the run directory."""
BUSY_TIMEOUT_S = 5.0
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
    """Open a ledger read-only, and check the whole file.

    Raises sqlite3.Error if the file is damaged or locked, OSError if it does not exist, and FlowError if it has another
    schema version, or is empty while its write-ahead log is not.
    """
    wal = wal_path(path)
    if not path.stat().st_size and wal.exists() and wal.stat().st_size:
        raise FlowError("it is empty, and its write-ahead log is not")  # SQLite would delete the log
    # A writer has a WAL next to the file. Without one there is no writer, and `immutable` leaves no files behind.
    immutable = "" if wal.exists() else "&immutable=1"
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro{immutable}"
    database = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        [(found,)] = database.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        check_version(database)
        return database
    except (sqlite3.Error, FlowError):
        database.close()
        raise


def with_pending_writes(database: sqlite3.Connection) -> sqlite3.Connection:
    """The ledger with its pending writes applied.

    Without pending writes this is ``database`` itself, otherwise a copy in memory; ``database`` is closed then. Raises
    sqlite3.Error, and FlowError if a pending write is damaged.
    """
    if database.execute("SELECT 1 FROM pending_writes LIMIT 1").fetchone() is None:
        return database
    copy = sqlite3.connect(":memory:", isolation_level=None)
    database.backup(copy)
    database.close()
    apply_pending(copy, read_pending(copy))
    return copy


def last_step(path: Path) -> int | None:
    """The last trained step in the ledger; None if it has none. Raises FlowError if the ledger cannot be read."""
    if not path.exists():
        return None
    try:
        with closing(open_read_only(path)) as database:
            if is_empty(database):
                return None
            with closing(with_pending_writes(database)) as complete:
                [(last,)] = complete.execute("SELECT MAX(step) FROM prompts WHERE state = 'trained'").fetchall()
    except (sqlite3.Error, FlowError) as error:
        raise FlowError(f"ledger {path} cannot be read: {error}; {_IF_DAMAGED}") from error
    return None if last is None else int(last)


def wal_path(path: Path) -> Path:
    """The write-ahead log that SQLite keeps next to the ledger."""
    return path.with_name(f"{path.name}-wal")


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
