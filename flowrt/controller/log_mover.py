"""What SQLite's write-ahead log holds is moved into the ledger's file beside the run's work.

SQLite would do it within a commit, syncing the disk while everybody waits for an answer: 30 to 60 ms, every 4 MB.
"""

import logging
import sqlite3
import threading
from pathlib import Path
from time import monotonic

from flowrt.waiting import joined

log = logging.getLogger(__name__)
MOVE_AT_BYTES = 4 << 20
MOVE_EVERY_S = 5.0
"""The log's file stays as long as it was once: its length does not say that it was moved."""
END_S = 10.0


class LogMover:
    """Moves on a thread, with a connection of its own, whenever `look` finds the log long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = path.with_name(path.name + "-wal")
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    def look(self) -> None:
        """Begin to move what is there, unless that is little or still going on."""
        if monotonic() < self._next_s or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            if self._log.stat().st_size < MOVE_AT_BYTES:
                return
            self._next_s = monotonic() + MOVE_EVERY_S
            self._thread = threading.Thread(target=self._move, name="ledger", daemon=True)
            self._thread.start()
        except FileNotFoundError:
            return
        except (OSError, RuntimeError) as error:  # no more threads, for example: there is no hurry
            self._thread = None
            log.warning("the log of ledger %s stays where it is: %s", self._path, error)

    def close(self) -> None:
        """Let what goes on come to its end."""
        if self._thread is not None and not joined(self._thread, END_S):
            log.warning("what the ledger's log holds is still being moved after %.0f s: is the disk stuck?", END_S)

    def _move(self) -> None:
        """A failure leaves everything in the log, where it is as safe; whoever commits next hears of a bad disk."""
        try:
            db = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        except sqlite3.Error as error:
            log.warning("the log of ledger %s stays where it is: %s", self._path, error)
            return
        try:
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            log.warning("the log of ledger %s stays where it is: %s", self._path, error)
        finally:
            db.close()
