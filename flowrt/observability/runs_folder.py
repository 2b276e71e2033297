"""A folder that holds runs: for each run its state, progress and last numbers, from a few bytes of its files.

Directories that hold no run are left out; a damaged file of a run leaves its numbers out. Nothing is changed. A run
that has ended costs one stat of a file until it is resumed.

A reader of a folder is used by one thread at a time.
"""

import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from flowrt.controller.storage.integrity import LEDGER
from flowrt.errors import ConfigError
from flowrt.observability.run_reader import (
    EVENTS,
    METRICS,
    SUMMARY,
    TIMELINE,
    Outcome,
    is_locked,
    locked_files,
    outcome_of,
)
from flowrt.observability.tails import parse_line
from flowrt.recipes.run_dir import CONFIG, read_address
from flowrt.runtime.addresses import is_loopback, parse_address

State = Literal["running", Outcome]
KILLED = "it ended without a summary: it was killed, or its machine went down"
NOT_BEGUN = "it ended before its controller began: see its logs"
RECENT_S = 120.0
"""A run that no process of this host has locked counts as running if it has written something in this many seconds."""
END_BYTES = 16 << 10
"""Bytes that are read from the beginning or the end of a file."""
REWARD_STEPS = 10
"""Maximum number of last steps in the mean reward."""
_STEPS = re.compile(rb"^steps *= *(\d{1,15})\s*$", re.MULTILINE)
_RECIPE = re.compile(rb'^recipe *= *"([^"\n]*)"', re.MULTILINE)
_TABLE = re.compile(rb"^\[", re.MULTILINE)
Found = TypeVar("Found")
FileVersion = tuple[int, int, int]
"""Inode, size and time of the last change; differs when the content does."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """What is known of a run without opening it."""

    name: str
    state: State
    reason: str
    """How it ended; empty while it runs, and for a run that is complete."""
    recipe: str
    done: int
    """Number of steps that have ended."""
    steps: int
    """Number of steps of its configuration; 0 if unknown."""
    reward: float | None
    """Mean over the last steps, at most 10."""
    samples_per_s: float | None
    """Of the last step; of the whole run once it has ended."""
    started_unix_s: float
    """Seconds since 1970."""


class RunsFolder:
    """Reads a folder of runs, repeatedly while runs go on and new ones appear."""

    def __init__(self, folder: Path) -> None:
        """Read the folder. Raises ConfigError if it holds no run."""
        self.folder = folder
        self._runs: dict[str, _RunFiles] = {}
        if not self.scan():
            raise ConfigError(
                f"{folder} is not a run directory, and none of its directories is one: a run has {CONFIG}, {METRICS} "
                f"or {LEDGER}"
            )

    def scan(self) -> list[RunLine]:
        """The runs that are there now, the newest first; those of before if the folder cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if _is_name(entry.name)]
        except OSError:
            names = list(self._runs)
        runs = {name: self._runs.get(name) or _RunFiles(self.folder / name) for name in names}
        locks, now = locked_files(), time.time()
        lines = {name: run.line(locks, now) for name, run in runs.items()}
        self._runs = {name: runs[name] for name, line in lines.items() if line is not None}
        return sorted(filter(None, lines.values()), key=lambda line: (-line.started_unix_s, line.name))

    def run_dir(self, name: str) -> Path | None:
        """The directory of the run with this name; None if the last scan has not found it."""
        return self.folder / name if name in self._runs else None


@dataclass(frozen=True, slots=True)
class _Progress:
    done: int
    reward: float | None
    samples_per_s: float | None


class _RunFiles:
    """The files of one run, each read again only after a change."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[str, tuple[FileVersion, Any]] = {}
        self._lock_inode: int | None = None
        self._started_unix_s = 0.0
        self._ended: tuple[FileVersion, RunLine] | None = None

    def line(self, locks: frozenset[int] | None, now: float) -> RunLine | None:
        """What is known of the run; None if the directory holds none.

        Args:
            locks: inodes of the files that processes of this host have locked; None: unknown.
            now: seconds since 1970.
        """
        summary_version = _version(self._run_dir / SUMMARY)
        if self._ended is not None and self._ended[0] == summary_version:
            return self._ended[1]
        config, progress = self._read(CONFIG, _read_config), self._read(METRICS, _read_progress)
        summary = self._read(SUMMARY, _read_summary)
        if config is None and progress is None and summary is None and _version(self._run_dir / LEDGER) is None:
            return None
        # As on the page of the run: one with a summary has ended; a resumed run deletes it.
        is_running = summary_version is None and (self._is_locked(locks) or self._is_written_elsewhere(now))
        state, reason = _state(summary_version is not None, summary, is_running=is_running)
        if reason == KILLED and not any(_version(self._run_dir / name) for name in (EVENTS, METRICS, LEDGER)):
            reason = NOT_BEGUN
        progress = progress or _Progress(0, None, None)
        whole_rate = None if summary is None else _finite(summary.get("samples_per_s"))
        recipe, steps = config or ("", 0)
        line = RunLine(
            name=self._run_dir.name,
            state=state,
            reason=reason,
            recipe=recipe,
            done=progress.done,
            steps=steps,
            reward=progress.reward,
            samples_per_s=progress.samples_per_s if whole_rate is None or not progress.done else whole_rate,
            started_unix_s=self._started(),
        )
        self._ended = None if summary_version is None else (summary_version, line)
        return line

    def _read(self, name: str, read: Callable[[Path], Found | None]) -> Found | None:
        """What ``read`` finds in a file; None if that is missing, no file, or damaged."""
        path = self._run_dir / name
        version = _version(path)
        if version is None:
            self._known.pop(name, None)
            return None
        known = self._known.get(name)
        if known is None or known[0] != version:
            try:
                content = read(path)
            except (OSError, ValueError, RecursionError):
                content = None
            known = self._known[name] = version, content
        value: Found | None = known[1]
        return value

    def _is_locked(self, locks: frozenset[int] | None) -> bool:
        if locks is None:
            return is_locked(self._run_dir)
        if self._lock_inode is None:
            version = _version(self._run_dir / ".lock")
            self._lock_inode = None if version is None else version[0]
        return self._lock_inode in locks

    def _is_written_elsewhere(self, now: float) -> bool:
        """Whether a controller on another host, or a launcher that prepares the run, has written a file recently."""
        try:
            if is_loopback(parse_address(read_address(self._run_dir)).host):
                return False  # it ran on this host, and its lock is gone
        except (OSError, ConfigError):
            pass
        files = [self._run_dir / name for name in (CONFIG, METRICS, EVENTS)]
        files += [path for name in ("recording", TIMELINE) for path in _files(self._run_dir / name)]
        return any(now - version[2] / 1e9 < RECENT_S for path in files if (version := _version(path)) is not None)

    def _started(self) -> float:
        """When the run was started, by its first event; before that, when its configuration was written."""
        if not self._started_unix_s:
            first = self._read(EVENTS, _read_first_time)
            if first is None:
                versions = (_version(self._run_dir / name) for name in (CONFIG, METRICS, SUMMARY, LEDGER))
                return min((version[2] / 1e9 for version in versions if version is not None), default=0.0)
            self._started_unix_s = first
        return self._started_unix_s


def _state(has_summary: bool, summary: dict[str, Any] | None, *, is_running: bool) -> tuple[State, str]:
    """The state of a run, and how it ended."""
    if is_running:
        return "running", ""
    if summary is None:
        return "failed", f"{SUMMARY} cannot be read" if has_summary else KILLED
    state = outcome_of(summary["exit_code"])
    return state, "" if state == "complete" else str(summary.get("reason", ""))[:500]


def _read_config(path: Path) -> tuple[str, int] | None:
    """Recipe and number of steps; None if this is the configuration of something else."""
    head = _first_bytes(path)
    table = _TABLE.search(head)
    head = head[: table.start()] if table else head
    recipe, steps = _RECIPE.search(head), _STEPS.search(head)
    return None if recipe is None else (recipe[1].decode(errors="replace"), int(steps[1]) if steps else 0)


def _read_progress(path: Path) -> _Progress | None:
    """The last steps of metrics.jsonl; None if the file has lines, and none of them is a step."""
    texts = _last_bytes(path).split(b"\n")
    lines = [line for text in texts if (line := parse_line(text)) is not None and type(line.get("step")) is int]
    if not lines:
        return None if any(texts) else _Progress(0, None, None)
    rewards = [_finite(line.get("reward")) for line in lines[-REWARD_STEPS:]]
    known = [reward for reward in rewards if reward is not None]
    return _Progress(
        done=max(lines[-1]["step"] + 1, 0),
        reward=sum(known) / len(known) if known else None,
        samples_per_s=_finite(lines[-1].get("samples_per_s")),
    )


def _read_summary(path: Path) -> dict[str, Any] | None:
    summary: object = json.loads(path.read_bytes())
    return summary if isinstance(summary, dict) and type(summary.get("exit_code")) is int else None


def _read_first_time(path: Path) -> float | None:
    line = parse_line(_first_bytes(path).split(b"\n")[0])
    return None if line is None else _finite(line.get("unix_s"))


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(END_BYTES)


def _last_bytes(path: Path) -> bytes:
    """The last lines of a file; the first of them may be cut."""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, 2) - END_BYTES, 0))
        return file.read(END_BYTES)


def _files(directory: Path) -> Iterable[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return ()


def _version(path: Path) -> FileVersion | None:
    """The version of a file; None if there is none that can be read without waiting (a pipe, a directory)."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _is_name(name: str) -> bool:
    """Whether a directory of this name can be a run: not a hidden one, nor one whose name is no text."""
    return not name.startswith(".") and name.encode(errors="ignore").decode() == name


def _finite(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]
