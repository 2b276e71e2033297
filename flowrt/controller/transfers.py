"""Who sends what to whom, in which order: lanes and their turns.

A lane is a (sender, receiver, kind) pair with its own order; the controller numbers its transfers, so both ends
issue the same sequence. A lane that failed is never used again: the next transfer opens a new incarnation.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable

from flowrt.controller.board import Board
from flowrt.controller.slots import Slot
from flowrt.ids import WorkerId
from flowrt.wire.records import Incoming, LaneTurn, Part

LaneKey = tuple[WorkerId, WorkerId, str]


class Lanes:
    """The current incarnation and next sequence number of every lane."""

    def __init__(self) -> None:
        self._state: dict[LaneKey, tuple[int, int]] = {}
        self._incarnations = itertools.count()

    def next_turn(self, sender: WorkerId, receiver: WorkerId, kind: str) -> LaneTurn:
        key = (sender, receiver, kind)
        incarnation, sequence = self._state.get(key) or (next(self._incarnations), 0)
        self._state[key] = (incarnation, sequence + 1)
        return LaneTurn(sender, receiver, kind, incarnation, sequence)

    def abandon(self, turn: LaneTurn) -> None:
        """This turn's lane is broken: the next turn opens a new incarnation, unless one is open already."""
        key = (WorkerId(turn.sender), WorkerId(turn.receiver), turn.kind)
        if self._state.get(key, (-1, 0))[0] == turn.incarnation:
            del self._state[key]

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, and all its lanes with it."""
        for key in [key for key in self._state if worker in key[:2]]:
            del self._state[key]


def parts_of(board: Board, columns: Iterable[str], slots: Iterable[Slot]) -> tuple[Part, ...]:
    """The tensor columns of these slots, one part a column; a group column once per group."""
    parts = []
    slots = list(slots)
    for name in columns:
        column = board.columns.get(name)
        if column is None:
            continue  # inline
        if column.scope == "group":
            ids = tuple(dict.fromkeys(int(slot.group.id) for slot in slots))
        else:
            ids = tuple(int(slot.id) for slot in slots)
        parts.append(Part(name, ids, tuple(board.length(name, item) for item in ids)))
    return tuple(parts)


def plan(board: Board, lanes: Lanes, receiver: WorkerId, parts: Iterable[Part]) -> tuple[Incoming, ...]:
    """One packed transfer per owner for whatever ``receiver`` neither holds nor is being sent."""
    wanted: dict[WorkerId, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for item in part.ids:
            holding = board.holding(part.column, item)
            if receiver not in holding.holders:
                wanted[min(holding.owners)][part.column].append(item)
    incoming = []
    for owner, columns in wanted.items():
        turn = lanes.next_turn(owner, receiver, "samples")
        for column, ids in columns.items():
            for item in ids:
                board.holding(column, item).sent[receiver] = turn
        lengths = {column: tuple(board.length(column, item) for item in ids) for column, ids in columns.items()}
        incoming.append(Incoming(turn, tuple(Part(name, tuple(ids), lengths[name]) for name, ids in columns.items())))
    return tuple(incoming)
