"""The wait-for graph as plain data: who waits, for what, who is to act; and the knots in it that nobody will untie."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MOST_NAMED = 8
"""Workers of one wait that are named; of more it is said how many."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Somebody waits for something that any of ``turn`` can bring about; nobody in it: there is nobody who could."""

    who: str
    what: str
    turn: tuple[str, ...]
    age_s: float
    limit_s: float
    blocks: bool  # who waits does nothing else meanwhile, and what it waits for does not move by itself

    @property
    def overdue(self) -> bool:
        return self.age_s > self.limit_s

    def __str__(self) -> str:
        turn = f"turn of {named(self.turn)}" if self.turn else "nobody is there to act"
        return f"{self.who} waits {self.age_s:.1f} s for {self.what} ({turn})"


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker, as the controller sees it."""

    worker: str
    role: str
    state: str  # "at work", "waiting", "finished", or "idle": it has nothing and asks for nothing
    silent_s: float
    holds: str


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """What there is of it, the longest waits first; ``more`` waits and ``others`` are not listed."""

    workers: tuple[Standing, ...]
    waits: tuple[Edge, ...]
    knots: tuple[tuple[str, ...], ...]
    more: int = 0
    others: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "workers": [[one.worker, one.role, one.state, round(one.silent_s, 1), one.holds] for one in self.workers],
            "waits": [
                {
                    "who": edge.who,
                    "what": edge.what,
                    "turn": named(edge.turn),
                    "age_s": round(edge.age_s, 1),
                    # JSON has no infinity.
                    "limit_s": round(edge.limit_s, 1) if edge.limit_s < float("inf") else None,
                    "overdue": edge.overdue,
                    "nobody": not edge.turn,
                }
                for edge in self.waits
            ],
            "knots": [list(knot[:MOST_NAMED]) for knot in self.knots],
            "more": self.more,
            "others": self.others,
        }

    def sentences(self, most: int) -> list[str]:
        """The graph in words: its knots, its longest waits, then who holds what without waiting."""
        said = [f"these wait for each other: {named(knot)}" for knot in self.knots]
        said += [str(edge) for edge in self.waits]
        said += [f"{one.worker} holds {one.holds}" for one in self.workers if one.holds]
        left_out = len(said) - most + self.more
        return said[:most] + ([f"and {left_out} more"] if left_out > 0 else [])


def named(workers: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    rest = len(workers) - MOST_NAMED
    return ", ".join(workers[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def find_knots(edges: Iterable[Edge], at_work: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Sets of workers each of which waits for nobody but others of its set: what deadlock means where any may act.

    Whoever is at work, or of whom no wait is known, may act any time, and so may all that wait for it.
    """
    turns: dict[str, set[str]] = {}
    free = set(at_work)
    for edge in edges:
        if not edge.blocks:
            free.add(edge.who)
        elif edge.turn:
            turns.setdefault(edge.who, set()).update(edge.turn)
    stuck = {who for who in turns if who not in free}
    while loose := {who for who in stuck if not turns[who] <= stuck}:
        stuck -= loose
    return _apart(stuck, turns)


def _apart(stuck: set[str], turns: dict[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Knots that have nothing to do with each other, each in order of names."""
    beside: dict[str, set[str]] = {who: set(turns[who]) for who in stuck}
    for who in stuck:
        for other in turns[who]:
            beside[other].add(who)
    knots, left = [], set(stuck)
    while left:
        knot, reached = set[str](), {min(left)}
        while reached:
            knot |= reached
            reached = {other for who in reached for other in beside[who]} - knot
        left -= knot
        knots.append(tuple(sorted(knot)))
    return tuple(knots)
