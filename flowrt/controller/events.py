"""What the mind hears and what it says: events in, commands out."""

from dataclasses import dataclass

from flowrt.controller.walk import Entry
from flowrt.ids import WorkerId
from flowrt.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker said hello and was let in."""

    worker: WorkerId
    role: str
    host: str
    lanes: tuple[str, ...] = ()
    term: int = 0  # of the controller that it was with before; 0: it is new


@dataclass(slots=True)  # not frozen: one is made for every message, and that takes three times as long
class Said:
    """A worker that is in sent a message."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker is no longer there (left, died, silent too long)."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: look at the deadlines."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A worker that has said nothing was there all the same, then: its process answered below its interpreter."""

    worker: WorkerId
    at_s: float


@dataclass(frozen=True, slots=True)
class Suspend:
    """The run was told to end, and to be gone on with later: what it has trained is to be saved first, if it can be."""

    reason: str
    code: int
    kept: int = 0  # steps that the newest checkpoint is known to have


Event = Joined | Said | Gone | Alive | Tick | Suspend


@dataclass(slots=True)  # not frozen: one is made for every message, and that takes three times as long
class Send:
    """Send this message to this worker."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The worker counts as gone although it may still be there: tell it so, and hear it no more."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """A prompt changed its state; write it into the ledger."""

    prompt: int
    epoch: int
    state: str  # in_flight, ready, leased, trained, dropped; unread again when its source left with it
    step: int
    reason: str = ""


@dataclass(slots=True)  # not frozen: one is made for every commit, and that takes three times as long
class Keep:
    """Write this down before anything is said that follows from it: a controller that comes back needs it."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class StepClosed:
    """An optimiser step is complete; what was trained in it."""

    step: int
    groups: int
    samples: int
    tokens: int
    lags: tuple[int, ...]  # staleness of each sample, in versions
    inline_means: tuple[tuple[str, float], ...]
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Persist:
    """Make sure that everything recorded so far is on disk, then tell the worker: a checkpoint depends on it."""

    worker: WorkerId
    request: int


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""

    reason: str
    code: int


Command = Send | Dismiss | Record | Keep | StepClosed | Persist | End
