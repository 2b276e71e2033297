"""Rows of the timeline, one a worker (in the API: lanes): spans and waits in a window, from timeline/NNNN.jsonl.gz.

Up to `MAX_SPANS` spans and waits are given one by one; of more, a matrix has the busy share of the workers over time.
"""

import base64
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flowrt.observability.tails import GzipTail

MAX_SPANS = 20_000
MAX_LANES = 64
MAX_ROWS = 256
"""Maximum number of rows of the matrix, and of lanes with single spans."""
COLUMNS = 512
DIGITS = 4
"""Decimals of the times of a span in seconds: 0.1 ms."""
FULL = 255
"""Value of a cell of the matrix that is busy all the time."""
_NUMBER = re.compile(r"(\d+)")
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class _Line(msgspec.Struct):
    """A line of a segment; work has a kind, a wait has a cause and a root."""

    worker: str
    start_s: float
    end_s: float
    role: str = ""
    kind: str = ""
    wait: str = ""
    root: str = ""
    rows: float | None = None


class _Names:
    """Consecutive numbers of names, in order of first occurrence."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._number: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self._number.get(name)
        if number is None:
            number = self._number[name] = len(self.names)
            self.names.append(name)
        return number


class _Table:
    """The spans or the waits of a segment, by column."""

    def __init__(self) -> None:
        self.lane, self.what, self.root = array("i"), array("i"), array("i")
        self.start_s, self.end_s, self.rows = array("d"), array("d"), array("d")

    def add(self, lane: int, what: int, root: int, line: _Line) -> None:
        self.lane.append(lane)
        self.what.append(what)
        self.root.append(root)
        self.start_s.append(line.start_s)
        self.end_s.append(line.end_s)
        self.rows.append(float("nan") if line.rows is None else line.rows)

    def within(self, t0: float, t1: float) -> list[npt.NDArray[Any]]:
        """Copies of the columns for entries that overlap [t0, t1]: lane, what, root, start, end, rows."""
        start_s, end_s = np.frombuffer(self.start_s), np.frombuffer(self.end_s)
        chosen = np.flatnonzero((end_s >= t0) & (start_s <= t1))
        numbers = (np.frombuffer(column, np.int32)[chosen] for column in (self.lane, self.what, self.root))
        return [*numbers, start_s[chosen], end_s[chosen], np.frombuffer(self.rows)[chosen]]

    def bounds(self) -> tuple[float, float]:
        return min(self.start_s, default=float("inf")), max(self.end_s, default=float("-inf"))


class _Segment:
    """A file of the timeline, and what was read of it."""

    def __init__(self, path: Path) -> None:
        self.tail = GzipTail(path)
        self.clear()

    def clear(self) -> None:
        self.spans, self.waits = _Table(), _Table()
        self.damaged = 0
        self.first_s, self.last_s = float("inf"), float("-inf")


class TimelineRows:
    """The timeline of a run, read incrementally."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segments: dict[str, _Segment] = {}
        self._workers, self._kinds, self._causes, self._roots = _Names(), _Names(), _Names(), _Names()
        self._role: dict[int, str] = {}
        self._decode = msgspec.json.Decoder(_Line).decode

    @property
    def state(self) -> str:
        """Either "present" or "missing", or a description of what is damaged."""
        problems = [segment.tail.problem for segment in self._segments.values() if segment.tail.problem]
        problems += [
            f"{name} has {segment.damaged} damaged lines, left out"
            for name, segment in self._segments.items()
            if segment.damaged
        ]
        return "; ".join(problems[:3]) or ("present" if self._segments else "missing")

    def read_new(self) -> None:
        """Read what was appended to the files since the last call."""
        names = sorted(path.name for path in self._directory.glob("*.jsonl.gz"))
        self._segments = {name: self._segments.get(name) or _Segment(self._directory / name) for name in names}
        for segment in self._segments.values():
            new = segment.tail.read_new()
            if new.is_replaced:
                segment.clear()
            self._add(segment, new.lines)

    def _add(self, segment: _Segment, lines: Iterable[bytes]) -> None:
        for text in lines:
            try:
                line = self._decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                segment.damaged += bool(text.strip())
                continue
            if not line.start_s <= line.end_s:
                segment.damaged += 1
                continue
            lane = self._workers.number(line.worker)
            self._role[lane] = line.role
            if line.wait:
                cause, root = self._causes.number(line.wait), self._roots.number(line.root)
                segment.waits.add(lane, cause, root, line)
            else:
                segment.spans.add(lane, self._kinds.number(line.kind), -1, line)
            segment.first_s, segment.last_s = min(segment.first_s, line.start_s), max(segment.last_s, line.end_s)

    def window(
        self, t0: float | None = None, t1: float | None = None, *, rows: int = MAX_LANES, first: int | None = None
    ) -> dict[str, Any]:
        """Spans and waits of the workers from ``t0`` to ``t1``.

        Args:
            t0: seconds of the run clock; None: from the start.
            t1: seconds of the run clock; None: to the end.
            rows: maximum number of lanes with single spans (1 to 256); for more lanes there is a matrix.
            first: show only ``rows`` lanes from this index on, in the order of all lanes; None: show all lanes.

        Returns:
            The answer of ``api/timeline``. ``first_s`` and ``last_s`` are the bounds of all that was recorded, ``all``
                the number of all lanes, and ``left_out`` the number of spans and waits for which there is a matrix
                instead.
        """
        first_s = min((segment.first_s for segment in self._segments.values()), default=0.0)
        last_s = max((segment.last_s for segment in self._segments.values()), default=0.0)
        if first_s > last_s:  # no segment has a span
            first_s = last_s = 0.0
        t0 = first_s if t0 is None else t0
        t1 = max(last_s if t1 is None else t1, t0)
        rows = min(max(rows, 1), MAX_ROWS)
        order = self._order()
        shown = order if first is None else order[first : first + rows]
        place = np.full(len(order), -1, np.int64)
        place[shown] = np.arange(len(shown))
        segments = [segment for segment in self._segments.values() if segment.first_s <= t1 and segment.last_s >= t0]
        spans = self._gather([segment.spans for segment in segments], place, t0, t1)
        waits = self._gather([segment.waits for segment in segments], place, t0, t1)
        count = len(spans[0]) + len(waits[0])
        is_whole = count <= MAX_SPANS and len(shown) <= rows
        names = self._workers.names
        return {
            "t0": t0,
            "t1": t1,
            "first_s": first_s,
            "last_s": last_s,
            "all": len(order),
            "lanes": [{"worker": names[at], "role": self._role[at]} for at in shown],
            "kinds": self._kinds.names,
            "causes": self._causes.names,
            "roots": self._roots.names,
            "spans": _span_rows(spans) if is_whole else [],
            "waits": _wait_rows(waits) if is_whole else [],
            "matrix": None if is_whole else _matrix(spans, len(shown), t0, t1),
            "left_out": 0 if is_whole else count,
            **({} if first is None else {"first": first}),
        }

    def _order(self) -> list[int]:
        """Indices of the lanes by role and name; numbers in names are compared by value."""
        names = self._workers.names
        return sorted(range(len(names)), key=lambda at: (self._role[at], _natural(names[at])))

    @staticmethod
    def _gather(tables: Sequence[_Table], place: Integers, t0: float, t1: float) -> list[npt.NDArray[Any]]:
        """The columns of all tables within [t0, t1], of lanes with ``place`` >= 0, which replaces their number."""
        windows = [table.within(t0, t1) for table in tables] or [_Table().within(t0, t1)]
        columns = [np.concatenate(parts) for parts in zip(*windows, strict=True)]
        columns[0] = place[columns[0]] if len(columns[0]) else columns[0].astype(np.int64)
        chosen = columns[0] >= 0
        return [column[chosen] for column in columns]


def _natural(name: str) -> tuple[str | int, ...]:
    """A sort key that puts worker-2 before worker-10."""
    return tuple(int(part) if part.isdecimal() else part for part in _NUMBER.split(name))


def _span_rows(columns: Sequence[npt.NDArray[Any]]) -> list[list[float | None]]:
    lane, what, _, start_s, end_s, rows = columns
    occupied = [None if value != value else round(value, 2) for value in rows.tolist()]
    times = np.round(start_s, DIGITS).tolist(), np.round(end_s, DIGITS).tolist()
    return [list(row) for row in zip(lane.tolist(), what.tolist(), *times, occupied, strict=True)]


def _wait_rows(columns: Sequence[npt.NDArray[Any]]) -> list[list[float]]:
    lane, what, root, start_s, end_s, _ = columns
    times = np.round(start_s, DIGITS).tolist(), np.round(end_s, DIGITS).tolist()
    return [list(row) for row in zip(lane.tolist(), what.tolist(), root.tolist(), *times, strict=True)]


def _matrix(spans: Sequence[npt.NDArray[Any]], lanes: int, t0: float, t1: float) -> dict[str, Any]:
    """The busy share of the lanes over time, a byte per cell: at most 256 rows of lanes, and 512 intervals of time."""
    rows = max(min(lanes, MAX_ROWS), 1)
    width_s = max((t1 - t0) / COLUMNS, 1e-9)
    row = spans[0] * rows // max(lanes, 1)
    first = np.clip((spans[3] - t0) / width_s, 0, COLUMNS)
    last = np.clip((spans[4] - t0) / width_s, 0, COLUMNS)
    size = rows * (COLUMNS + 1)
    begin, end = first.astype(np.int64), last.astype(np.int64)
    at_begin, at_end = row * (COLUMNS + 1) + begin, row * (COLUMNS + 1) + end
    # A span adds 1 from its first column on and subtracts 1 from its last one on, corrected by the parts covered.
    whole = np.bincount(at_begin, minlength=size) - np.bincount(at_end, minlength=size)
    parts = np.bincount(at_end, last - end, size) - np.bincount(at_begin, first - begin, size)
    busy = np.cumsum(whole.reshape(rows, -1), axis=1) + parts.reshape(rows, -1)
    in_row = np.bincount(np.arange(lanes) * rows // max(lanes, 1), minlength=rows).reshape(rows, 1)
    cells = np.clip(busy[:, :COLUMNS] / np.maximum(in_row, 1) * FULL, 0, FULL).round().astype(np.uint8)
    return {"columns": COLUMNS, "rows": rows, "base64": base64.b64encode(cells.tobytes()).decode()}
