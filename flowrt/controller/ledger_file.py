"""The files of a ledger before anybody opens them to write: whole, or an error that says what is wrong.

SQLite takes what it can read of a damaged log for all there was, and moves it into the file. So we look first, and
change nothing.
"""

import logging
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from flowrt.controller.jottings import enter, jotted
from flowrt.errors import FlowError

log = logging.getLogger(__name__)
LEDGER = "ledger.sqlite"
"""Its name in the run directory."""
BUSY_S = 5.0
_HEADER, _FRAME_HEADER = 32, 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""The first word of a log, and the order of the bytes of the words that its checksums add up."""
_LOCKED = "another process has it; let go of it"
_TOLD = "it is left as it is: restore it from a copy, or start anew in another run directory"


def check_whole(path: Path) -> None:
    """Raises FlowError when there is a file and not all of it can be read."""
    if path.exists():
        try:
            open_to_read(path).close()
        except sqlite3.Error as error:
            raise not_opened(path, error) from error


def not_opened(path: Path, error: Exception) -> FlowError:
    """Why a ledger cannot be opened, and what to do."""
    busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
    return FlowError(f"ledger {path} cannot be opened: {error}; {_LOCKED if busy else _TOLD}")


def check_knows(path: Path, steps: int, *, to_the_end: bool) -> None:
    """Raises FlowError when the ledger knows less than the checkpoint after so many steps, which it never does.

    ``to_the_end``: nor may anything that came after that be missing. Else it may: it is done again.
    """
    damage = torn(path)
    if fault := knows_less(last_step(path), steps):
        raise FlowError(f"ledger {path} {fault}" + (f" (its log is damaged: {damage})" if damage else ""))
    if damage and to_the_end:
        raise FlowError(
            f"the log of ledger {path} is damaged: {damage}; flowrt resume {path.parent} goes back to the newest "
            "checkpoint, which needs nothing of that"
        )
    if damage:
        log.warning("the log of ledger %s is damaged: %s; that is done again", path, damage)


def knows_less(last: int | None, steps: int) -> str:
    """What is wrong with a ledger that has this as its last trained step beside a checkpoint after so many."""
    known = 0 if last is None else last + 1
    if known >= steps:
        return ""
    return f"knows of {known} steps, and there is a checkpoint after {steps}: a part of it is missing; {_TOLD}"


def open_to_read(path: Path) -> sqlite3.Connection:
    """All of it, checked, and nothing of it changed. Raises sqlite3.Error."""
    # Whoever writes has a log beside the file. Where there is none nobody does, and we leave nothing behind either.
    quiet = "" if log_of(path).exists() else "&immutable=1"
    place = f"file:{quote(str(path.absolute()))}?mode=ro{quiet}"
    database = sqlite3.connect(place, uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        [(found,)] = database.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        return database
    except sqlite3.Error:
        database.close()
        raise


def entered(database: sqlite3.Connection) -> sqlite3.Connection:
    """With what its writer has only jotted down, or had when it died: entered in a copy, we change nothing."""
    if not (_has(database, "jottings") and database.execute("SELECT 1 FROM jottings LIMIT 1").fetchone()):
        return database
    copy = sqlite3.connect(":memory:", isolation_level=None)
    database.backup(copy)
    database.close()
    enter(copy, jotted(copy))
    return copy


def last_step(path: Path) -> int | None:
    """The last step that has trained something. Raises FlowError when it cannot be read."""
    if not path.exists():
        return None
    try:
        with closing(open_to_read(path)) as database:
            if not _has(database, "prompts"):
                return None
            with closing(entered(database)) as whole:
                [(last,)] = whole.execute("SELECT MAX(step) FROM prompts WHERE state = 'trained'").fetchall()
    except (sqlite3.Error, FlowError) as error:
        raise FlowError(f"ledger {path} cannot be read: {error}; {_TOLD}") from error
    return None if last is None else int(last)


def _has(database: sqlite3.Connection, table: str) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def torn(path: Path) -> str:
    """Where the ledger's log is damaged in its midst; empty when it is not, or its end is missing.

    The end of a log may be missing after a power failure: of what comes before it everything is there, in order.
    """
    try:
        with log_of(path).open("rb") as file:
            header = file.read(_HEADER)
            frames = file.read()
            file.seek(0)
            if file.read(_HEADER) != header:
                return ""  # it has just been begun anew: its writer lives
    except FileNotFoundError:
        return ""
    if not header:
        return ""
    if len(header) < _HEADER or struct.unpack_from(">I", header)[0] not in _MAGIC:
        return "it does not begin as a log does"
    magic, _, page_bytes, _, *salts = struct.unpack(">6I", header[:_FRAME_HEADER])
    order = _MAGIC[magic]
    sums = _checksum(order, header[:_FRAME_HEADER], (0, 0))
    if sums != struct.unpack(">2I", header[_FRAME_HEADER:]):
        return "it does not begin as a log does"
    return _torn(frames, _FRAME_HEADER + page_bytes, tuple(salts), order, sums)


def _torn(frames: bytes, frame_bytes: int, salts: tuple[int, ...], order: str, sums: tuple[int, int]) -> str:
    """The checksum of each frame is that of all before it; what was left by an earlier log has other salts."""
    first_bad = 0
    for number in range(len(frames) // frame_bytes):
        frame = frames[number * frame_bytes : (number + 1) * frame_bytes]
        _, _, *its = struct.unpack_from(">4I", frame)
        ours = tuple(its) == salts
        if first_bad and ours:
            return f"from frame {first_bad} on, and there are more after that"
        if ours:
            sums = _checksum(order, frame[_FRAME_HEADER:], _checksum(order, frame[:8], sums))
        if not first_bad and not (ours and sums == struct.unpack_from(">2I", frame, 16)):
            first_bad = number + 1
    return ""


def _checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """As SQLite adds up its log: "Checksum Algorithm" in its file format."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
