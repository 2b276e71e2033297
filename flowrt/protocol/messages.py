"""The whole protocol: every message between the controller and its workers and observers.

- Each docstring begins with the sender.
- A message with a ``request`` number gets exactly one answer, which carries the same number.
- The position in `MESSAGES` is a message's tag, so new ones are appended.
- The records that messages contain come first: packed numbers, columns, parts of columns, lane turns, prompt sets.
- Sets of consumed prompts are packed as bitmaps (`pack`): a million consecutive prompts take 130 kB instead of 8 MB.
  Only words with a set bit are kept, in runs of consecutive words, so prompts far apart (hashes) cost 24 bytes each.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import hypot
from typing import Annotated, get_args

from flowrt.errors import RemoteProtocolError

# ---- records

Ints = Annotated[tuple[int, ...], "q"]
"""Whole numbers packed as little-endian int64."""
Floats = Annotated[tuple[float, ...], "d"]
"""Real numbers packed as little-endian float64."""


@dataclass(frozen=True, slots=True)
class SameLength:
    """Marks a column with as many numbers as the earlier field ``field``: if all are equal, only one is sent."""

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
    flow: str = ""  # only for groups of this flow; empty: of all flows
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
"""Bound on the numbers of an inline column: trainers compute in float32, whose maximum is 3.4e38."""


def values_fault(columns: Iterable[Values]) -> str:
    """Why numbers of inline columns are invalid; empty if all are finite and fit a float32."""
    for column in columns:
        # Fast path: the norm is no smaller than any of the numbers, and infinite or NaN if one of them is.
        if hypot(*column.values) <= LARGEST_VALUE:
            continue
        for row, value in enumerate(column.values):
            if not -LARGEST_VALUE <= value <= LARGEST_VALUE:
                return f"column {column.column!r} has {value} at row {row}; a number must be finite and at most 3e38"
    return ""


NO_BASE = -1
NO_LIMIT = 2**63 - 1
"""Value of `Offer.at_most`: no highest version."""
NO_VERSION = -1
"""Value of `Grant.exact`: any versions that the offer allows may generate the slot, also more than one."""
KEPT_TOKENS = "kept_tokens"
"""Inline column of a train batch: the number of tokens of each sample to train, if steps have a token budget."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of a named model as buckets of these sizes: in full, or as a delta to the version ``base``."""

    model: str
    version: int
    base: int  # NO_BASE: the full version
    bucket_bytes: Ints
    checksum: int  # CRC-32 of the full version, also for a delta


MAX_SIGNAL_BYTES = 16 * 1024
"""Limit of the value of a `RendezvousKey`; the longest known, the root info of HCCL, has 4108 bytes."""
MAX_RECORD_BYTES = 1024 * 1024
"""Limit of the bytes in a tuple of bytes: of packed spans, and of a record of a sample, in `SampleRecords`. A sample of
32,000 tokens has 200 to 400 KB."""
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


def prompts_fault(prompts: Sequence[int]) -> str:
    """Why these are not valid prompt numbers; empty if they are."""
    if not prompts or (min(prompts) >= 0 and max(prompts) <= LARGEST_PROMPT):
        return ""
    wrong = [prompt for prompt in prompts if not 0 <= prompt <= LARGEST_PROMPT]
    return f"prompt {wrong[0]} is not a number from 0 to 2^63 - 1"


def pack(pairs: Iterable[tuple[int, int]]) -> tuple[Passed, ...]:
    """Pack (epoch, prompt) pairs as bitmaps; prompts count from 0."""
    return pack_words((epoch, prompt // WORD_BITS, 1 << prompt % WORD_BITS) for epoch, prompt in pairs)


def pack_words(words: Iterable[tuple[int, int, int]]) -> tuple[Passed, ...]:
    """Pack words (epoch, index of the word, bits) as bitmaps; the bits of words that come more than once are joined."""
    by_epoch: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for epoch, word, bits in words:
        if bits:
            by_epoch[epoch][word] |= bits
    return tuple(_in_runs(epoch, of_epoch) for epoch, of_epoch in sorted(by_epoch.items()))


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


class PromptSet(Set[int]):
    """Prompts of one epoch, as words: ten million take 15 MB."""

    __slots__ = ("_words",)

    def __init__(self, words: Mapping[int, int]) -> None:
        self._words = words

    def __contains__(self, prompt: object) -> bool:
        return isinstance(prompt, int) and bool(self._words.get(prompt // WORD_BITS, 0) >> prompt % WORD_BITS & 1)

    def __iter__(self) -> Iterator[int]:
        for word, bits in self._words.items():
            yield from (word * WORD_BITS + bit for bit in range(WORD_BITS) if bits >> bit & 1)

    def __len__(self) -> int:
        return sum(map(int.bit_count, self._words.values()))

    def intersection(self, prompts: Iterable[int]) -> frozenset[int]:
        """Those of these prompts that are in the set."""
        return frozenset(prompt for prompt in prompts if prompt in self)

    @classmethod
    def _from_iterable(cls, prompts: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        return frozenset(prompts)


def unpack(passed: Iterable[Passed]) -> dict[int, PromptSet]:
    """The prompts of each epoch. Raises RemoteProtocolError for bitmaps that `pack` does not produce."""
    prompts: dict[int, PromptSet] = {}
    for bitmap in passed:
        fits = len(bitmap.starts) == len(bitmap.counts) and min(bitmap.counts, default=1) > 0 <= min(
            bitmap.starts, default=0
        )
        if (
            not fits
            or sum(bitmap.counts) != len(bitmap.words)
            or any(not 0 <= word < 1 << WORD_BITS for word in bitmap.words)
        ):
            raise RemoteProtocolError(f"the prompts of epoch {bitmap.epoch} are not packed {WORD_BITS} a word")
        places = (start + at for start, count in zip(bitmap.starts, bitmap.counts, strict=True) for at in range(count))
        prompts[bitmap.epoch] = PromptSet(dict(zip(places, bitmap.words, strict=True)))
    return prompts


# ---- messages


@dataclass(slots=True)
class Hello:
    """worker, observer: request to join; the first message of every connection."""

    protocol: int
    worker: str
    role: str
    host: str
    pid: int
    lanes: tuple[str, ...]  # supported transports, best first; "shm:SCOPE" only works between workers of the same scope
    term: int = 0  # of the controller that the worker was connected to before; 0: new worker
    clock: str = ""  # which monotonic clock the worker reads: equal names, equal clocks


@dataclass(slots=True)
class Welcome:
    """controller: the worker has joined; parameters of the run."""

    term: int  # incremented by each restart of the controller
    heartbeat_s: float
    request_timeout_s: float
    reconnect_timeout_s: float  # for how long a worker tries to reconnect
    transfer_idle_timeout_s: float  # a lane without progress for this time has failed
    min_transfer_mb_per_s: float  # a lane that is slower than this on average, after that time, has failed too
    store_bytes: int  # limit of a worker's tensor store; 0: no limit
    columns: tuple[Column, ...]
    renewable: tuple[str, ...]  # stages whose leases can be renewed after a restart of the controller
    config: str  # the run's resolved configuration, TOML
    position: Position  # where the run continues; consumed prompts are only sent to sources
    clock: str = ""  # which monotonic clock the controller reads
    journals: str = ""  # where rollout workers keep what they generate, in the run directory; empty: nowhere


@dataclass(slots=True)
class RoleCompleted:
    """worker: its role is complete."""


@dataclass(slots=True)
class Leave:
    """worker: leaves the run; ``error`` is empty unless it failed, ``code`` is its exit code."""

    error: str
    code: int = 0


@dataclass(slots=True)
class Drain:
    """observer, worker: request that ``worker`` leaves without losing a sample; controller: order to leave."""

    request: int
    worker: str


@dataclass(slots=True)
class RenewLease:
    """worker, after a restart of the controller: it still works on these slots, under an earlier lease."""

    lease: int
    stage: str
    step: int
    slots: Ints
    attempts: Ints


@dataclass(slots=True)
class Inventory:
    """worker, after a restart of the controller: the tensors and versions it holds; ends the resynchronisation."""

    parts: tuple[Part, ...]
    weights: tuple[Weights, ...]


PERMANENT = -1
"""Request number of a `Rejected` answer to a hello that would be rejected again."""
NAME_TAKEN = -2
"""Request number of a `Rejected` answer to a hello whose name another worker has, which may leave."""


@dataclass(slots=True)
class Heartbeat:
    """worker, observer: its event loop runs; the controller answers with the same message and its own time."""

    sent_s: float = 0.0  # on the sender's monotonic clock; 0: unknown
    reported_s: float = 0.0  # the sender has reported its work up to this time of the controller's clock
    answered_s: float = 0.0  # on the controller's clock; 0 before the answer
    advances: bool = False  # whether the sender's work has advanced since its last heartbeat: extends its leases


@dataclass(slots=True)
class Stop:
    """controller: the run has ended, with this exit code; observer: end the run."""

    reason: str
    code: int


@dataclass(slots=True)
class Rejected:
    """controller: the request is refused; ``request`` is PERMANENT for a hello that is never accepted, and
    NAME_TAKEN for one that may be accepted later."""

    request: int
    reason: str


@dataclass(slots=True)
class Offer:
    """source: prompts, each to become a group of ``members`` slots; all are opened at once, or the offer is parked."""

    request: int
    flow: str
    prompts: Ints
    epoch: int
    members: int
    at_least: int  # lowest policy version that may generate them; -1: the version that the last closed step made
    lengths: tuple[ColumnLengths, ...]  # group columns, one length for each prompt
    tags: tuple[Values, ...]  # inline columns, one number for each slot
    at_most: int = NO_LIMIT  # or equal to ``at_least``: the only version that may generate them


@dataclass(slots=True)
class EndOfData:
    """source: all its prompts of this flow are open; a later offer to train waits for the end of the last step."""

    flow: str


@dataclass(slots=True)
class OfferAccepted:
    """controller: the prompts are groups ``first``, ``first`` + 1, ...; -1 if the run needs no more prompts, or no
    worker has the version ``at_most`` of the offer any more."""

    request: int
    first: int


@dataclass(slots=True)
class Pull:
    """worker: request for up to ``slots`` slots or ``tokens`` tokens of a stage; parked until some are ready."""

    request: int
    stage: str
    slots: int
    tokens: int
    step: int  # the optimiser step that the worker works on; -1 outside training
    done: Ints = ()  # leases of a stage without output columns of which all slots are done


@dataclass(slots=True)
class Grant:
    """controller: these slots are leased to the worker; ``incoming`` has the transfers of tensors that it lacks."""

    request: int
    lease: int
    slots: Ints
    flows: tuple[str, ...]  # of each slot; a single item if all are the same
    groups: OfSlots
    members: OfSlots
    prompts: OfSlots
    epochs: OfSlots
    attempts: OfSlots
    spans: tuple[Ints, ...]  # of each slot: version, tokens, version, tokens, ...; empty if nothing is generated yet
    inline: tuple[Values, ...]
    parts: tuple[Part, ...]
    incoming: tuple[Incoming, ...]
    closed: bool  # no more slots will be ready, of this step (train stage) or of the stream
    refused: Ints = ()  # of the pull's ``done``: leases that had ended before, so that their slots are granted again
    exact: Ints = ()  # of each slot: the version that has to generate all of it, or -1; empty if none has one
    kept: tuple[str, ...] = ()  # of each slot: the journals that may have tokens of it, one a line; empty if none has


@dataclass(slots=True)
class CancelRequest:
    """worker: cancel this pull or offer if it is still parked; `Rejected` then says what the request waited for."""

    request: int


@dataclass(slots=True)
class Commit:
    """worker: the stage is done for these slots; tensors stay with the worker, ``parts`` has their lengths."""

    request: int
    stage: str
    slots: Ints
    leases: OfSlots
    parts: tuple[Part, ...]
    inline: tuple[Values, ...]
    spans: tuple[Ints, ...]


@dataclass(slots=True)
class Committed:
    """controller: the commit is accepted, except for the refused slots, whose leases had ended."""

    request: int
    refused: Ints
    reason: str


@dataclass(slots=True)
class ReleaseLease:
    """worker: end these leases without a result; ``lost``: the samples cannot be made, and a policy decides on them."""

    stage: str
    slots: Ints
    leases: OfSlots
    lost: bool
    reason: str


@dataclass(slots=True)
class ReleaseTensors:
    """controller: drop these columns (empty: all) of these slots and groups from the store."""

    columns: tuple[str, ...]
    slots: Ints
    groups: Ints


@dataclass(slots=True)
class StepCompleted:
    """trainer: the optimiser step is complete; all samples leased to it are trained."""

    step: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class CheckpointWritten:
    """trainer: its state after ``step`` steps is on disk; answered by `Committed` once the ledger is too."""

    request: int
    step: int


@dataclass(slots=True)
class SendSamples:
    """controller to owner: send these parts in this turn of a lane."""

    turn: LaneTurn
    parts: tuple[Part, ...]


@dataclass(slots=True)
class TransferFailed:
    """receiver: this turn of a lane failed; its parts have not arrived."""

    incoming: Incoming
    reason: str
    is_full: bool = False  # the receiver had no room for the parts: neither the sender nor the link has failed


@dataclass(slots=True)
class RendezvousKey:
    """worker to worker, through the controller: one key of the rendezvous of a lane."""

    peer: str
    lane: str
    key: str
    value: bytes


@dataclass(slots=True)
class RetireLane:
    """worker: this lane is idle after this turn, and too many are open; controller: close it, with both ends in order.

    The controller ignores the request if it has issued a later turn.
    """

    turn: LaneTurn


@dataclass(slots=True)
class Publish:
    """trainer: a new version can be fetched from it, in full and possibly as a delta to an earlier version."""

    forms: tuple[Weights, ...]  # the first is the full version
    divergence: tuple[tuple[int, float], ...]  # (earlier version, KL from this one), where measured


@dataclass(slots=True)
class SendWeights:
    """controller to holder: send this version in this turn of a lane, even while it is still arriving."""

    turn: LaneTurn
    model: str
    version: int
    base: int  # NO_BASE: the full version
    first: int = 0  # the first chunk to send; the receiver has those before it


@dataclass(slots=True)
class ReceiveWeights:
    """controller to receiver: receive this version in this turn of a lane, and stage it."""

    turn: LaneTurn
    weights: Weights
    older: bool = False  # use it in place of a newer version, to generate the samples of an evaluation
    first: int = 0  # the first chunk that comes; the receiver has those before it of an earlier turn that failed


@dataclass(slots=True)
class WeightsStaged:
    """receiver: the version has arrived in full and its checksum matches; others may fetch it from this worker."""

    model: str
    version: int


@dataclass(slots=True)
class WeightsArriving:
    """receiver: an eighth of a version has arrived in this turn of a lane."""

    turn: LaneTurn
    model: str


@dataclass(slots=True)
class StopFetch:
    """controller to receiver: fail this turn of a lane, which is slow; another source follows."""

    turn: LaneTurn


@dataclass(slots=True)
class FetchFailed:
    """receiver: the version did not arrive in this turn of a lane; the worker continues with the old one."""

    turn: LaneTurn
    weights: Weights
    reason: str
    received: int = 0  # chunks that it keeps, to go on from in a later turn; 0: none, and what it relays fails too


@dataclass(slots=True)
class WeightsActivated:
    """receiver: it generates with this version from now on."""

    model: str
    version: int


@dataclass(slots=True)
class EvictVersion:
    """controller to holder: drop this version; no worker will fetch it again."""

    model: str
    version: int


@dataclass(slots=True)
class GroupsDropped:
    """controller to source: these groups, which it has offered to a flow that is not trained, are given up."""

    groups: Ints
    reason: str


@dataclass(slots=True)
class Evaluated:
    """source: results of an evaluation, repeated after a restart of the controller; controller to trainers: the same.

    Without numbers the version could not be evaluated. An empty name: no evaluation follows.
    """

    name: str
    version: int
    numbers: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class Report:
    """worker: busy spans since the last report, open waits, results for the summary of the run (``numbers``), and what
    it uses."""

    spans: tuple[bytes, ...]  # on the controller's clock, packed by `flowrt.protocol.spans.pack_spans`
    numbers: tuple[tuple[str, float], ...]
    waits: tuple[tuple[str, str, float, float], ...]  # for other workers: (what, blocked on, age in s, limit in s)
    resources: bytes = b""  # packed by `flowrt.protocol.resources.pack_use`; empty: as reported before


@dataclass(slots=True)
class SampleRecords:
    """rollout, reward, trainer: records of stored samples, see `flowrt.protocol.sample_records`; at most 1 MiB."""

    records: tuple[bytes, ...]


@dataclass(slots=True)
class Status:
    """controller to observers: the state of the run, as JSON."""

    text: str


@dataclass(slots=True)
class Follow:
    """observer to controller: say in each status which of these workers are in the run; see `Status`.

    A status lists only some of the workers of a large run.
    """

    workers: tuple[str, ...]
    unjoined: tuple[tuple[str, str], ...]  # processes that it has started, and why their workers are not in the run


@dataclass(slots=True)
class Notice:
    """observer: write this to events.jsonl; ``kind`` is exporter or warning."""

    kind: str
    text: str


Message = (
    Hello
    | Welcome
    | Heartbeat
    | RoleCompleted
    | Leave
    | Stop
    | Rejected
    | Offer
    | EndOfData
    | OfferAccepted
    | Pull
    | Grant
    | CancelRequest
    | Commit
    | Committed
    | ReleaseLease
    | ReleaseTensors
    | StepCompleted
    | CheckpointWritten
    | SendSamples
    | TransferFailed
    | RendezvousKey
    | Publish
    | SendWeights
    | ReceiveWeights
    | WeightsStaged
    | FetchFailed
    | WeightsActivated
    | EvictVersion
    | Report
    | Status
    | Drain
    | RenewLease
    | Inventory
    | GroupsDropped
    | Evaluated
    | SampleRecords
    | Notice
    | Follow
    | RetireLane
    | WeightsArriving
    | StopFetch
)
MESSAGES: tuple[type[Message], ...] = get_args(Message)
PROTOCOL = 18
"""Version of the protocol; the one in `Hello` must match. A changed field increments it."""
