"""Records that messages contain: packed numbers, columns, parts of columns, lane turns, prompt sets.

Sets of consumed prompts are packed as bitmaps (`pack`): a million consecutive prompts take 130 kB instead of 8 MB. Only
words with a set bit are kept, in runs of consecutive words, so prompts far apart (hashes) cost 24 bytes each.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from typing import Annotated

from flowrt.errors import RemoteProtocolError

Ints = Annotated[tuple[int, ...], "q"]
"""Whole numbers packed as little-endian int64."""
Floats = Annotated[tuple[float, ...], "d"]
"""Real numbers packed as little-endian float64."""


@dataclass(frozen=True, slots=True)
class SameLength:
    """Marks a column as long as that of an earlier field: if all its numbers are equal, only one is sent."""

    field: str


OfSlots = Annotated[Ints, SameLength("slots")]
OfIds = Annotated[Ints, SameLength("ids")]


ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}
"""The dtypes that a column may have, by their torch names, and their element sizes in bytes."""


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor column: 1-D, ragged, of one dtype; scope says whether a slot or its whole group has one."""

    name: str
    dtype: str
    scope: str  # "slot" or "group"


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the dataflow: a slot is ready for it as soon as every column in ``needs`` exists."""

    name: str
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    flow: str = ""  # only for groups of this flow; empty: of all
    whole_groups: bool = False  # slots of a group become ready, are leased and committed together
    generates: bool = False  # generates tokens with a policy version, so admission applies


@dataclass(slots=True, unsafe_hash=True)  # not frozen: construction of a frozen one takes three times as long
class ColumnLengths:
    """A tensor column of an offer: the number of elements of each prompt. The tensors stay with the source."""

    column: str
    lengths: Ints


@dataclass(slots=True, unsafe_hash=True)  # not frozen: construction of a frozen one takes three times as long
class Part:
    """Rows of a tensor column: ids of slots (or of groups, by the column's scope), and the elements of each row."""

    column: str
    ids: Ints
    lengths: OfIds


@dataclass(slots=True, unsafe_hash=True)  # not frozen: construction of a frozen one takes three times as long
class Values:
    """An inline column: one number for each slot, carried with the metadata."""

    column: str
    values: Floats


LARGEST_VALUE = 3e38
"""Bound on the numbers of an inline column: trainers compute in float32, of which the maximum is 3.4e38."""


def values_fault(columns: Iterable[Values]) -> str:
    """Why numbers of inline columns are invalid; empty if all are finite and fit a float32."""
    for one in columns:
        # Fast path: the norm is no smaller than any of the numbers, and infinite or NaN if one of them is.
        if hypot(*one.values) <= LARGEST_VALUE:
            continue
        for row, value in enumerate(one.values):
            if not -LARGEST_VALUE <= value <= LARGEST_VALUE:
                return f"column {one.column!r} has {value} at row {row}; a number must be finite and at most 3e38"
    return ""


NO_BASE = -1
NO_LIMIT = 2**63 - 1
"""The highest version of an offer that any later version may generate too."""
NO_VERSION = -1
"""Of a slot: any version that its offer allows may generate it, and more than one."""
KEPT_TOKENS = "kept_tokens"
"""Inline column of a train batch: the number of tokens of each sample to train, if steps have a token budget."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of a named model as buckets of these sizes: in full, or as a delta to the version ``base``."""

    model: str
    version: int
    base: int  # NO_BASE: the full version
    bucket_bytes: Ints
    checksum: int  # of the full version, also for a delta


MAX_SIGNAL_BYTES = 16 * 1024
"""Limit of the value of a `RendezvousKey`; the longest known, the root info of HCCL, has 4108 bytes."""
MAX_RECORD_BYTES = 256 * 1024
"""Limit of the bytes in a tuple of bytes: of a record of a sample, in `SampleRecords`."""
GONE = "gone"
"""Key of a `RendezvousKey` from the controller: the peer has left the run, and all lanes with it have ended."""


@dataclass(frozen=True, slots=True)
class LaneTurn:
    """One transfer of a lane; both ends issue transfers in the order of ``sequence``."""

    sender: str
    receiver: str
    kind: str  # "samples" or "weights"
    incarnation: int  # incremented each time the lane is opened again
    sequence: int
    transport: str  # "shm", "gloo", "nccl" or "hccl"; the same for a whole incarnation


@dataclass(frozen=True, slots=True)
class Incoming:
    """The parts that a worker receives in one turn of a lane, as one packed message."""

    turn: LaneTurn
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class BusySpan:
    """An interval of work, in seconds of the controller's clock."""

    kind: str
    start_s: float
    end_s: float
    worked_s: float = -1.0  # seconds of it that were work, the rest gaps between merged spans; -1: all of it
    rows: float = -1.0  # mean number of occupied rows of the engine; -1: unknown
    root: str = ""  # of a wait for tensors: the worker that sends them


@dataclass(frozen=True, slots=True)
class Passed:
    """Prompts of one epoch that are not to be offered again, as a bitmap (see `pack`)."""

    epoch: int
    starts: Ints  # index of the first word of each run of consecutive words
    counts: Ints  # words of each run
    words: Ints


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of an evaluation of one version on one data set."""

    name: str
    version: int
    numbers: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run continues: steps trained, prompts consumed, numbers of the summary so far, evaluations."""

    step: int = 0
    passed: tuple[Passed, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


WORD_BITS = 62
"""Prompts in a word: bit i of word w is prompt w x WORD_BITS + i. Words are sent as signed 64-bit integers."""
LARGEST_PROMPT = 2**63 - 1
"""The largest integer that messages and the ledger's database can hold."""


def prompts_fault(prompts: Iterable[int]) -> str:
    """Why these are not valid prompt numbers; empty if they are."""
    wrong = [prompt for prompt in prompts if not 0 <= prompt <= LARGEST_PROMPT]
    return f"prompt {wrong[0]} is not a number from 0 to 2^63 - 1" if wrong else ""


def pack(pairs: Iterable[tuple[int, int]]) -> tuple[Passed, ...]:
    """Pack (epoch, prompt) pairs as bitmaps; prompts count from 0."""
    bits: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for epoch, prompt in pairs:
        word, bit = divmod(prompt, WORD_BITS)
        bits[epoch][word] |= 1 << bit
    return tuple(_in_runs(epoch, words) for epoch, words in sorted(bits.items()))


def _in_runs(epoch: int, words: dict[int, int]) -> Passed:
    starts: list[int] = []
    counts: list[int] = []
    places = sorted(words)
    for place in places:
        if starts and place == starts[-1] + counts[-1]:
            counts[-1] += 1
        else:
            starts.append(place)
            counts.append(1)
    return Passed(epoch, tuple(starts), tuple(counts), tuple(words[place] for place in places))


def unpack(passed: Iterable[Passed]) -> dict[int, frozenset[int]]:
    """The prompts of each epoch. Raises RemoteProtocolError for bitmaps that `pack` does not produce."""
    found: dict[int, frozenset[int]] = {}
    for one in passed:
        fits = len(one.starts) == len(one.counts) and min(one.counts, default=1) > 0 <= min(one.starts, default=0)
        if not fits or sum(one.counts) != len(one.words) or any(not 0 <= word < 1 << WORD_BITS for word in one.words):
            raise RemoteProtocolError(f"the prompts of epoch {one.epoch} are not packed {WORD_BITS} a word")
        places = (start + at for start, count in zip(one.starts, one.counts, strict=True) for at in range(count))
        found[one.epoch] = frozenset(
            place * WORD_BITS + bit
            for place, word in zip(places, one.words, strict=True)
            for bit in range(WORD_BITS)
            if word >> bit & 1
        )
    return found
