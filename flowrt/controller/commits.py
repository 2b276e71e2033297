"""What a commit has to bring, checked before anything is changed."""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, TypeVar

from flowrt.controller.board import Board
from flowrt.controller.slots import Lease, Slot
from flowrt.controller.walk import Made
from flowrt.ids import WorkerId
from flowrt.wire.messages import Commit
from flowrt.wire.records import Part, Stage, Values

Value = TypeVar("Value")


class Makes(NamedTuple):
    """The columns that a stage makes, sorted: tensors, and numbers that travel with the commit."""

    tensors: list[str]
    numbers: list[str]

    @classmethod
    def of(cls, stage: Stage, columns: Container[str]) -> "Makes":
        made = sorted(stage.makes)
        return cls([name for name in made if name in columns], [name for name in made if name not in columns])


def commit_fault(message: Commit, stage: Stage, makes: Makes, latest: int) -> str:
    """What is wrong with a commit of this stage; empty when its columns fit the stage and each other."""
    count = len(message.slots)
    if stage.whole_groups:
        return "what takes whole groups ends with its step"
    tensors, numbers = [part.column for part in message.parts], [one.column for one in message.inline]
    if sorted(tensors) != makes.tensors or sorted(numbers) != makes.numbers:
        return f"it brings tensors {tensors} and numbers {numbers}, the stage makes {makes.tensors} and {makes.numbers}"
    sizes = [len(message.leases), *(len(one.lengths) for one in message.parts)]
    sizes += [len(one.values) for one in message.inline]
    if any(size != count for size in sizes):
        return f"its columns have {sizes} rows for {count} slots"
    if len(set(message.slots)) != count:
        return "it has a slot twice"
    if any(part.ids != message.slots or min(part.lengths, default=0) < 0 for part in message.parts):
        return "its parts are not of its slots, or of negative length"
    if len(message.spans) != (count if stage.generates else 0):
        return f"it has {len(message.spans)} spans for {count} slots"
    return next((wrong for span in message.spans if (wrong := _wrong_span(span, latest))), "")


def _wrong_span(span: Sequence[int], latest: int) -> str:
    if not span or len(span) % 2 or not all(0 <= version <= latest for version in span[::2]):
        return f"span {span} is not pairs of a published version and its tokens"
    return ""


def by_lease(board: Board, worker: WorkerId, message: Commit, stage: Stage) -> Iterator[tuple[Lease | None, list[int]]]:
    """The rows of a commit by their lease; None for those on which the worker has none (any more)."""
    rows_of: dict[int, list[int]] = {}
    for row, lease_id in enumerate(message.leases):
        rows_of.setdefault(lease_id, []).append(row)
    late: list[int] = []
    for lease_id, rows in rows_of.items():
        lease = board.find_lease(lease_id, worker)
        if lease is None or lease.stage != stage.name:
            late += rows
            continue
        valid = [row for row in rows if message.slots[row] in lease.slots]
        if len(valid) < len(rows):
            late += sorted(set(rows) - set(valid))
        if valid:
            yield lease, valid
    if late:
        yield None, late


def made(worker: WorkerId, message: Commit, rows: Sequence[int]) -> Made:
    """What is kept of these rows of a commit."""
    if len(rows) == len(message.slots):
        return Made(worker, message.stage, message.slots, message.leases, message.parts, message.inline, message.spans)
    slots = tuple(pick(message.slots, rows))
    return Made(
        worker,
        message.stage,
        slots,
        tuple(pick(message.leases, rows)),
        tuple(Part(part.column, slots, tuple(pick(part.lengths, rows))) for part in message.parts),
        tuple(Values(one.column, tuple(pick(one.values, rows))) for one in message.inline),
        tuple(pick(message.spans, rows)) if message.spans else (),
    )


def finished(worker: WorkerId, lease: Lease, slots: Sequence[Slot]) -> Made:
    """What is kept of a stage that makes nothing."""
    return Made(worker, lease.stage, tuple([slot.id for slot in slots]), (lease.id,) * len(slots), (), (), ())


def pick(values: Sequence[Value], rows: Sequence[int]) -> Sequence[Value]:
    """The values of these rows, all of them as they are."""
    return values if len(rows) == len(values) else [values[row] for row in rows]
