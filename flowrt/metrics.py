"""Who was busy when: spans of work, recorded where the work is done.

A span is (kind, start, end) in seconds of the monotonic clock, which all processes of one host share. Spans of
one kind that touch are merged, so a worker that decodes a thousand tokens reports one line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from flowrt.clock import Clock

MERGE_GAP_S = 0.005


class Span(NamedTuple):
    """One stretch of work of one kind."""

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
        """Return what was recorded since the last call."""
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
