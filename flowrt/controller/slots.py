"""Slots and groups: what exists of each sample, who holds it, who works on it. Plain state, no policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import cast

from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.wire.records import LaneTurn

NO_STEP = -1
NO_TENSORS: Mapping[str, "Holding"] = MappingProxyType({})
NO_NUMBERS: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Lease:
    """The right to work on one stage of the slots of one grant until a deadline."""

    id: LeaseId
    stage: str
    worker: WorkerId
    deadline_s: float
    version: int  # policy version the worker had applied when it was granted
    step: int  # optimiser step it is for; NO_STEP outside training
    slots: "dict[SlotId, Slot]"  # those that have neither been committed nor given back
    longer: bool = False  # than others: it ends later than some that were given after it


@dataclass(slots=True)
class Holding:
    """A tensor column of one slot or group: its length in elements, and who has it.

    ``owners`` can serve it. A receiver becomes one when it commits something that needed the column; until then
    it is only known which turn of which lane is to bring it a copy.
    """

    length: int
    owners: set[WorkerId]
    sent: dict[WorkerId, LaneTurn] = field(default_factory=dict)  # by receiver

    @property
    def holders(self) -> set[WorkerId]:
        """The owners and those to whom a copy has been sent, arrived or not: who has to be told to free it."""
        return self.owners | self.sent.keys()


class Group:
    """The slots of one prompt, over which advantages are computed."""

    __slots__ = ("at_least", "epoch", "flow", "id", "prompt", "slots", "tensors")

    def __init__(self, group_id: GroupId, flow: str, prompt: int, epoch: int, at_least: int) -> None:
        self.id = group_id
        self.flow = flow
        self.prompt = prompt
        self.epoch = epoch
        self.at_least = at_least
        self.slots: list[Slot] = []
        self.tensors = NO_TENSORS

    def keep(self, column: str, holding: Holding) -> None:
        """Somebody has this column of the whole group."""
        self.tensors = {**self.tensors, column: holding}

    def oldest_version(self) -> int | None:
        """Oldest version of any finished member, or that a running member may have started with."""
        versions = [version for slot in self.slots if (version := slot.oldest_version()) is not None]
        versions += [lease.version for slot in self.slots if not slot.spans for lease in slot.leases.values()]
        return min(versions, default=None)


class Slot:
    """The controller's row for one sample.

    Many are made: no dataclass, which takes five times as long, and no table before there is something in it.
    """

    __slots__ = (
        *("attempt", "done", "group", "id", "inline", "leases", "member", "overdue", "spans", "spans_of", "tensors"),
    )

    def __init__(self, slot_id: SlotId, group: Group, member: int) -> None:
        self.id = slot_id
        self.group = group
        self.member = member
        self.attempt = 0
        self.overdue = 0  # leases that ended at their deadline, without a result
        self.tensors = NO_TENSORS
        self.inline = NO_NUMBERS
        self.spans: tuple[int, ...] = ()  # version, tokens, version, tokens, …
        self.spans_of = ""  # the stage that generated
        self.done = 0  # one bit a stage, see Board.bits
        self.leases: dict[str, Lease] = {}  # by stage

    def has(self, column: str) -> bool:
        return column in self.tensors or column in self.inline or column in self.group.tensors

    def keep(self, column: str, holding: Holding) -> None:
        """Somebody has this column."""
        self.tensors = {**self.tensors, column: holding}

    def forget(self, column: str) -> Holding | None:
        """The column is not there any more; returns who had it, if it was a tensor."""
        self.inline = {name: value for name, value in self.inline.items() if name != column}
        held = self.tensors.get(column)
        self.tensors = {name: one for name, one in self.tensors.items() if name != column}
        return held

    def holding(self, column: str) -> Holding | None:
        """Who has a tensor column of this slot or of its group; None for what is inline or not there."""
        return self.tensors.get(column) or self.group.tensors.get(column)

    def oldest_version(self) -> int | None:
        """The oldest policy version that made a token of this sample; None before there is any."""
        return min(self.spans[::2], default=None)


def made(
    flow: str, prompts: Sequence[int], epoch: int, members: int, at_least: int, group_id: int, slot_id: int
) -> tuple[list[Group], list[Slot]]:
    """A group of so many slots for each prompt, numbered from these numbers on; and all their slots."""
    if len(prompts) == 1:  # what is offered most often, in a fraction of the time
        group = Group(GroupId(group_id), flow, prompts[0], epoch, at_least)
        group.slots = [Slot(SlotId(slot_id + member), group, member) for member in range(members)]
        return [group], [*group.slots]
    rows = len(prompts) * members
    group_ids = cast(Sequence[GroupId], range(group_id, group_id + len(prompts)))
    slot_ids = cast(Sequence[SlotId], range(slot_id, slot_id + rows))
    groups = [Group(one, flow, prompt, epoch, at_least) for one, prompt in zip(group_ids, prompts, strict=True)]
    slots = [
        Slot(one, group, member) for one, (group, member) in zip(slot_ids, product(groups, range(members)), strict=True)
    ]
    for group, start in zip(groups, range(0, rows, members), strict=True):
        group.slots = slots[start : start + members]
    return groups, slots
