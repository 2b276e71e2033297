"""The whole protocol: every message between the controller and its workers and observers.

- Each docstring begins with the sender.
- A message with a ``request`` number gets exactly one answer, which carries the same number.
- Each message has a tag of its own; a new one takes the next number, and is appended to `Message`.
- The records that messages contain come first: columns, parts of columns, lane turns, prompt sets.
- Sets of consumed prompts are packed as bitmaps (`pack`): a million consecutive prompts take 145 kB instead of 5 MB.
  Only words with a set bit are kept, in runs of consecutive words, so prompts far apart (hashes) cost 19 bytes each.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import hypot
from typing import Annotated, dataclass_transform, get_args

from msgspec import Meta, Struct

from flowrt.errors import RemoteProtocolError

# ---- records


@dataclass_transform(frozen_default=True)
class ProtocolRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What `flowrt.protocol.codec` encodes, as an array of its fields; a message is one with a tag.

    The garbage collector need not look at it: it is made of tuples, so that it is part of no reference cycle.
    """


Int = Annotated[int, Meta(le=2**63 - 1)]
"""A whole number of 64 bits, the range of SQLite's."""
Ints = tuple[Int, ...]
Floats = tuple[float, ...]
MAX_SIGNAL_BYTES = 16 * 1024
"""Limit of the value of a `RendezvousKey`; the longest known, the root info of HCCL, has 4108 bytes."""
MAX_RECORD_BYTES = 1024 * 1024
"""Limit of the bytes in a tuple of bytes: of packed spans, and of a record of a sample, in `SampleRecords`. A sample of
32,000 tokens has 200 to 400 KB."""
SignalBytes = Annotated[bytes, Meta(max_length=MAX_SIGNAL_BYTES)]
RecordBytes = Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}
"""The dtypes that a column may have, by their torch names, and their element sizes in bytes."""


class Column(ProtocolRecord):
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


class ColumnLengths(ProtocolRecord):
    """A tensor column of an offer: the number of elements of each prompt. The tensors stay with the source."""

    column: str
    lengths: Ints


class Part(ProtocolRecord):
    """Rows of a tensor column: ids of slots (or of groups, by the column's scope), and the elements of each row."""

    column: str
    ids: Ints
    lengths: Ints


class Values(ProtocolRecord):
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


class Weights(ProtocolRecord):
    """A version of a named model as buckets of these sizes: in full, or as a delta to the version ``base``."""

    model: str
    version: Int
    base: Int  # NO_BASE: the full version
    bucket_bytes: Ints
    checksum: Int  # CRC-32 of the full version, also for a delta


GONE = "gone"
"""Key of a `RendezvousKey` from the controller: the peer has left the run, and all lanes with it have ended."""


class LaneTurn(ProtocolRecord):
    """One transfer of a lane; both ends issue transfers in the order of ``sequence``."""

    sender: str
    receiver: str
    kind: str  # "samples" or "weights"
    incarnation: Int  # incremented each time the lane is opened again
    sequence: Int
    transport: str  # "shm", "gloo", "nccl" or "hccl"; the same for a whole incarnation


class Incoming(ProtocolRecord):
    """The parts that a worker receives in one turn of a lane, as one packed message."""

    turn: LaneTurn
    parts: tuple[Part, ...]


class Passed(ProtocolRecord):
    """Prompts of one epoch that are not to be offered again, as a bitmap (see `pack`)."""

    epoch: Int
    starts: Ints  # index of the first word of each run of consecutive words
    counts: Ints  # words of each run
    words: Ints


class Evaluation(ProtocolRecord):
    """The results of an evaluation of one version on one data set."""

    name: str
    version: Int
    numbers: tuple[tuple[str, float], ...]


class Position(ProtocolRecord):
    """Where a run continues: steps trained, prompts consumed, numbers of the summary so far, evaluations."""

    step: Int = 0
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


class Hello(ProtocolRecord, tag=0):
    """worker, observer: request to join; the first message of every connection."""

    protocol: Int
    worker: str
    role: str
    host: str
    pid: Int
    lanes: tuple[str, ...]  # supported transports, best first; "shm:SCOPE" only works between workers of the same scope
    term: Int = 0  # of the controller that the worker was connected to before; 0: new worker
    clock: str = ""  # which monotonic clock the worker reads: equal names, equal clocks


class Welcome(ProtocolRecord, tag=1):
    """controller: the worker has joined; parameters of the run."""

    term: Int  # incremented by each restart of the controller
    heartbeat_s: float
    request_timeout_s: float
    reconnect_timeout_s: float  # for how long a worker tries to reconnect
    transfer_idle_timeout_s: float  # a lane without progress for this time has failed
    min_transfer_mb_per_s: float  # a lane that is slower than this on average, after that time, has failed too
    store_bytes: Int  # limit of a worker's tensor store; 0: no limit
    columns: tuple[Column, ...]
    renewable: tuple[str, ...]  # stages whose leases can be renewed after a restart of the controller
    config: str  # the run's resolved configuration, TOML
    position: Position  # where the run continues; consumed prompts are only sent to sources
    clock: str = ""  # which monotonic clock the controller reads
    journals: str = ""  # where rollout workers keep what they generate, in the run directory; empty: nowhere


class RoleCompleted(ProtocolRecord, tag=3):
    """worker: its role is complete."""


class Leave(ProtocolRecord, tag=4):
    """worker: leaves the run; ``error`` is empty unless it failed, ``code`` is its exit code."""

    error: str
    code: Int = 0


class Drain(ProtocolRecord, tag=31):
    """observer, worker: request that ``worker`` leaves without losing a sample; controller: order to leave."""

    request: Int
    worker: str


class RenewLease(ProtocolRecord, tag=32):
    """worker, after a restart of the controller: it still works on these slots, under an earlier lease."""

    lease: Int
    stage: str
    step: Int
    slots: Ints
    attempts: Ints


class Inventory(ProtocolRecord, tag=33):
    """worker, after a restart of the controller: the tensors and versions it holds; ends the resynchronisation."""

    parts: tuple[Part, ...]
    weights: tuple[Weights, ...]


PERMANENT = -1
"""Request number of a `Rejected` answer to a hello that would be rejected again."""
NAME_TAKEN = -2
"""Request number of a `Rejected` answer to a hello whose name another worker has, which may leave."""


class Heartbeat(ProtocolRecord, tag=2):
    """worker, observer: its event loop runs; the controller answers with the same message and its own time."""

    sent_s: float = 0.0  # on the sender's monotonic clock; 0: unknown
    reported_s: float = 0.0  # the sender has reported its work up to this time of the controller's clock
    answered_s: float = 0.0  # on the controller's clock; 0 before the answer
    advances: bool = False  # whether the sender's work has advanced since its last heartbeat: extends its leases


class Stop(ProtocolRecord, tag=5):
    """controller: the run has ended, with this exit code; observer: end the run."""

    reason: str
    code: Int


class Rejected(ProtocolRecord, tag=6):
    """controller: the request is refused; ``request`` is PERMANENT for a hello that is never accepted, and
    NAME_TAKEN for one that may be accepted later."""

    request: Int
    reason: str


class Offer(ProtocolRecord, tag=7):
    """source: prompts, each to become a group of ``members`` slots; all are opened at once, or the offer is parked."""

    request: Int
    flow: str
    prompts: Ints
    epoch: Int
    members: Int
    at_least: Int  # lowest policy version that may generate them; -1: the version that the last closed step made
    lengths: tuple[ColumnLengths, ...]  # group columns, one length for each prompt
    tags: tuple[Values, ...]  # inline columns, one number for each slot
    at_most: Int = NO_LIMIT  # or equal to ``at_least``: the only version that may generate them


class EndOfData(ProtocolRecord, tag=8):
    """source: all its prompts of this flow are open; a later offer to train waits for the end of the last step."""

    flow: str


class OfferAccepted(ProtocolRecord, tag=9):
    """controller: the prompts are groups ``first``, ``first`` + 1, ...; -1 if the run needs no more prompts, or no
    worker has the version ``at_most`` of the offer any more."""

    request: Int
    first: Int


class Pull(ProtocolRecord, tag=10):
    """worker: request for up to ``slots`` slots or ``tokens`` tokens of a stage; parked until some are ready."""

    request: Int
    stage: str
    slots: Int
    tokens: Int
    step: Int  # the optimiser step that the worker works on; -1 outside training
    done: Ints = ()  # leases of a stage without output columns of which all slots are done


class Grant(ProtocolRecord, tag=11):
    """controller: these slots are leased to the worker; ``incoming`` has the transfers of tensors that it lacks."""

    request: Int
    lease: Int
    slots: Ints
    flows: tuple[str, ...]  # of each slot; a single item if all are the same
    groups: Ints
    members: Ints
    prompts: Ints
    epochs: Ints
    attempts: Ints
    spans: tuple[Ints, ...]  # of each slot: version, tokens, version, tokens, ...; empty if nothing is generated yet
    inline: tuple[Values, ...]
    parts: tuple[Part, ...]
    incoming: tuple[Incoming, ...]
    closed: bool  # no more slots will be ready, of this step (train stage) or of the stream
    refused: Ints = ()  # of the pull's ``done``: leases that had ended before, so that their slots are granted again
    exact: Ints = ()  # of each slot: the version that has to generate all of it, or -1; empty if none has one
    kept: tuple[str, ...] = ()  # of each slot: the journals that may have tokens of it, one a line; empty if none has


class CancelRequest(ProtocolRecord, tag=12):
    """worker: cancel this pull or offer if it is still parked; `Rejected` then says what the request waited for."""

    request: Int


class Commit(ProtocolRecord, tag=13):
    """worker: the stage is done for these slots; tensors stay with the worker, ``parts`` has their lengths."""

    request: Int
    stage: str
    slots: Ints
    leases: Ints
    parts: tuple[Part, ...]
    inline: tuple[Values, ...]
    spans: tuple[Ints, ...]


class Committed(ProtocolRecord, tag=14):
    """controller: the commit is accepted, except for the refused slots, whose leases had ended."""

    request: Int
    refused: Ints
    reason: str


class ReleaseLease(ProtocolRecord, tag=15):
    """worker: end these leases without a result; ``lost``: the samples cannot be made, and a policy decides on them."""

    stage: str
    slots: Ints
    leases: Ints
    lost: bool
    reason: str


class ReleaseTensors(ProtocolRecord, tag=16):
    """controller: drop these columns (empty: all) of these slots and groups from the store."""

    columns: tuple[str, ...]
    slots: Ints
    groups: Ints


class StepCompleted(ProtocolRecord, tag=17):
    """trainer: the optimiser step is complete; all samples leased to it are trained."""

    step: Int
    metrics: tuple[tuple[str, float], ...]


class CheckpointWritten(ProtocolRecord, tag=18):
    """trainer: its state after ``step`` steps is on disk; answered by `Committed` once the ledger is too."""

    request: Int
    step: Int


class SendSamples(ProtocolRecord, tag=19):
    """controller to owner: send these parts in this turn of a lane."""

    turn: LaneTurn
    parts: tuple[Part, ...]


class TransferFailed(ProtocolRecord, tag=20):
    """receiver: this turn of a lane failed; its parts have not arrived."""

    incoming: Incoming
    reason: str
    is_full: bool = False  # the receiver had no room for the parts: neither the sender nor the link has failed


class RendezvousKey(ProtocolRecord, tag=21):
    """worker to worker, through the controller: one key of the rendezvous of a lane."""

    peer: str
    lane: str
    key: str
    value: SignalBytes


class RetireLane(ProtocolRecord, tag=39):
    """worker: this lane is idle after this turn, and too many are open; controller: close it, with both ends in order.

    The controller ignores the request if it has issued a later turn.
    """

    turn: LaneTurn


class Publish(ProtocolRecord, tag=22):
    """trainer: a new version can be fetched from it, in full and possibly as a delta to an earlier version."""

    forms: tuple[Weights, ...]  # the first is the full version
    divergence: tuple[tuple[Int, float], ...]  # (earlier version, KL from this one), where measured


class SendWeights(ProtocolRecord, tag=23):
    """controller to holder: send this version in this turn of a lane, even while it is still arriving."""

    turn: LaneTurn
    model: str
    version: Int
    base: Int  # NO_BASE: the full version
    first: Int = 0  # the first chunk to send; the receiver has those before it


class ReceiveWeights(ProtocolRecord, tag=24):
    """controller to receiver: receive this version in this turn of a lane, and stage it."""

    turn: LaneTurn
    weights: Weights
    older: bool = False  # use it in place of a newer version, to generate the samples of an evaluation
    first: Int = 0  # the first chunk that comes; the receiver has those before it of an earlier turn that failed


class WeightsStaged(ProtocolRecord, tag=25):
    """receiver: the version has arrived in full and its checksum matches; others may fetch it from this worker."""

    model: str
    version: Int


class WeightsArriving(ProtocolRecord, tag=40):
    """receiver: an eighth of a version has arrived in this turn of a lane."""

    turn: LaneTurn
    model: str


class StopFetch(ProtocolRecord, tag=41):
    """controller to receiver: fail this turn of a lane, which is slow; another source follows."""

    turn: LaneTurn


class FetchFailed(ProtocolRecord, tag=26):
    """receiver: the version did not arrive in this turn of a lane; the worker continues with the old one."""

    turn: LaneTurn
    weights: Weights
    reason: str
    received: Int = 0  # chunks that it keeps, to go on from in a later turn; 0: none, and what it relays fails too


class WeightsActivated(ProtocolRecord, tag=27):
    """receiver: it generates with this version from now on."""

    model: str
    version: Int


class EvictVersion(ProtocolRecord, tag=28):
    """controller to holder: drop this version; no worker will fetch it again."""

    model: str
    version: Int


class GroupsDropped(ProtocolRecord, tag=34):
    """controller to source: these groups, which it has offered to a flow that is not trained, are given up."""

    groups: Ints
    reason: str


class Evaluated(ProtocolRecord, tag=35):
    """source: results of an evaluation, repeated after a restart of the controller; controller to trainers: the same.

    Without numbers the version could not be evaluated. An empty name: no evaluation follows.
    """

    name: str
    version: Int
    numbers: tuple[tuple[str, float], ...]


class Report(ProtocolRecord, tag=29):
    """worker: busy spans since the last report, open waits, results for the summary of the run (``numbers``), and what
    it uses."""

    spans: tuple[RecordBytes, ...]  # on the controller's clock, packed by `flowrt.protocol.spans.pack_spans`
    numbers: tuple[tuple[str, float], ...]
    waits: tuple[tuple[str, str, float, float], ...]  # for other workers: (what, blocked on, age in s, limit in s)
    resources: SignalBytes = b""  # packed by `flowrt.protocol.resources.pack_use`; empty: as reported before


class SampleRecords(ProtocolRecord, tag=36):
    """rollout, reward, trainer: records of stored samples, see `flowrt.protocol.sample_records`; at most 1 MiB."""

    records: tuple[RecordBytes, ...]


class Status(ProtocolRecord, tag=30):
    """controller to observers: the state of the run, as JSON."""

    text: str


class Follow(ProtocolRecord, tag=38):
    """observer to controller: say in each status which of these workers are in the run; see `Status`.

    A status lists only some of the workers of a large run.
    """

    workers: tuple[str, ...]
    unjoined: tuple[tuple[str, str], ...]  # processes that it has started, and why their workers are not in the run


class Notice(ProtocolRecord, tag=37):
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
PROTOCOL = 19
"""Version of the protocol; the one in `Hello` must match. A changed field increments it."""
