"""Lanes and their turns: the order of the transfers from each worker to each other one.

A lane has a sender, a receiver and a kind. The controller numbers the transfers of each lane, so both ends run them in
the same order. A lane that failed or was retired is never used again: the next transfer opens a new incarnation. The
transport of an incarnation is chosen here, from the transports that both ends support.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from flowrt.controller.state.counters import TokenBucket
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import ColumnLocation, Slot
from flowrt.errors import RemoteProtocolError
from flowrt.ids import AUTO, GroupId, SlotId, WorkerId
from flowrt.protocol.messages import Incoming, Ints, LaneTurn, Part

LaneKey = tuple[WorkerId, WorkerId, str]
EVERYWHERE = "gloo"
"""The transport that every pair of workers supports."""
NO_FAILURES: Mapping[WorkerId, int] = MappingProxyType({})
MAX_REASON_CHARS = 500
WORKER_KEY_BYTES, WORKER_KEY_BYTES_PER_S = 8 << 20, 1 << 20
"""Rate limit of the rendezvous keys of one worker: burst in bytes, and bytes per second."""
ALL_KEY_BYTES, ALL_KEY_BYTES_PER_S = 64 << 20, 8 << 20
"""The same for all workers together. Keys above it are dropped, and the lane is opened again."""


FAILURES_OF_A_CUT = 2
CUT_S = 60.0
"""Time after which a link that counts as cut is tried again."""


class Lanes:
    """The current incarnation, next sequence number and transport of every lane."""

    def __init__(self, forced: str = AUTO, first: int = 0) -> None:
        self._forced = forced
        self._able: dict[WorkerId, tuple[str, ...]] = {}
        self._state: dict[LaneKey, tuple[int, int, str]] = {}
        self._of: dict[WorkerId, dict[LaneKey, None]] = {}  # the lanes of each worker
        self.failed: dict[WorkerId, Counter[WorkerId]] = {}
        """Transfers of samples that failed in a row, by both ends. An attribute: every event reads it."""
        self._cut: dict[WorkerId, dict[WorkerId, float]] = {}  # by owner and receiver, until when
        self._incarnations = itertools.count(first)
        self.last_failure = ""

    def note_failure(self, what: str, worker: WorkerId, reason: str) -> None:
        """Remember the last failed transfer, for the reason of a stall."""
        self.last_failure = f"{what} did not reach {worker}: {reason[:MAX_REASON_CHARS]}"

    def fault(self, lanes: Sequence[str]) -> str:
        """Why a worker with these transports cannot join; empty if it can."""
        if self._forced == AUTO:
            return ""
        forced = [lane for lane in lanes if _name(lane) == self._forced]
        if not forced:
            return f"lanes are forced to be {self._forced}, and it can only do {', '.join(map(_name, lanes))}"
        if any(forced[0] not in able for able in self._able.values()):
            return f"lanes are forced to be {self._forced}, and it is not on the host of the others; use lanes = 'auto'"
        return ""

    def join(self, worker: WorkerId, lanes: tuple[str, ...]) -> None:
        """Add a worker and its transports, best first; a worker that moves no tensors has none."""
        if lanes:
            self._able[worker] = lanes

    def next_turn(self, sender: WorkerId, receiver: WorkerId, kind: str) -> LaneTurn:
        """The turn of the next transfer on a lane; opens an incarnation if there is none."""
        key = (sender, receiver, kind)
        incarnation, sequence, transport = self._state.get(key) or (
            next(self._incarnations),
            0,
            self._choose(sender, receiver),
        )
        if not sequence:
            for end in (sender, receiver):
                self._of.setdefault(end, {})[key] = None
        self._state[key] = (incarnation, sequence + 1, transport)
        return LaneTurn(
            sender=sender, receiver=receiver, kind=kind, incarnation=incarnation, sequence=sequence, transport=transport
        )

    def _choose(self, sender: WorkerId, receiver: WorkerId) -> str:
        theirs = self._willing(receiver)
        both = [_name(lane) for lane in self._willing(sender) if lane in theirs]
        return next((name for name in both if self._forced in (AUTO, name)), EVERYWHERE)

    def _willing(self, worker: WorkerId) -> tuple[str, ...]:
        """The transports of a worker to choose from: those before `EVERYWHERE`; all of them if one is forced."""
        able = self._able.get(worker, ())
        return able[: able.index(EVERYWHERE)] if self._forced == AUTO and EVERYWHERE in able else able

    def best(self, owners: Collection[WorkerId], receiver: WorkerId, serving: Collection[WorkerId]) -> WorkerId:
        """The owner to send from: fewest failed lanes to the receiver, then one of ``serving``, then by name."""
        failed = self.failed.get(receiver, NO_FAILURES)
        return min(owners, key=lambda owner: (failed.get(owner, 0), owner not in serving, owner))

    def abandon(self, turn: LaneTurn) -> bool:
        """Close the incarnation of this turn, which failed, if it is the current one; the next turn opens another.

        Returns whether it was the current one.
        """
        key = (WorkerId(turn.sender), WorkerId(turn.receiver), turn.kind)
        state = self._state.get(key)
        if state is None or state[0] != turn.incarnation:
            return False
        self._close(key)
        return True

    # ---- links that fail

    def note_failed(self, owner: WorkerId, receiver: WorkerId, now: float) -> None:
        """Count a lane of samples that failed. From the second one in a row on, the link counts as cut for a time."""
        for end, other in ((owner, receiver), (receiver, owner)):
            self.failed.setdefault(end, Counter())[other] += 1
        if self.failed[owner][receiver] >= FAILURES_OF_A_CUT:
            self._cut.setdefault(owner, {})[receiver] = now + CUT_S

    def note_arrived(self, owner: WorkerId, receiver: WorkerId) -> None:
        """Note a transfer of samples that was complete."""
        for end, other in ((owner, receiver), (receiver, owner)):
            if (failed := self.failed.get(end)) is not None:
                failed.pop(other, None)
                if not failed:
                    del self.failed[end]
        self._mend(owner, receiver)

    def _mend(self, owner: WorkerId, receiver: WorkerId) -> None:
        cut = self._cut.get(owner)
        if cut is not None:
            cut.pop(receiver, None)
            if not cut:
                del self._cut[owner]

    def is_cut(self, owner: WorkerId, receiver: WorkerId) -> bool:
        """Whether the link between these counts as cut."""
        return owner in self._cut and receiver in self._cut[owner]

    def cut_from(self, owner: WorkerId) -> Collection[WorkerId]:
        """The receivers from which an owner is cut off."""
        return self._cut.get(owner, NO_FAILURES)

    def take_mended(self, now: float) -> list[tuple[WorkerId, WorkerId]]:
        """The pairs of owner and receiver whose links are to be tried again."""
        if not self._cut:  # nearly always
            return []
        due = [(owner, end) for owner, cut in self._cut.items() for end, until_s in cut.items() if until_s <= now]
        for owner, receiver in due:
            self._mend(owner, receiver)
        return due

    def retire(self, turn: LaneTurn) -> bool:
        """Close the incarnation of this turn if it was the last one issued; returns whether it was."""
        key = (WorkerId(turn.sender), WorkerId(turn.receiver), turn.kind)
        state = self._state.get(key)
        if state is None or state[:2] != (turn.incarnation, turn.sequence + 1):
            return False
        self._close(key)
        return True

    def _close(self, key: LaneKey) -> None:
        del self._state[key]
        for end in key[:2]:
            del self._of[end][key]
            if not self._of[end]:
                del self._of[end]

    def forget(self, worker: WorkerId) -> list[WorkerId]:
        """Remove a worker and its lanes; returns the workers at the other ends."""
        self._able.pop(worker, None)
        for other in list(self.failed.get(worker, ())):
            self.note_arrived(worker, other)
            self.note_arrived(other, worker)
        keys = list(self._of.get(worker, ()))
        for key in keys:
            self._close(key)
        return sorted({end for key in keys for end in key[:2] if end != worker})


class RendezvousLimits:
    """Rate limits of the rendezvous keys that workers send to each other, of each worker and of all together."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, TokenBucket] = {}
        self._all = TokenBucket(ALL_KEY_BYTES, ALL_KEY_BYTES_PER_S)

    def check(self, worker: WorkerId, size: int, now: float) -> None:
        """Count a key of ``size`` bytes. Raises RemoteProtocolError if the worker exceeds its rate."""
        limit = self._of.setdefault(worker, TokenBucket(WORKER_KEY_BYTES, WORKER_KEY_BYTES_PER_S))
        if not limit.take(size, now):
            raise RemoteProtocolError(
                f"{worker} sends other workers more rendezvous keys than lanes need: over {WORKER_KEY_BYTES} bytes"
            )

    def take(self, size: int, now: float) -> bool:
        """Count a key in the rate of all workers; returns False if it is to be dropped."""
        return self._all.take(size, now)

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker."""
        self._of.pop(worker, None)


def _name(lane: str) -> str:
    return lane.partition(":")[0]


def check_receiver(worker: WorkerId, turn: LaneTurn) -> None:
    """Raises RemoteProtocolError if the worker is not the receiver of this turn."""
    if turn.receiver != worker:
        raise RemoteProtocolError(f"{worker} gave up a lane to {turn.receiver!r}; a worker can only give up its own")


def find_holding(table: SampleTable, column: str, item: int) -> ColumnLocation | None:
    """The location of a tensor column of a slot or group, by its id; None for an unknown column, slot or group."""
    spec = table.columns.get(column)
    if spec is None:
        return None
    row = table.groups.get(GroupId(item)) if spec.scope == "group" else table.slots.get(SlotId(item))
    return row.tensors.get(column) if row is not None else None


def holders_of(tensors: Mapping[str, ColumnLocation]) -> set[WorkerId]:
    """The workers that have to free these columns."""
    workers: set[WorkerId] = set()
    for holding in tensors.values():  # hot path: `ColumnLocation.holders` makes a set for each column
        workers |= holding.owners
        if holding.copies:
            workers.update(holding.copies)
    return workers


def lose_copies(tensors: Mapping[str, ColumnLocation], worker: WorkerId) -> None:
    """Remove ``worker`` from the holders of these columns."""
    for holding in tensors.values():
        holding.owners.discard(worker)
        holding.copies.pop(worker, None)


def plan(
    table: SampleTable, lanes: Lanes, receiver: WorkerId, columns: Iterable[str], slots: Sequence[Slot], ids: Ints
) -> tuple[tuple[Part, ...], tuple[Incoming, ...]]:
    """Plan the transfers of tensor columns of these slots to ``receiver``; ``ids`` are the ids of the slots.

    Returns one part for each column, of all slots (of a group column: one row per group), and one packed transfer per
    owner of the rows that the receiver neither holds nor is being sent. These are marked as sent.
    """
    parts = []
    one_of = {ids: ids}
    wanted: dict[WorkerId, dict[str, list[tuple[int, ColumnLocation]]]] = defaultdict(lambda: defaultdict(list))
    shared: list[tuple[str, int, ColumnLocation]] = []  # several owners: prefer one that serves anyway
    for name in columns:
        if table.columns[name].scope == "group":
            holdings = {int(slot.group.id): slot.group.tensors[name] for slot in slots}
        else:
            holdings = {int(slot.id): slot.tensors[name] for slot in slots}
        parts.append(_part(name, list(holdings.items()), one_of))
        for item, holding in holdings.items():
            if receiver not in holding.owners and receiver not in holding.copies:
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
                holding.copies[receiver] = turn
        incoming.append(Incoming(turn, tuple(_part(name, rows, one_of) for name, rows in packed.items())))
    if incoming:
        table.note_holder(receiver, [slot.group for slot in slots])
    return tuple(parts), tuple(incoming)


def _part(column: str, rows: Sequence[tuple[int, ColumnLocation]], one_of: dict[Ints, Ints]) -> Part:
    """The rows of a column; equal ids are one object, which a message encodes only once."""
    ids = tuple([item for item, _ in rows])
    return Part(column, one_of.setdefault(ids, ids), tuple([holding.length for _, holding in rows]))
