"""The ledger as others see it: read-only, while the run goes on and after it."""

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from flowrt.controller.ledger_file import entered, open_to_read, torn
from flowrt.errors import ConfigError, FlowError


class Moment(NamedTuple):
    """Something that happened to a prompt; ``life`` counts the controllers of the run, from 0."""

    epoch: int
    life: int
    since_s: float  # the start of that life; of the ledger's first event where lives are not kept
    state: str
    step: int
    reason: str


class LedgerReader:
    """Opened for the length of a ``with`` block. Raises ConfigError for a file that is missing or no ledger."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"{path} is not there; is {path.parent} a run directory, and has the run begun?")
        self._path = path
        try:
            self._db = self._open()
        except (sqlite3.Error, FlowError) as error:
            raise self._no_ledger(error) from error
        if damage := torn(path):
            self._db.close()
            raise ConfigError(
                f"the log of ledger {path} is damaged: {damage}; nothing was changed: flowrt resume {path.parent} goes "
                "on if its newest checkpoint needs nothing of that"
            )

    def _open(self) -> sqlite3.Connection:
        database = open_to_read(self._path)
        try:
            database.execute("SELECT epoch, prompt, state, step, reason, at_s FROM prompts LIMIT 1").fetchone()
            database.execute("SELECT id, epoch, prompt, state, step, reason, at_s FROM events LIMIT 1").fetchone()
            return entered(database)
        except (sqlite3.Error, FlowError):
            database.close()
            raise

    def __enter__(self) -> "LedgerReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._db.close()

    def states(self) -> dict[str, int]:
        """How many prompts are in which state; those that were never offered are in none."""
        return dict(self.read("SELECT state, COUNT(*) FROM prompts GROUP BY state"))

    def reasons(self) -> dict[str, int]:
        """How many prompts were dropped for which reason."""
        return dict(self.read("SELECT reason, COUNT(*) FROM prompts WHERE state = 'dropped' GROUP BY reason"))

    def last_step(self) -> int | None:
        """The last step that has trained something; None before the first."""
        [(step,)] = self.read("SELECT MAX(step) FROM prompts WHERE state = 'trained'")
        return None if step is None else int(step)

    def present(self, prompt: int) -> dict[int, str]:
        """The state of a prompt in each epoch in which it was offered."""
        return dict(self.read("SELECT epoch, state FROM prompts WHERE prompt = ? ORDER BY epoch", prompt))

    def life(self, prompt: int, epoch: int | None) -> list[Moment]:
        """All that happened to a prompt, in one epoch or in all, in order."""
        starts = self._starts()
        moments = []
        for number, at_s, of_epoch, state, step, reason in self.read(
            "SELECT id, at_s, epoch, state, step, reason FROM events WHERE prompt = ? ORDER BY epoch, id", prompt
        ):
            if epoch in (None, of_epoch):
                life = max((at for at, (after, _) in enumerate(starts) if number > after), default=0)
                start_s = starts[life][1]
                moments.append(Moment(of_epoch, life, at_s - start_s, state, step, reason))
        return moments

    def _starts(self) -> list[tuple[int, float]]:
        """After which event each life began, and when by its own clock."""
        if self.read("SELECT 1 FROM sqlite_master WHERE name = 'lives'"):
            lives = self.read("SELECT after_event, at_s FROM lives ORDER BY rowid")
            if lives:
                return [(int(after), float(at_s)) for after, at_s in lives]
        [(first_s,)] = self.read("SELECT COALESCE(MIN(at_s), 0) FROM events")
        return [(0, float(first_s))]

    def read(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        """Rows of any query. Raises ConfigError where this is no ledger."""
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._no_ledger(error) from error

    def _no_ledger(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._path} is no ledger of a flowrt run, or is damaged: {error}; nothing was changed: restore it from "
            "a copy"
        )
