"""Event log of a run: events.jsonl, one line for each event that a user would ask about.

The file has at most 10,000 lines: beyond that its older half is thinned, the most frequent kinds first. It is kept over
resumes and restarts of the controller. After a failed write, one warning is logged and nothing more is written.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flowrt.controller.events import EventKind
from flowrt.runtime.run_lines import LineWriter

log = logging.getLogger(__name__)
EVENTS = "events.jsonl"
END_TEXT = "the run ends: "
"""Start of the text of kind "ended", before the reason."""
MAX_EVENTS = 10_000
MAX_TEXT_CHARS = 2_000
KEPT_KINDS: frozenset[str] = frozenset(("started", "resumed", "controller_restarted", "rolled_back", "ended"))
"""Kinds that are never thinned: the meaning of other lines depends on them."""
Value = int | float | str | None


class EventLog:
    """Writer of events.jsonl. Each event is written at once, so no event is lost when the controller is killed."""

    def __init__(
        self,
        run_dir: Path,
        start_s: float,
        term: int = 1,
        unix_time: Callable[[], float] = time.time,
        max_events: int = MAX_EVENTS,
    ) -> None:
        """Open the file, or that of an earlier controller of the run.

        Args:
            run_dir: the run directory.
            start_s: start of the run on the controller's clock, over all its resumes: zero of ``wall_s``.
            term: the number of this controller of the run.
            unix_time: seconds since 1970.
            max_events: number of lines beyond which the older half is thinned.
        """
        self._path = run_dir / EVENTS
        self._start_s = start_s
        self._term = term
        self._unix_time = unix_time
        self._max = max_events
        self._lines = 0
        self._file: LineWriter | None = None
        try:
            self._file = LineWriter(self._path)
            self._lines = len(self._file.lines())
        except OSError as error:
            self._fail(error)

    def add(
        self, kind: EventKind, text: str, step: int, now: float, worker: str | None = None, **more: Value
    ) -> dict[str, Value]:
        """Append an event; returns its line as an object, even if it could not be written.

        Args:
            kind: what has happened.
            text: one plain sentence about it, cut to `MAX_TEXT_CHARS`.
            step: the step in training.
            now: seconds on the controller's clock.
            worker: the worker that it happened to, if any.
            more: further fields of the line; NaN and infinity are written as null.
        """
        line: dict[str, Value] = {
            "wall_s": round(now - self._start_s, 4),
            "unix_s": round(self._unix_time(), 3),
            "term": self._term,
            "step": step,
            "kind": kind,
            "text": text[:MAX_TEXT_CHARS],
        }
        if worker is not None:
            line["worker"] = worker
        line |= {name: _finite(value) for name, value in more.items() if name not in line}
        if self._file is not None:
            self._append(self._file, line)
        return line

    def close(self) -> None:
        """Close the file; events that are added later are not written."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, file: LineWriter, line: Mapping[str, Value]) -> None:
        file.add(line)
        self._lines += 1
        if self._lines > self._max:
            self._thin(file)
        if file.error is not None:
            self._fail(file.error)

    def _thin(self, file: LineWriter) -> None:
        lines = [line for line in file.lines() if line]
        half = len(lines) // 2
        kept = [*_thinned(lines[:half], half // 2), *lines[half:]]
        file.replace(kept)
        self._lines = len(kept)

    def _fail(self, error: OSError) -> None:
        self.close()
        log.warning("%s cannot be written: %s; the run goes on without it", self._path, error.strerror)


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not -float("inf") < value < float("inf") else value


def _thinned(lines: Sequence[bytes], wanted: int) -> list[bytes]:
    """At most ``wanted`` of the lines, in order, or more if no kind can be thinned further.

    Repeatedly removes every second line of the kind that is the most frequent at that time.
    """
    kinds = [_kind(line) for line in lines]
    kept = dict(enumerate(kinds))
    while len(kept) > wanted:
        counts = Counter(kind for kind in kept.values() if kind not in KEPT_KINDS)
        kind, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if count < 2:
            break
        for place, at in enumerate([at for at, of in kept.items() if of == kind]):
            if place % 2:
                del kept[at]
    return [lines[at] for at in kept]


def _kind(line: bytes) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    return str(event.get("kind", "")) if isinstance(event, Mapping) else ""
