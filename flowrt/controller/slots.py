"""Slots and groups: what exists of each sample, who holds it, who works on it. Plain state, no policy."""

from dataclasses import dataclass, field

from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.wire.records import LaneTurn

NO_STEP = -1


@dataclass(slots=True)
class Lease:
    """The right to work on one stage of one slot until a deadline."""

    id: LeaseId
    slot: SlotId
    stage: str
    worker: WorkerId
    deadline_s: float
    version: int  # policy version the worker had applied when it was granted
    step: int  # optimiser step it is for; NO_STEP outside training


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


@dataclass(slots=True)
class Slot:
    """The controller's row for one sample."""

    id: SlotId
    group: "Group"
    member: int
    attempt: int = 0
    tensors: dict[str, Holding] = field(default_factory=dict)
    inline: dict[str, float] = field(default_factory=dict)
    spans: tuple[int, ...] = ()  # version, tokens, version, tokens, …
    spans_of: str = ""  # the stage that generated
    done: set[str] = field(default_factory=set)
    leases: dict[str, Lease] = field(default_factory=dict)

    def has(self, column: str) -> bool:
        return column in self.tensors or column in self.inline or column in self.group.tensors

    def holding(self, column: str) -> Holding | None:
        """Who has a tensor column of this slot or of its group; None for what is inline or not there."""
        return self.tensors.get(column) or self.group.tensors.get(column)

    def oldest_version(self) -> int | None:
        """The oldest policy version that made a token of this sample; None before there is any."""
        return min(self.spans[::2], default=None)


@dataclass(slots=True)
class Group:
    """The slots of one prompt, over which advantages are computed."""

    id: GroupId
    flow: str
    prompt: int
    epoch: int
    at_least: int
    slots: list[Slot] = field(default_factory=list)
    tensors: dict[str, Holding] = field(default_factory=dict)

    def oldest_version(self) -> int | None:
        """Oldest version of any finished member, or that a running member may have started with."""
        versions = [version for slot in self.slots if (version := slot.oldest_version()) is not None]
        versions += [lease.version for slot in self.slots if not slot.spans for lease in slot.leases.values()]
        return min(versions, default=None)
