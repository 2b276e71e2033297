"""Read-only access to the ledger, during a run and after it."""

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from flowrt.controller.storage.integrity import open_read_only, wal_corruption, wal_start, with_pending_writes
from flowrt.errors import ConfigError, FlowError
from flowrt.ids import ROW_BITS
from flowrt.runtime.host import is_on_network


class PromptEvent(NamedTuple):
    """A change of a prompt's state; ``attempt`` is the number of earlier starts and resumes of the run."""

    epoch: int
    attempt: int
    since_s: float  # seconds since the start of the attempt, or since the ledger's first event if no start was recorded
    state: str
    step: int
    reason: str
    reward: float | None = None
    """Mean reward of a group that was trained, or dropped by the group filter."""


class PromptState(NamedTuple):
    """A prompt in an epoch, with the step, reason and mean reward of its last change of state."""

    epoch: int
    prompt: int
    step: int
    reason: str
    reward: float | None


class LedgerReader:
    """Reader of a ledger's present content; a context manager that closes the file.

    Its methods raise ConfigError if the file cannot be read; the constructor also if it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"{path} is not there; is {path.parent} a run directory, and has the run begun?")
        self._path = path
        self._wal_start = wal_start(path) if is_on_network(path) else None
        """Of a ledger that is read without locks: the WAL as it was then."""
        try:
            self._db = self._open()
        except (sqlite3.Error, FlowError) as error:
            raise self._unreadable(error) from error
        if damage := wal_corruption(path):
            self._db.close()
            raise ConfigError(
                f"the write-ahead log of ledger {path} is damaged: {damage}; nothing was changed: flowrt resume "
                f"{path.parent} continues the run if its newest checkpoint does not need the damaged part"
            )

    def _open(self) -> sqlite3.Connection:
        database = open_read_only(self._path)
        try:
            return with_pending_writes(database)
        except (sqlite3.Error, FlowError):
            database.close()
            raise

    def __enter__(self) -> "LedgerReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._db.close()

    def states(self) -> dict[str, int]:
        """Number of prompts in each state; a prompt that was never offered is not counted."""
        return dict(self.query("SELECT state, COUNT(*) FROM prompts GROUP BY state"))

    def states_of_sets(self) -> dict[tuple[int, str], int]:
        """Number of prompts by the index of their data set and their state."""
        rows = self.query("SELECT prompt >> ?, state, COUNT(*) FROM prompts GROUP BY 1, 2", ROW_BITS)
        return {(data_set, state): count for data_set, state, count in rows}

    def reasons(self) -> dict[str, int]:
        """Number of dropped prompts by reason."""
        return dict(self.query("SELECT reason, COUNT(*) FROM prompts WHERE state = 'dropped' GROUP BY reason"))

    def prompts(self, state: str, reason: str, limit: int, offset: int = 0) -> tuple[list[PromptState], int]:
        """A page of the prompts in a state, the newest change first, and the number of all prompts in it.

        Args:
            state: as in `states`.
            reason: as in `reasons`; empty: any reason.
            limit: maximum number of prompts in the page.
            offset: number of prompts before the page.
        """
        values = (state, reason, reason)
        rows = self.query(
            "SELECT epoch, prompt, step, reason, reward FROM prompts WHERE state = ? AND (? = '' OR reason = ?) "
            "ORDER BY at_s DESC, epoch DESC, prompt LIMIT ? OFFSET ?",
            *(*values, limit, offset),
        )
        [(total,)] = self.query("SELECT COUNT(*) FROM prompts WHERE state = ? AND (? = '' OR reason = ?)", *values)
        return [PromptState(*row) for row in rows], int(total)

    def last_step(self) -> int | None:
        """The last trained step; None before the first."""
        [(step,)] = self.query("SELECT MAX(step) FROM prompts WHERE state = 'trained'")
        return None if step is None else int(step)

    def states_of(self, prompt: int) -> dict[int, str]:
        """The state of a prompt by epoch, for each epoch in which it was offered."""
        return dict(self.query("SELECT epoch, state FROM prompts WHERE prompt = ? ORDER BY epoch", prompt))

    def history(self, prompt: int, epoch: int | None) -> list[PromptEvent]:
        """All events of a prompt in order, in one epoch or in all (None)."""
        starts = self._attempt_starts()
        events = []
        for number, at_s, of_epoch, state, step, reason, reward in self.query(
            "SELECT id, at_s, epoch, state, step, reason, reward FROM events WHERE prompt = ? ORDER BY epoch, id",
            prompt,
        ):
            if epoch in (None, of_epoch):
                attempt = max((at for at, (after, _) in enumerate(starts) if number > after), default=0)
                since_s = at_s - starts[attempt][1]
                events.append(
                    PromptEvent(of_epoch, attempt, since_s, state=state, step=step, reason=reason, reward=reward)
                )
        return events

    def _attempt_starts(self) -> list[tuple[int, float]]:
        """For each attempt, the id of the last event before it, and its start in seconds on its own clock."""
        attempts = self.query("SELECT after_event, at_s FROM run_attempts ORDER BY rowid")
        if attempts:
            return [(int(after), float(at_s)) for after, at_s in attempts]
        [(first_s,)] = self.query("SELECT COALESCE(MIN(at_s), 0) FROM events")
        return [(0, float(first_s))]

    def query(self, statement: str, *values: int | str) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises ConfigError if the file cannot be read."""
        try:
            rows = self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        if self._wal_start is not None and wal_start(self._path) != self._wal_start:
            raise ConfigError(f"{self._path} has changed while it was read over a network file system: repeat it")
        return rows

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._path} is not a ledger of a flowrt run, or is damaged: {error}; nothing was changed: restore it "
            "from a copy"
        )
