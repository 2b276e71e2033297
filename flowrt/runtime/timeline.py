"""Timeline of a run: spans of work, recorded by the worker that does the work.

A span has a kind, a start and an end in seconds of the monotonic clock, which all processes of one host share. Adjacent
spans of one kind are merged, so that a worker that decodes a thousand tokens reports one span.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from flowrt.runtime.clock import Clock

MERGE_GAP_S = 0.005
MIN_GAP_S = 1e-9


class Span(NamedTuple):
    """An interval of work of one kind."""

    kind: str
    start_s: float
    end_s: float
    worked_s: float = -1.0
    """Seconds of work in the span, without the gaps between merged spans; -1: the span has no gaps."""
    rows: float = -1.0
    """Mean number of occupied rows of the engine during the work; -1: unknown."""
    root: str = ""
    """The worker that a wait is blocked on; empty for work."""

    @property
    def work_s(self) -> float:
        """Seconds of work."""
        return self.end_s - self.start_s if self.worked_s < 0 else self.worked_s


@dataclass(slots=True, eq=False)
class _OpenSpan:
    kind: str
    start_s: float
    rows: float
    root: str


class Timeline:
    """Collects the spans of one worker until they are drained into a report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._last: dict[str, int] = {}  # index of the last span of each kind
        self._open: list[_OpenSpan] = []

    @contextmanager
    def busy(self, kind: str, rows: float = -1.0, root: str = "") -> Iterator[None]:
        """Record the time spent in the block under ``kind``.

        Args:
            kind: kind of the span.
            rows: number of occupied rows of the engine; -1: unknown.
            root: for a wait, the worker that it is blocked on; empty for work.
        """
        span = _OpenSpan(kind, self._clock.now(), rows, root)
        self._open.append(span)
        try:
            yield
        finally:
            self._open.remove(span)
            self.add(Span(kind, span.start_s, self._clock.now(), rows=rows, root=root))

    def add(self, span: Span) -> None:
        """Add a span; it is merged with the last one of its kind if the gap is shorter than `MERGE_GAP_S`."""
        index = self._last.get(span.kind)
        last = None if index is None else self._spans[index]
        if (
            index is not None
            and last is not None
            and (last.rows < 0) == (span.rows < 0)
            and last.root == span.root
            and span.start_s - last.end_s < MERGE_GAP_S
        ):
            self._spans[index] = _merged(last, span)
        else:
            self._last[span.kind] = len(self._spans)
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """Return the spans recorded since the last call, and the part up to now of blocks that have not ended."""
        now = self._clock.now()
        for span in self._open:
            if now > span.start_s:
                self.add(Span(span.kind, span.start_s, now, rows=span.rows, root=span.root))
                span.start_s = now
        spans, self._spans = self._spans, []
        self._last.clear()
        return spans


def _merged(first: Span, second: Span) -> Span:
    worked_s = first.work_s + second.work_s
    rows = first.rows
    if rows >= 0 and worked_s > 0:
        rows = (first.rows * first.work_s + second.rows * second.work_s) / worked_s
    end_s = max(first.end_s, second.end_s)
    has_gap = end_s - first.start_s - worked_s > MIN_GAP_S
    return Span(first.kind, first.start_s, end_s, worked_s if has_gap else -1.0, rows, first.root)


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
