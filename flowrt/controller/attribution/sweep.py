"""The sweep: exactly one kind of time for every instant of a worker.

Reported spans and recorded waits overlap, because a worker pulls while it generates. An instant counts as the first of
these that covers it: away, wait for another rank, update, save, busy, wait recorded by the core, wait for tensors of
granted samples or for a larger batch. An instant that none covers counts as `other`.

Merged spans of work contain gaps, of which only the total length is known. Gaps count as waiting for as long as waits
cover the span, and as `other` beyond that.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowrt.controller.attribution.causes import Cause, Interval, Kind, WaitInterval
from flowrt.ids import FETCH, GATHER, RANKS, STOPPED

KIND_OF_SPAN = {
    "load": Kind.AWAY,
    STOPPED: Kind.AWAY,
    "swap": Kind.UPDATE,
    "snapshot": Kind.UPDATE,
    "save": Kind.SAVE,
    FETCH: Kind.SAMPLES,
    GATHER: Kind.SAMPLES,
    RANKS: Kind.SAMPLES,
}
UNDIVIDED = {0: Kind.AWAY, 2: Kind.UPDATE, 3: Kind.SAVE}
"""Kinds that take an instant as a whole and have no root, by their place in the order."""
RANK_WAIT, BUSY, WAIT, FETCHING = 1, 4, 5, 6
"""The other places in the order. Of all intervals that cover an instant, the one with the lowest place counts."""
PLACES = {**{kind: place for place, kind in UNDIVIDED.items()}, Kind.BUSY: BUSY, Kind.SAMPLES: FETCHING}

Key = tuple[str, str]
"""A kind of time, and the root of a wait; the root of all other kinds is empty."""
OTHER_KEY = (Kind.OTHER.value, "")
BUSY_KEY = (Kind.BUSY.value, "")
UNDIVIDED_KEYS = {place: (kind.value, "") for place, kind in UNDIVIDED.items()}
PLACE_OF_SPAN = {kind: RANK_WAIT if kind == RANKS else PLACES[of] for kind, of in KIND_OF_SPAN.items()}
"""By kind of a span, its place in the order; a span of another kind is work."""
Seconds = dict[Key, float]
_Item = tuple[float, float, int, int]
"""Start, end, place in the order, and index of a span or wait."""
CAUSES = {cause: cause.value for cause in Cause}


def sweep(spans: Iterable[Interval], waits: Iterable[WaitInterval], start_s: float, end_s: float) -> Seconds:
    """Attribute the seconds from ``start_s`` to ``end_s`` of one worker; they add up to ``end_s - start_s``.

    Args:
        spans: spans that the worker reported, in any order; they may overlap, or lie outside the window.
        waits: waits of the worker that the core recorded, likewise.
        start_s: start of the window.
        end_s: end of the window; if it is not after the start, the result is empty.

    Returns:
        Seconds by kind of time and root; only values above zero.
    """
    seconds_of: Seconds = defaultdict(float)
    if end_s <= start_s:
        return {}
    all_spans, all_waits = list(spans), list(waits)
    items = _items(all_spans, all_waits, start_s, end_s)
    work: dict[int, _Covered] = {}
    present: list[_Item] = []
    following, begin_s = 0, start_s
    for finish_s in sorted({end_s, *[item[0] for item in items], *[item[1] for item in items]} - {start_s}):
        present = [item for item in present if item[1] > begin_s]
        while following < len(items) and items[following][0] <= begin_s:
            present.append(items[following])
            following += 1
        length_s = finish_s - begin_s
        begin_s = finish_s
        if not present:
            seconds_of[OTHER_KEY] += length_s
            continue
        place = present[0][2] if len(present) == 1 else min([item[2] for item in present])
        if place in UNDIVIDED_KEYS:
            seconds_of[UNDIVIDED_KEYS[place]] += length_s
        elif place == BUSY:
            chosen = max([item[3] for item in present if item[2] == BUSY], key=lambda index: _share(all_spans[index]))
            covered = work.get(chosen) or work.setdefault(chosen, _Covered())
            waiting = [item[3] for item in present if item[2] == WAIT] if len(present) > 1 else []
            covered.add(length_s, min(waiting, default=-1))
        else:
            first = min([item[3] for item in present if item[2] == place])
            key = _key(all_waits[first]) if place == WAIT else (Kind.SAMPLES.value, all_spans[first].root)
            seconds_of[key] += length_s
    for index, covered in work.items():
        _divide(covered, _share(all_spans[index]), all_waits, seconds_of)
    return {key: seconds for key, seconds in seconds_of.items() if seconds > 0}


def _items(spans: list[Interval], waits: list[WaitInterval], start_s: float, end_s: float) -> list[_Item]:
    """The parts of all intervals that are in the window, by start."""
    items = []
    for number, span in enumerate(spans):
        begin_s, finish_s = max(span.start_s, start_s), min(span.end_s, end_s)
        if finish_s > begin_s:
            items.append((begin_s, finish_s, PLACE_OF_SPAN.get(span.kind, BUSY), number))
    for number, wait in enumerate(waits):
        begin_s, finish_s = max(wait.start_s, start_s), min(wait.end_s, end_s)
        if finish_s > begin_s:
            items.append((begin_s, finish_s, WAIT, number))
    return sorted(items)


@dataclass(slots=True)
class _Covered:
    """The part of a span of work that no interval with a lower place covers."""

    length_s: float = 0.0
    waits: dict[int, float] = field(default_factory=dict)  # seconds of it by wait

    def add(self, length_s: float, wait: int) -> None:
        """Add an interval that this wait covers too; -1: none."""
        self.length_s += length_s
        if wait >= 0:
            self.waits[wait] = self.waits.get(wait, 0.0) + length_s


def _divide(covered: _Covered, share: float, waits: list[WaitInterval], seconds_of: Seconds) -> None:
    """Add the work, waiting and `other` of a span of work to ``found``."""
    gap_s = covered.length_s * (1.0 - share)
    seconds_of[BUSY_KEY] += covered.length_s - gap_s
    waited_s = sum(covered.waits.values())
    taken_s = min(gap_s, waited_s)
    seconds_of[OTHER_KEY] += gap_s - taken_s
    for index, seconds in covered.waits.items():
        seconds_of[_key(waits[index])] += taken_s * seconds / waited_s


def _key(wait: WaitInterval) -> Key:
    return CAUSES[wait.cause], wait.root


def _share(span: Interval) -> float:
    """The share of a span that was work."""
    length_s = span.end_s - span.start_s
    return min(max(span.worked_s / length_s, 0.0), 1.0) if length_s > 0 else 1.0
