"""The whole protocol: every message. A ``request`` is answered once, by a message with its number."""

from dataclasses import dataclass
from typing import get_args

from flowrt.wire.changes import Bye, Drain, Finished, Hello, Holds, Renew, Welcome
from flowrt.wire.records import (
    BusySpan,
    Incoming,
    Ints,
    LaneTurn,
    Lengths,
    OfSlots,
    Part,
    Values,
    Weights,
)

FOR_GOOD = -1  # number of a refusal that time does not change


@dataclass(slots=True)
class Heartbeat:
    """worker: still here (the controller answers with the same)."""


@dataclass(slots=True)
class Stop:
    """controller: the run is over, leave with this exit code; observer: end the run."""

    reason: str
    code: int


@dataclass(slots=True)
class Refused:
    """controller: request not granted, and why; of a hello, that it would be in vain to say it again."""

    request: int
    reason: str


@dataclass(slots=True)
class Offer:
    """source: prompts, each to become a group of ``members`` slots; all open at once, or the offer is parked."""

    request: int
    flow: str
    prompts: Ints
    epoch: int
    members: int
    at_least: int  # lowest policy version that may generate them; -1: the one after the last closed step
    lengths: tuple[Lengths, ...]  # group columns, a length a prompt
    tags: tuple[Values, ...]  # inline columns, a number a slot


@dataclass(slots=True)
class Exhausted:
    """source: all my prompts of this flow are open; an offer to train after this waits for the last step's end."""

    flow: str


@dataclass(slots=True)
class Opened:
    """controller: the offer is now the groups from ``first`` on; -1 when the run needs no more prompts."""

    request: int
    first: int


@dataclass(slots=True)
class Pull:
    """worker: room for ``slots`` slots or ``tokens`` tokens of a stage. Parked until there are some."""

    request: int
    stage: str
    slots: int
    tokens: int
    step: int  # the optimiser step the puller works on; -1 outside training
    done: Ints = ()  # leases of this stage, which makes nothing: all their slots are done


@dataclass(slots=True)
class Grant:
    """controller: these slots are leased to you; ``incoming`` brings what you do not hold yet."""

    request: int
    lease: int
    slots: Ints
    flows: tuple[str, ...]  # of each slot; one for all when they are the same
    groups: OfSlots
    members: OfSlots
    prompts: OfSlots
    epochs: OfSlots
    attempts: OfSlots
    spans: tuple[Ints, ...]  # a slot: version, tokens, version, tokens, …; none where nothing is generated yet
    inline: tuple[Values, ...]
    parts: tuple[Part, ...]
    incoming: tuple[Incoming, ...]
    closed: bool  # nothing more will come: of this step (train stage), of the stream
    refused: Ints = ()  # leases that the pull said were done, and that had ended before: their slots are served again


@dataclass(slots=True)
class Withdraw:
    """worker: forget this pull or offer if it is still parked (then it is refused, with what it waited for)."""

    request: int


@dataclass(slots=True)
class Commit:
    """worker: the stage is done for these slots; tensors stay with me, their lengths are in ``parts``."""

    request: int
    stage: str
    slots: Ints
    leases: OfSlots
    parts: tuple[Part, ...]
    inline: tuple[Values, ...]
    spans: tuple[Ints, ...]


@dataclass(slots=True)
class Committed:
    """controller: accepted, except the refused slots (their leases had ended)."""

    request: int
    refused: Ints
    reason: str


@dataclass(slots=True)
class Abandon:
    """worker: I give these leases back; ``lost``: nobody can make these samples, the run's policy decides."""

    stage: str
    slots: Ints
    leases: OfSlots
    lost: bool
    reason: str


@dataclass(slots=True)
class Free:
    """controller: drop these columns (empty: all) that you hold of these slots and groups."""

    columns: tuple[str, ...]
    slots: Ints
    groups: Ints


@dataclass(slots=True)
class StepDone:
    """trainer: the optimiser has stepped; everything leased to this step is trained."""

    step: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class Saved:
    """trainer: my state after ``step`` steps is written aside; `Committed` once the ledger is on disk too."""

    request: int
    step: int


@dataclass(slots=True)
class Serve:
    """controller to owner: send these parts over this turn of a lane."""

    turn: LaneTurn
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Undelivered:
    """receiver: this turn of a lane failed, its parts are not here."""

    incoming: Incoming
    reason: str


@dataclass(slots=True)
class Signal:
    """worker to worker, through the controller: one key of a lane's rendezvous."""

    peer: str
    lane: str
    key: str
    value: bytes


@dataclass(slots=True)
class Publish:
    """trainer: a new version is in my store, whole, and perhaps as changes to an earlier version too."""

    forms: tuple[Weights, ...]  # the first is the whole one
    divergence: tuple[tuple[int, float], ...]  # KL of earlier versions from this one, where it was measured


@dataclass(slots=True)
class ServeWeights:
    """controller to holder: send this version over this turn of a lane, as its buckets arrive if need be."""

    turn: LaneTurn
    model: str
    version: int
    base: int


@dataclass(slots=True)
class Fetch:
    """controller to receiver: this version is coming over this turn of a lane; stage it."""

    turn: LaneTurn
    weights: Weights


@dataclass(slots=True)
class Staged:
    """receiver: the version arrived whole and its checksum is right; others may fetch it from me."""

    model: str
    version: int


@dataclass(slots=True)
class FetchFailed:
    """receiver: the version did not arrive over this turn; the old one is whole and in use."""

    turn: LaneTurn
    weights: Weights
    reason: str


@dataclass(slots=True)
class Applied:
    """receiver: I generate with this version from now on."""

    model: str
    version: int


@dataclass(slots=True)
class Retire:
    """controller to holder: nobody will ask for this version again."""

    model: str
    version: int


@dataclass(slots=True)
class Report:
    """worker: what I did since the last report, what I wait for; ``numbers`` are results for the run's summary."""

    spans: tuple[BusySpan, ...]
    numbers: tuple[tuple[str, float], ...]
    waits: tuple[tuple[str, str, float, float], ...]  # for others: what, whose turn, age_s, limit_s


@dataclass(slots=True)
class Status:
    """controller to observers: the state of the run, JSON."""

    text: str


Message = (Hello | Welcome | Heartbeat | Finished | Bye | Stop | Refused | Offer | Exhausted | Opened | Pull | Grant
    | Withdraw | Commit | Committed | Abandon | Free | StepDone | Saved | Serve | Undelivered | Signal | Publish
    | ServeWeights | Fetch | Staged | FetchFailed | Applied | Retire | Report | Status
    | Drain | Renew | Holds)  # fmt: skip
MESSAGES: tuple[type[Message], ...] = get_args(Message)  # the position is the tag; a changed field raises PROTOCOL
PROTOCOL = 8  # said in the greeting; both sides must speak the same one
