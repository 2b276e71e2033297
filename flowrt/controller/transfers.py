"""Who sends what to whom, in which order: lanes and their turns.

A lane is a (sender, receiver, kind) pair with its own order; the controller numbers its transfers, so both ends
issue the same sequence. A lane that failed is never used again: the next transfer opens a new incarnation. Which
transport an incarnation uses is decided here, from what its two ends said they can do.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from flowrt.controller.board import Board
from flowrt.controller.slots import Holding, Slot
from flowrt.errors import RemoteProtocolError
from flowrt.ids import GroupId, SlotId, WorkerId
from flowrt.wire.records import Incoming, Ints, LaneTurn, Part

LaneKey = tuple[WorkerId, WorkerId, str]
AUTO = "auto"
EVERYWHERE = "gloo"
"""The transport that any two workers can do."""


MOST_WORDS = 500


class Lanes:
    """The current incarnation, next sequence number and transport of every lane."""

    def __init__(self, forced: str = AUTO, first: int = 0) -> None:
        self._forced = forced
        self._able: dict[WorkerId, tuple[str, ...]] = {}
        self._state: dict[LaneKey, tuple[int, int, str]] = {}
        self._failed: Counter[tuple[str, str]] = Counter()
        self._incarnations = itertools.count(first)
        self.trouble = ""

    def note(self, what: str, worker: WorkerId, reason: str) -> None:
        """The transfer that failed last, in its receiver's words: a run that stalls may stall for this."""
        self.trouble = f"{what} did not reach {worker}: {reason[:MOST_WORDS]}"

    def fault(self, lanes: Sequence[str]) -> str:
        """Why a worker that can do these lanes cannot come in; empty when it can."""
        if self._forced == AUTO:
            return ""
        forced = [one for one in lanes if _name(one) == self._forced]
        if not forced:
            return f"lanes are forced to be {self._forced}, and it can only do {', '.join(map(_name, lanes))}"
        if any(forced[0] not in able for able in self._able.values()):
            return f"lanes are forced to be {self._forced}, and it is not on the host of the others; use lanes = 'auto'"
        return ""

    def join(self, worker: WorkerId, lanes: tuple[str, ...]) -> None:
        """The worker is in and can do these, best first. One that moves no tensors says none."""
        if lanes:
            self._able[worker] = lanes

    def next_turn(self, sender: WorkerId, receiver: WorkerId, kind: str) -> LaneTurn:
        key = (sender, receiver, kind)
        incarnation, sequence, transport = self._state.get(key) or (
            next(self._incarnations),
            0,
            self._choose(sender, receiver),
        )
        self._state[key] = (incarnation, sequence + 1, transport)
        return LaneTurn(sender, receiver, kind, incarnation, sequence, transport)

    def _choose(self, sender: WorkerId, receiver: WorkerId) -> str:
        theirs = self._willing(receiver)
        both = [_name(one) for one in self._willing(sender) if one in theirs]
        return next((name for name in both if self._forced in (AUTO, name)), EVERYWHERE)

    def _willing(self, worker: WorkerId) -> tuple[str, ...]:
        """What it does without being forced is what it names before that which everybody can do."""
        able = self._able.get(worker, ())
        return able[: able.index(EVERYWHERE)] if self._forced == AUTO and EVERYWHERE in able else able

    def best(self, owners: Collection[WorkerId], receiver: WorkerId, serving: Collection[WorkerId]) -> WorkerId:
        """Who of these shall serve: whose lanes there have failed least; rather one that serves the receiver now."""
        return min(owners, key=lambda owner: (self._failed[owner, receiver], owner not in serving, owner))

    def abandon(self, turn: LaneTurn) -> None:
        """This turn's lane is broken: the next turn opens a new incarnation, unless one is open already."""
        key = (WorkerId(turn.sender), WorkerId(turn.receiver), turn.kind)
        state = self._state.get(key)
        if state is not None and state[0] == turn.incarnation:
            self._failed[turn.sender, turn.receiver] += 1
            del self._state[key]

    def forget(self, worker: WorkerId) -> list[WorkerId]:
        """The worker is gone, and all its lanes with it; returns those at their other ends."""
        self._able.pop(worker, None)
        for pair in [pair for pair in self._failed if worker in pair]:
            del self._failed[pair]
        keys = [key for key in self._state if worker in key[:2]]
        for key in keys:
            del self._state[key]
        return sorted({end for key in keys for end in key[:2] if end != worker})


def _name(lane: str) -> str:
    return lane.partition(":")[0]


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
    board: Board, lanes: Lanes, receiver: WorkerId, columns: Iterable[str], slots: Sequence[Slot], ids: Ints
) -> tuple[tuple[Part, ...], tuple[Incoming, ...]]:
    """The tensor columns of these slots, one part a column (a group column once per group), and how they come.

    There is one packed transfer per owner for whatever ``receiver`` neither holds nor is being sent.
    """
    parts = []
    one_of = {ids: ids}
    wanted: dict[WorkerId, dict[str, list[tuple[int, Holding]]]] = defaultdict(lambda: defaultdict(list))
    shared: list[tuple[str, int, Holding]] = []  # by several owners: left to those who serve something anyway
    for name in columns:
        if board.columns[name].scope == "group":
            holdings = {int(slot.group.id): slot.group.tensors[name] for slot in slots}
        else:
            holdings = {int(slot.id): slot.tensors[name] for slot in slots}
        parts.append(_part(name, list(holdings.items()), one_of))
        for item, holding in holdings.items():
            if receiver not in holding.owners and receiver not in holding.sent:
                if len(holding.owners) == 1:
                    wanted[next(iter(holding.owners))][name].append((item, holding))
                else:
                    shared.append((name, item, holding))
    for name, item, holding in shared:
        wanted[lanes.best(holding.owners, receiver, wanted)][name].append((item, holding))
    incoming = []
    for owner, packed in wanted.items():
        turn = lanes.next_turn(owner, receiver, "samples")
        for rows in packed.values():
            for _, holding in rows:
                holding.sent[receiver] = turn
        incoming.append(Incoming(turn, tuple(_part(name, rows, one_of) for name, rows in packed.items())))
    return tuple(parts), tuple(incoming)


def _part(column: str, rows: Sequence[tuple[int, Holding]], one_of: dict[Ints, Ints]) -> Part:
    """The rows of a column; equal ids become one object, because a message says it only once."""
    ids = tuple([item for item, _ in rows])
    return Part(column, one_of.setdefault(ids, ids), tuple([holding.length for _, holding in rows]))
