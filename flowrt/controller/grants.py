"""A grant and the orders to the owners that go with it."""

from collections.abc import Sequence

from flowrt.controller.board import Board
from flowrt.controller.events import Send
from flowrt.controller.slots import Lease, Slot
from flowrt.controller.transfers import Lanes, plan
from flowrt.ids import WorkerId
from flowrt.wire.messages import Grant, Pull, Serve
from flowrt.wire.records import Ints, Values

NO_LEASE = -1
Numbers = tuple[int, ...]
Columns = tuple[Numbers, Numbers, Numbers, tuple[Numbers, ...], tuple[str, ...], Numbers, Numbers, Numbers]


def grant(
    board: Board,
    lanes: Lanes,
    pull: Pull,
    slots: Sequence[Slot],
    lease: Lease,
    more: tuple[Values, ...] = (),
    refused: Ints = (),
) -> list[Send]:
    """Tell the puller what it got, and each owner of what it lacks to serve it."""
    ids, members, attempts, spans, flows, groups, prompts, epochs = _columns(slots)
    fetched = board.flows.fetched[pull.stage]
    parts, incoming = plan(board, lanes, lease.worker, fetched, slots, ids) if fetched else ((), ())
    inline = more
    if columns := board.flows.inline[pull.stage]:
        inline += _values(slots, columns)
    message = Grant(
        pull.request,
        lease.id,
        ids,
        flows if len(flows) > 1 and len(set(flows)) > 1 else flows[:1],
        groups,
        members,
        prompts,
        epochs,
        attempts,
        spans if any(spans) else (),
        inline,
        parts,
        incoming,
        closed=False,
        refused=refused,
    )
    if not incoming:
        return [Send(lease.worker, message)]
    orders = [Send(WorkerId(one.turn.sender), Serve(one.turn, one.parts)) for one in incoming]
    return [Send(lease.worker, message), *orders]


def _values(slots: Sequence[Slot], columns: Sequence[str]) -> tuple[Values, ...]:
    if len(slots) == 1:
        only = slots[0].inline
        return tuple([Values(column, (only[column],)) for column in columns])
    return tuple([Values(column, tuple([slot.inline[column] for slot in slots])) for column in columns])


def _columns(slots: Sequence[Slot]) -> Columns:
    """What a grant says of each slot, column by column."""
    if len(slots) == 1:  # what is asked for most often, in a fraction of the time
        (slot,) = slots
        group = slot.group
        return (
            (slot.id,),
            (slot.member,),
            (slot.attempt,),
            (slot.spans,),
            (group.flow,),
            (group.id,),
            (group.prompt,),
            (group.epoch,),
        )
    groups = [slot.group for slot in slots]
    return (
        tuple([slot.id for slot in slots]),
        tuple([slot.member for slot in slots]),
        tuple([slot.attempt for slot in slots]),
        tuple([slot.spans for slot in slots]),
        tuple([group.flow for group in groups]),
        tuple([group.id for group in groups]),
        tuple([group.prompt for group in groups]),
        tuple([group.epoch for group in groups]),
    )


def closed(pull: Pull, refused: Ints = ()) -> Grant:
    """Nothing more will come."""
    return Grant(pull.request, NO_LEASE, (), (), (), (), (), (), (), (), (), (), (), closed=True, refused=refused)
