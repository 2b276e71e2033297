"""A grant and the orders to the owners that go with it."""

from collections.abc import Iterator, Sequence

from flowrt.controller.board import Board
from flowrt.controller.events import Send
from flowrt.controller.slots import Lease, Slot
from flowrt.controller.transfers import Lanes, parts_of, plan
from flowrt.ids import WorkerId
from flowrt.wire.messages import Grant, Pull, Serve
from flowrt.wire.records import Values


def grant(
    board: Board,
    lanes: Lanes,
    worker: WorkerId,
    pull: Pull,
    slots: Sequence[Slot],
    leases: Sequence[Lease],
    closed: bool,
) -> Iterator[Send]:
    """Tell the puller what it got, and each owner of what it lacks to serve it."""
    needs = board.stages[pull.stage].needs
    parts = parts_of(board, needs, slots)
    incoming = plan(board, lanes, worker, parts)
    inline = [column for column in needs if column not in board.columns]
    yield Send(
        worker,
        Grant(
            request=pull.request,
            slots=tuple(slot.id for slot in slots),
            leases=tuple(lease.id for lease in leases),
            flows=tuple(slot.group.flow for slot in slots),
            groups=tuple(slot.group.id for slot in slots),
            members=tuple(slot.member for slot in slots),
            prompts=tuple(slot.group.prompt for slot in slots),
            epochs=tuple(slot.group.epoch for slot in slots),
            attempts=tuple(slot.attempt for slot in slots),
            spans=tuple(slot.spans for slot in slots),
            inline=tuple(Values(column, tuple(slot.inline[column] for slot in slots)) for column in inline),
            parts=parts,
            incoming=incoming,
            closed=closed,
        ),
    )
    for one in incoming:
        yield Send(WorkerId(one.turn.sender), Serve(one.turn, one.parts))
