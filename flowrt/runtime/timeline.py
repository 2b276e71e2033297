"""Timeline of a run: spans of work, recorded by the worker that does the work.

A span is (kind, start, end) in seconds of the monotonic clock, which all processes of one host share. Adjacent spans of
one kind are merged, so that a worker that decodes a thousand tokens reports one line.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flowrt.runtime.clock import Clock

NONFINITE = "nonfinite"
"""Field of a line of metrics.jsonl with the names of the metrics that are NaN or infinite in that step."""
MERGE_GAP_S = 0.005
MAX_INTEGER_BITS = 64
"""A larger integer in a file of JSON lines is not a measurement, and cannot be converted to float."""


class Span(NamedTuple):
    """An interval of work of one kind."""

    kind: str
    start_s: float
    end_s: float


class Timeline:
    """Collects the spans of one worker until they are drained into a report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[Span] = []

    @contextmanager
    def busy(self, kind: str) -> Iterator[None]:
        """Record the time spent in the block under ``kind``."""
        start_s = self._clock.now()
        try:
            yield
        finally:
            self.add(Span(kind, start_s, self._clock.now()))

    def add(self, span: Span) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.kind == span.kind and span.start_s - last.end_s < MERGE_GAP_S:
            self._spans[-1] = Span(span.kind, last.start_s, span.end_s)
        else:
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """Return the spans recorded since the last call."""
        spans, self._spans = self._spans, []
        return spans


def busy_fraction(spans: list[Span], start_s: float, end_s: float) -> float:
    """Share of [start, end] covered by the union of the spans; 0 for an empty window."""
    if end_s <= start_s:
        return 0.0
    covered_s, reached_s = 0.0, start_s
    for span in sorted(spans, key=lambda span: span.start_s):
        begin_s, finish_s = max(span.start_s, reached_s), min(span.end_s, end_s)
        if finish_s > begin_s:
            covered_s += finish_s - begin_s
            reached_s = finish_s
    return covered_s / (end_s - start_s)


def read_lines(
    path: Path, is_whole: Callable[[dict[str, Any]], bool], start_byte: int = 0
) -> tuple[list[dict[str, Any]], int]:
    """Read the objects of a file of JSON lines from ``start_byte`` on.

    Returns the objects that ``is_whole`` accepts, and the number of damaged lines: all others. Raises OSError if the
    file cannot be read.
    """
    found: list[dict[str, Any]] = []
    damaged = 0
    with path.open("rb") as file:
        file.seek(start_byte)
        for data in file:
            try:
                line = json.loads(data)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and is_whole(line):
                found.append(line)
            else:
                damaged += 1
    return found, damaged


def is_span(line: dict[str, Any]) -> bool:
    """Whether this is a line of timeline.jsonl."""
    words, times = ("worker", "role", "kind"), ("start_s", "end_s")
    return all(isinstance(line.get(name), str) for name in words) and all(_is_number(line.get(name)) for name in times)


def is_step(line: dict[str, Any]) -> bool:
    """Whether this is a line of metrics.jsonl: numbers, with all those that the summary adds up, and `NONFINITE`."""
    counts = ("step", "samples", "tokens", "staleness_max")
    rates = ("wall_s", "samples_per_s", "staleness_mean")
    names = line.get(NONFINITE, [])
    numbers = (value for name, value in line.items() if name != NONFINITE)
    return (
        all(type(line.get(name)) is int for name in counts)
        and all(_is_number(value) for value in (*(line.get(name) for name in rates), *numbers))
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
    )


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= MAX_INTEGER_BITS
    return isinstance(value, float) and math.isfinite(value)
