"""Who sends what to whom, in which order: lanes and their turns.

A lane is a (sender, receiver, kind) pair with its own order; the controller numbers its transfers, so both ends
issue the same sequence. A lane that failed is never used again: the next transfer opens a new incarnation.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from flowrt.controller.board import Board
from flowrt.controller.slots import Holding, Slot
from flowrt.errors import RemoteProtocolError
from flowrt.ids import GroupId, SlotId, WorkerId
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
        state = self._state.get(key)
        if state is not None and state[0] == turn.incarnation:
            del self._state[key]

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, and all its lanes with it."""
        for key in [key for key in self._state if worker in key[:2]]:
            del self._state[key]


def check_receiver(worker: WorkerId, turn: LaneTurn) -> None:
    """Raises RemoteProtocolError when a worker speaks of the end of a lane that is another's."""
    if turn.receiver != worker:
        raise RemoteProtocolError(f"{worker} gave up a lane to {turn.receiver!r}; a worker can only give up its own")


def find_holding(board: Board, column: str, item: int) -> Holding | None:
    """Who has this column of a slot or group; None for what is gone or has never been."""
    spec = board.columns.get(column)
    if spec is None:
        return None
    row = board.groups.get(GroupId(item)) if spec.scope == "group" else board.slots.get(SlotId(item))
    return row.tensors.get(column) if row is not None else None


def lose_copies(tensors: Mapping[str, Holding], worker: WorkerId) -> None:
    """``worker`` has none of these any more."""
    for holding in tensors.values():
        holding.owners.discard(worker)
        holding.sent.pop(worker, None)


def plan(
    board: Board, lanes: Lanes, receiver: WorkerId, columns: Iterable[str], slots: Sequence[Slot]
) -> tuple[tuple[Part, ...], tuple[Incoming, ...]]:
    """The tensor columns of these slots, one part a column (a group column once per group), and how they come.

    There is one packed transfer per owner for whatever ``receiver`` neither holds nor is being sent.
    """
    parts = []
    wanted: dict[WorkerId, dict[str, list[tuple[int, Holding]]]] = defaultdict(lambda: defaultdict(list))
    for name in columns:
        if board.columns[name].scope == "group":
            holdings = {int(slot.group.id): slot.group.tensors[name] for slot in slots}
        else:
            holdings = {int(slot.id): slot.tensors[name] for slot in slots}
        parts.append(_part(name, list(holdings.items())))
        for item, holding in holdings.items():
            if receiver not in holding.owners and receiver not in holding.sent:
                wanted[min(holding.owners)][name].append((item, holding))
    incoming = []
    for owner, packed in wanted.items():
        turn = lanes.next_turn(owner, receiver, "samples")
        for rows in packed.values():
            for _, holding in rows:
                holding.sent[receiver] = turn
        incoming.append(Incoming(turn, tuple(_part(name, rows) for name, rows in packed.items())))
    return tuple(parts), tuple(incoming)


def _part(column: str, rows: Sequence[tuple[int, Holding]]) -> Part:
    return Part(column, tuple([item for item, _ in rows]), tuple([holding.length for _, holding in rows]))
