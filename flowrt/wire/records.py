"""What messages are made of: packed numbers, columns, parts of columns, turns of lanes."""

from dataclasses import dataclass
from typing import Annotated

Ints = Annotated[tuple[int, ...], "q"]
"""Whole numbers packed as little-endian int64."""
Floats = Annotated[tuple[float, ...], "d"]
"""Real numbers packed as little-endian float64."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Marks numbers of which there are as many as in an earlier field: where all are the same, one is sent for all."""

    field: str


OfSlots = Annotated[Ints, Alike("slots")]
OfIds = Annotated[Ints, Alike("ids")]


ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}
"""The dtypes that a column may have, by torch's names, and the size of an element."""


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor column: 1-D, ragged, of one dtype; scope says whether a slot or its whole group has one."""

    name: str
    dtype: str
    scope: str  # "slot" or "group"


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the dataflow: ready as soon as every column in ``needs`` exists."""

    name: str
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    flow: str = ""  # only groups of this flow; empty: all
    whole_groups: bool = False  # ready only when all slots of the group are, and leased together
    generates: bool = False  # makes tokens with a policy version: admission decides who may start


@dataclass(slots=True, unsafe_hash=True)  # not frozen: many are made, and that takes three times as long
class Lengths:
    """A tensor column that stays with whoever offers it: how many elements each prompt has."""

    column: str
    lengths: Ints


@dataclass(slots=True, unsafe_hash=True)  # not frozen: many are made, and that takes three times as long
class Part:
    """A run of one tensor column: ids of slots (or of groups, by the column's scope) and elements of each."""

    column: str
    ids: Ints
    lengths: OfIds


@dataclass(slots=True, unsafe_hash=True)  # not frozen: many are made, and that takes three times as long
class Values:
    """An inline column: one number a slot, carried with the metadata."""

    column: str
    values: Floats


NO_BASE = -1
KEPT_TOKENS = "kept_tokens"
"""Inline column of a trainer's batch: how many tokens of each sample are trained, when steps are cut to a budget."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of a named model: buckets of these sizes, whole or as changes to the version ``base``."""

    model: str
    version: int
    base: int  # NO_BASE: whole
    bucket_bytes: Ints
    checksum: int  # of the whole version, however it travels


MAX_SIGNAL_BYTES = 16 * 1024
"""Of the value of a `Signal`, a lane's rendezvous key; the longest that is known, the root info of HCCL, has 4108."""
GONE = "gone"
"""The key of a `Signal` from the controller itself: the peer has left the run, and all lanes with it are void."""


@dataclass(frozen=True, slots=True)
class LaneTurn:
    """The next transfer of a lane: both ends issue transfers in the order of ``sequence``."""

    sender: str
    receiver: str
    kind: str  # "samples" or "weights"
    incarnation: int  # grows each time the lane is made anew
    sequence: int
    transport: str  # "shm", "gloo", "nccl" or "hccl": the same for a whole incarnation


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a puller receives over one turn of a lane: one packed message."""

    turn: LaneTurn
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class BusySpan:
    """A stretch of work, in seconds of the host's monotonic clock."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Passed:
    """Prompts of one epoch that are not to be offered again, packed as `positions` does."""

    epoch: int
    words: Ints


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run goes on: steps that are trained, prompts that are done with, and numbers of the summary so far."""

    step: int = 0
    passed: tuple[Passed, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
