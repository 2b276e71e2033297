"""The sweep: exactly one kind of time for every instant of a worker.

What a worker reports and what the core notes overlap: a worker pulls while it generates. Of all intervals that cover an
instant the first one of this order counts: away, waiting for another rank, update, save, busy, any other wait; an
instant that none covers is `other`.

Spans of work that were merged have gaps, of which only the sum is known. They count as waiting, as far as a wait covers
the span, and as `other` beyond that.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from flowrt.controller.attribution.causes import Interval, Kind, WaitInterval
from flowrt.ids import FETCH, RANKS, STOPPED

KIND_OF_SPAN = {
    "load": Kind.AWAY,
    STOPPED: Kind.AWAY,
    "swap": Kind.UPDATE,
    "snapshot": Kind.UPDATE,
    "save": Kind.SAVE,
    FETCH: Kind.SAMPLES,
    RANKS: Kind.SAMPLES,
}
UNDIVIDED = {0: Kind.AWAY, 2: Kind.UPDATE, 3: Kind.SAVE}
"""Kinds that nothing later in the order divides, by their place in it."""
RANK_WAIT, BUSY, WAIT, FETCHING = 1, 4, 5, 6
"""The other places in the order. An instant counts as what has the lowest place there."""
PLACES = {**{kind: place for place, kind in UNDIVIDED.items()}, Kind.BUSY: BUSY, Kind.SAMPLES: FETCHING}

Key = tuple[str, str]
"""A kind of time, and the root of a wait; the root of all other kinds is empty."""
Seconds = dict[Key, float]


class _Item(NamedTuple):
    start_s: float
    end_s: float
    place: int
    number: int


def kind_of_span(kind: str) -> Kind:
    """What a worker's span counts as; every kind that is not known is work."""
    return KIND_OF_SPAN.get(kind, Kind.BUSY)


def _place(kind: str) -> int:
    """The place of a span in the order."""
    return RANK_WAIT if kind == RANKS else PLACES[kind_of_span(kind)]


def sweep(spans: Iterable[Interval], waits: Iterable[WaitInterval], start_s: float, end_s: float) -> Seconds:
    """Attribute the seconds from ``start_s`` to ``end_s`` of one worker; they add up to ``end_s - start_s``.

    Args:
        spans: what the worker reported, in any order, overlapping or not, of any times.
        waits: what the core noted for it, likewise.
        start_s: start of the window.
        end_s: its end; nothing is attributed if it is not later.

    Returns:
        Seconds by kind of time and root, those above zero only.
    """
    found: Seconds = defaultdict(float)
    if end_s <= start_s:
        return {}
    all_spans, all_waits = list(spans), list(waits)
    items = [
        _Item(max(one.start_s, start_s), min(one.end_s, end_s), _place(one.kind), index)
        for index, one in enumerate(all_spans)
    ]
    items += [
        _Item(max(one.start_s, start_s), min(one.end_s, end_s), WAIT, index) for index, one in enumerate(all_waits)
    ]
    items = sorted(item for item in items if item.end_s > item.start_s)
    times = sorted({start_s, end_s, *(item.start_s for item in items), *(item.end_s for item in items)})
    shares = [_share(one) for one in all_spans]
    work: dict[int, _Covered] = {}
    present: list[_Item] = []
    following = 0
    for begin_s, finish_s in pairwise(times):
        present = [item for item in present if item.end_s > begin_s]
        while following < len(items) and items[following].start_s <= begin_s:
            present.append(items[following])
            following += 1
        length_s = finish_s - begin_s
        place = min((item.place for item in present), default=-1)
        if place < 0:
            found[Kind.OTHER.value, ""] += length_s
        elif place in UNDIVIDED:
            found[UNDIVIDED[place].value, ""] += length_s
        else:
            wait = min((item.number for item in present if item.place == WAIT), default=-1)
            if place in (RANK_WAIT, FETCHING):
                waiting = min(item.number for item in present if item.place == place)
                found[Kind.SAMPLES.value, all_spans[waiting].root] += length_s
                continue
            if place == WAIT:
                found[_key(all_waits[wait])] += length_s
                continue
            chosen = max((item.number for item in present if item.place == BUSY), key=lambda index: shares[index])
            covered = work.setdefault(chosen, _Covered({}))
            work[chosen] = covered._replace(length_s=covered.length_s + length_s)
            if wait >= 0:
                covered.waits[wait] = covered.waits.get(wait, 0.0) + length_s
    for index, covered in work.items():
        _divide(covered, shares[index], all_waits, found)
    return {key: seconds for key, seconds in found.items() if seconds > 0}


class _Covered(NamedTuple):
    """The part of a span of work that no other kind of time precedes."""

    waits: dict[int, float]  # seconds of it by wait
    length_s: float = 0.0


def _divide(covered: _Covered, share: float, waits: list[WaitInterval], found: Seconds) -> None:
    """Divide a span of work into work, waiting and `other`."""
    gap_s = covered.length_s * (1.0 - share)
    found[Kind.BUSY.value, ""] += covered.length_s - gap_s
    waited_s = sum(covered.waits.values())
    taken_s = min(gap_s, waited_s)
    found[Kind.OTHER.value, ""] += gap_s - taken_s
    for index, seconds in covered.waits.items():
        found[_key(waits[index])] += taken_s * seconds / waited_s


def _key(wait: WaitInterval) -> Key:
    return wait.cause.value, wait.root


def _share(span: Interval) -> float:
    """The share of a span that was work."""
    length_s = span.end_s - span.start_s
    return min(max(span.worked_s / length_s, 0.0), 1.0) if length_s > 0 else 1.0
