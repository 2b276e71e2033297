"""A grant and the orders to the owners that go with it."""

from collections.abc import Iterator, Sequence

from flowrt.controller.board import Board
from flowrt.controller.events import Send
from flowrt.controller.slots import Lease, Slot
from flowrt.controller.transfers import Lanes, plan
from flowrt.ids import WorkerId
from flowrt.wire.messages import Grant, Pull, Serve
from flowrt.wire.records import Ints, Values

NO_LEASE = -1


def grant(
    board: Board,
    lanes: Lanes,
    pull: Pull,
    slots: Sequence[Slot],
    lease: Lease,
    more: tuple[Values, ...] = (),
    refused: Ints = (),
) -> Iterator[Send]:
    """Tell the puller what it got, and each owner of what it lacks to serve it."""
    groups = [slot.group for slot in slots]
    flows = [group.flow for group in groups]
    spans = [slot.spans for slot in slots]
    fetched = board.flows.fetched[pull.stage]
    parts, incoming = plan(board, lanes, lease.worker, fetched, slots) if fetched else ((), ())
    yield Send(
        lease.worker,
        Grant(
            request=pull.request,
            lease=lease.id,
            slots=tuple([slot.id for slot in slots]),
            flows=tuple(flows) if len(set(flows)) > 1 else tuple(flows[:1]),
            groups=tuple([group.id for group in groups]),
            members=tuple([slot.member for slot in slots]),
            prompts=tuple([group.prompt for group in groups]),
            epochs=tuple([group.epoch for group in groups]),
            attempts=tuple([slot.attempt for slot in slots]),
            spans=tuple(spans) if any(spans) else (),
            inline=tuple(
                [
                    Values(column, tuple([slot.inline[column] for slot in slots]))
                    for column in board.flows.inline[pull.stage]
                ]
            )
            + more,
            parts=parts,
            incoming=incoming,
            closed=False,
            refused=refused,
        ),
    )
    for one in incoming:
        yield Send(WorkerId(one.turn.sender), Serve(one.turn, one.parts))


def closed(pull: Pull, refused: Ints = ()) -> Grant:
    """Nothing more will come."""
    return Grant(pull.request, NO_LEASE, (), (), (), (), (), (), (), (), (), (), (), closed=True, refused=refused)
