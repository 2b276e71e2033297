"""The sweep: exactly one kind of time for every instant of a worker.

Reported spans and recorded waits overlap, because a worker pulls while it generates. An instant counts as the first of
these that covers it: away, wait for another rank, update, save, busy, wait recorded by the core, wait for tensors of
granted samples or for a larger batch. An instant that none covers counts as `other`.

Merged spans of work contain gaps, of which only the total length is known. Gaps count as waiting for as long as waits
cover the span, and as `other` beyond that.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from flowrt.controller.attribution.causes import Interval, Kind, WaitInterval
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
Seconds = dict[Key, float]


class _Item(NamedTuple):
    start_s: float
    end_s: float
    place: int
    number: int


def kind_of_span(kind: str) -> Kind:
    """The kind of time that a span of this kind counts as; an unknown kind counts as busy."""
    return KIND_OF_SPAN.get(kind, Kind.BUSY)


def _place(kind: str) -> int:
    """The place of a span in the order."""
    return RANK_WAIT if kind == RANKS else PLACES[kind_of_span(kind)]


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
    """The part of a span of work that no interval with a lower place covers."""

    waits: dict[int, float]  # seconds of it by wait
    length_s: float = 0.0


def _divide(covered: _Covered, share: float, waits: list[WaitInterval], found: Seconds) -> None:
    """Add the work, waiting and `other` of a span of work to ``found``."""
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
