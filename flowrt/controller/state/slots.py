"""Slots, groups and leases: which columns of a sample exist, which workers hold them, which have leases. No policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import cast

from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.protocol.messages import NO_LIMIT, LaneTurn

NO_STEP = -1
NO_LEASE = -1
"""The lease of a grant that closes a stream."""
NO_SOURCE = WorkerId("")
NO_TENSORS: Mapping[str, "ColumnLocation"] = MappingProxyType({})
NO_NUMBERS: Mapping[str, float] = MappingProxyType({})
NOTHING_KEPT: Mapping[int, "Kept"] = MappingProxyType({})
MAX_JOURNALS = 4
"""Most journals in which a sample is looked for."""
NO_WORKERS: Mapping[WorkerId, None] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Lease:
    """The right to work on one stage of the slots of one grant until a deadline."""

    id: LeaseId
    stage: str
    worker: WorkerId
    deadline_s: float
    version: int | None  # policy version the worker had applied when it was granted; None: the stage generates nothing
    step: int  # optimiser step it is for; NO_STEP outside training
    slots: "dict[SlotId, Slot]"  # those not committed and not released yet
    longer: bool = False  # whether it may end after leases that were granted later


@dataclass(slots=True)
class ColumnLocation:
    """A tensor column of one slot or group: its length in elements and its holders.

    ``owners`` are the workers that can send it. A worker with a copy becomes an owner when it commits a stage that
    needed the column; until then, ``copies`` has the turn of the lane that transfers its copy, or None for a copy that
    no transfer brings: it came under an earlier controller, or it is that of an owner that can send it no more.
    """

    length: int
    owners: set[WorkerId]
    copies: dict[WorkerId, LaneTurn | None] = field(default_factory=dict)

    @property
    def holders(self) -> set[WorkerId]:
        """Owners and workers with copies, arrived or not: the workers that have to free it."""
        return self.owners | self.copies.keys()


@dataclass(frozen=True, slots=True)
class Kept:
    """What journals have of a sample: their names, and the oldest version that generated a token of it.

    The worker that continues it reads all of them, and writes to one of its own, which comes first if it dies too.
    """

    journals: tuple[str, ...]
    oldest: int

    def after(self, journal: str, version: int) -> "Kept":
        """This, and what another worker may have written of the sample, which it generated with this version."""
        others = [other for other in self.journals if other != journal]
        return Kept((journal, *others)[:MAX_JOURNALS], min(self.oldest, version))


class Group:
    """The slots of one prompt, over which advantages are computed.

    ``at_least`` and ``at_most`` are the oldest and newest versions that may generate its samples; ``source`` is the
    worker that offered it; ``kept`` has what journals have of its samples, by member, until that is lost. ``holders``
    has every holder of a tensor of the group or its slots, and perhaps workers that no longer hold one.
    """

    __slots__ = (
        *("at_least", "at_most", "epoch", "flow", "holders", "id", "kept", "prompt", "slots", "source", "tensors"),
    )

    def __init__(
        self,
        group_id: GroupId,
        flow: str,
        prompt: int,
        epoch: int,
        at_least: int,
        at_most: int = NO_LIMIT,
        source: WorkerId = NO_SOURCE,
    ) -> None:
        self.id = group_id
        self.flow = flow
        self.prompt = prompt
        self.epoch = epoch
        self.at_least = at_least
        self.at_most = at_most
        self.source = source
        self.slots: list[Slot] = []
        self.tensors = NO_TENSORS
        self.kept = NOTHING_KEPT
        self.holders = NO_WORKERS

    def set_location(self, column: str, holding: ColumnLocation) -> None:
        """Add or replace a tensor column of the group."""
        self.tensors = {**self.tensors, column: holding}

    @property
    def is_exact(self) -> bool:
        """Whether one version, ``at_most``, has to generate each of its samples."""
        return self.at_most != NO_LIMIT

    def oldest_version(self) -> int | None:
        """The oldest version that generated a token of a sample, or with which a sample is being generated; None
        without such a sample.
        """
        oldest: int | None = None
        if self.kept:
            unfinished = [self.kept[slot.member].oldest for slot in self.slots if not slot.spans and slot.has_kept]
            oldest = min(unfinished, default=None)
        for slot in self.slots:
            if slot.spans:
                version = min(slot.spans[::2])
                oldest = version if oldest is None or version < oldest else oldest
            elif slot.leases:
                for lease in slot.leases.values():
                    if lease.version is not None and (oldest is None or lease.version < oldest):
                        oldest = lease.version
        return oldest


class Slot:
    """The controller's row for one sample.

    Hot path: no dataclass (five times slower to create), and columns share an empty dict before the first entry.
    """

    __slots__ = (
        *("attempt", "done", "group", "id", "inline", "leases", "member", "overdue", "spans", "spans_of", "tensors"),
    )

    def __init__(self, slot_id: SlotId, group: Group, member: int) -> None:
        self.id = slot_id
        self.group = group
        self.member = member  # its index in the group
        self.attempt = 0
        self.overdue = 0  # leases that expired
        self.tensors = NO_TENSORS
        self.inline = NO_NUMBERS
        self.spans: tuple[int, ...] = ()  # version, tokens, version, tokens, ...
        self.spans_of = ""  # the stage that generated
        self.done = 0  # one bit a stage, see Flows.bits
        self.leases: dict[str, Lease] = {}  # by stage

    def has(self, column: str) -> bool:
        """Whether the column exists, of the slot or of its group."""
        return column in self.tensors or column in self.inline or column in self.group.tensors

    def set_location(self, column: str, holding: ColumnLocation) -> None:
        """Add or replace a tensor column of the slot."""
        self.tensors = {**self.tensors, column: holding}

    def forget(self, column: str) -> ColumnLocation | None:
        """Remove a column; returns its location if it was a tensor."""
        self.inline = {name: value for name, value in self.inline.items() if name != column}
        held = self.tensors.get(column)
        self.tensors = {name: location for name, location in self.tensors.items() if name != column}
        return held

    @property
    def has_kept(self) -> bool:
        """Whether a journal has tokens of this sample."""
        return self.member in self.group.kept

    def note_kept(self, kept: Kept | None) -> None:
        """Replace what a journal has of this sample; None: nothing that can be used."""
        others = {member: other for member, other in self.group.kept.items() if member != self.member}
        self.group.kept = others if kept is None else {**others, self.member: kept}

    def holding(self, column: str) -> ColumnLocation | None:
        """The location of a tensor column of this slot or its group; None if it is inline or absent."""
        return self.tensors.get(column) or self.group.tensors.get(column)

    def oldest_version(self) -> int | None:
        """The oldest policy version that generated a token of this sample; None before it is generated."""
        return min(self.spans[::2], default=None)


def new_groups(
    flow: str,
    prompts: Sequence[int],
    epoch: int,
    members: int,
    at_least: int,
    group_id: int,
    slot_id: int,
    at_most: int = NO_LIMIT,
    source: WorkerId = NO_SOURCE,
) -> tuple[list[Group], list[Slot]]:
    """One group of ``members`` slots for each prompt, numbered from the given ids on; returns groups and slots."""
    if len(prompts) == 1:  # fast path: one prompt
        group = Group(GroupId(group_id), flow, prompts[0], epoch, at_least, at_most, source)
        group.slots = [Slot(SlotId(slot_id + member), group, member) for member in range(members)]
        return [group], [*group.slots]
    rows = len(prompts) * members
    group_ids = cast(Sequence[GroupId], range(group_id, group_id + len(prompts)))
    slot_ids = cast(Sequence[SlotId], range(slot_id, slot_id + rows))
    # Hot path: with keywords, creating a group takes three times as long.
    groups = [
        Group(number, flow, prompt, epoch, at_least, at_most, source)
        for number, prompt in zip(group_ids, prompts, strict=True)
    ]
    if members == 1:  # as in a stream
        slots = [Slot(number, group, 0) for number, group in zip(slot_ids, groups, strict=True)]
        for group, slot in zip(groups, slots, strict=True):
            group.slots = [slot]
        return groups, slots
    slots = [
        Slot(number, group, member)
        for number, (group, member) in zip(slot_ids, product(groups, range(members)), strict=True)
    ]
    for group, start in zip(groups, range(0, rows, members), strict=True):
        group.slots = slots[start : start + members]
    return groups, slots
