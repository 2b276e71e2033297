"""Events that the controller's state machine takes, and the commands that it returns."""

from dataclasses import dataclass
from typing import Literal

from flowrt.controller.state.controller_restart import Entry
from flowrt.ids import WorkerId
from flowrt.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A worker was admitted."""

    worker: WorkerId
    role: str
    host: str
    lanes: tuple[str, ...] = ()  # its transports, best first
    term: int = 0  # term of the earlier controller that it rejoins from; 0: a new worker


@dataclass(slots=True)  # one for every message: not frozen, because creating a frozen one takes three times as long
class MessageReceived:
    """A member sent a message."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """A worker is gone: it left, died, or was silent too long."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: check the deadlines."""


@dataclass(frozen=True, slots=True)
class KernelAlive:
    """The kernel of a silent worker's host acknowledged data at ``at_s``, so the worker is alive."""

    worker: WorkerId
    at_s: float


@dataclass(frozen=True, slots=True)
class ControllerStalled:
    """The controller did not run for this time, up to now: every deadline is extended by it.

    Workers may have been stopped too, and the messages that they sent meanwhile were not read.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class PreemptRun:
    """The run is preempted: save a checkpoint of what is trained, then end the run, which can be resumed later."""

    reason: str
    code: int  # exit code of the run
    kept: int = 0  # number of steps in the newest checkpoint, as far as the sender of the order knows


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The run has to end at once: a signal, a write error, a bug of the controller.

    With ``even_if_complete`` the error also replaces a successful end, which could not be written to disk.
    """

    reason: str
    code: int  # exit code of the run
    even_if_complete: bool = False


Event = (
    WorkerConnected
    | MessageReceived
    | WorkerDisconnected
    | KernelAlive
    | Tick
    | PreemptRun
    | Shutdown
    | ControllerStalled
)


@dataclass(slots=True)  # one for every message: not frozen, because creating a frozen one takes three times as long
class Send:
    """Send this message to this worker."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a worker that it is dismissed, and ignore what it sends from now on."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class AppendLedger:
    """Append a change of a prompt's state to the ledger."""

    prompt: int
    epoch: int
    state: str  # in_flight, ready, leased, trained or dropped; unread when its source is lost
    step: int  # the step in training at the time of the change
    reason: str = ""
    reward: float | None = None
    """Mean reward of a group that was trained, or dropped by the group filter."""


@dataclass(slots=True)  # one for every commit: not frozen, because creating a frozen one takes three times as long
class AppendRestartLog:
    """Append an entry to the restart log before any message that follows from it is sent."""

    entry: Entry


COUNTED = ("samples", "groups", "tokens", "staleness_mean", "staleness_max")
"""Names in metrics.jsonl of what is counted in every step."""
ZERO_VARIANCE = "zero_variance_groups"
FRACTIONS = {ZERO_VARIANCE: "zero_variance_fraction"}
"""Counts of trained groups that metrics.jsonl also has as fractions, and the names of these fractions."""


@dataclass(frozen=True, slots=True)
class StepClosed:
    """Statistics of a completed optimiser step."""

    step: int
    groups: int
    samples: int
    tokens: int  # of all samples, prompts included
    lags: tuple[int, ...]  # staleness of each sample, in versions
    inline_means: tuple[tuple[str, float], ...]
    metrics: tuple[tuple[str, float], ...]
    counts: tuple[tuple[str, int], ...] = ()
    """Counts of the step by their names in metrics.jsonl, see `flowrt.controller.transitions.step_metrics`."""
    fired: tuple[tuple[str, int], ...] = ()
    """Metrics whose guards fire in the step, each with its consecutive violations."""

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the samples, in versions."""
        return sum(self.lags) / max(len(self.lags), 1)

    @property
    def fractions(self) -> tuple[tuple[str, float], ...]:
        """Counts of groups as fractions of the trained groups."""
        return tuple((FRACTIONS[name], count / max(self.groups, 1)) for name, count in self.counts if name in FRACTIONS)

    def measured(self) -> dict[str, float]:
        """All numbers of the step by their names in metrics.jsonl, not rounded; without times of the controller."""
        counted = (self.samples, self.groups, self.tokens, self.staleness_mean, max(self.lags, default=0))
        return {
            **dict(self.metrics),
            **dict(self.inline_means),
            **dict(zip(COUNTED, counted, strict=True)),
            **dict(self.counts),
            **dict(self.fractions),
        }


@dataclass(frozen=True, slots=True)
class EvaluationClosed:
    """The results of an evaluation, to be recorded."""

    name: str
    version: int
    numbers: tuple[tuple[str, float], ...]


EventKind = Literal[
    "started",
    "resumed",
    "controller_restarted",
    "joined",
    "gone",
    "restarted",
    "rolled_back",
    "drained",
    "published",
    "version_lost",
    "checkpoint",
    "evaluation",
    "evaluation_skipped",
    "guard",
    "exporter",
    "recorder",
    "samples",
    "warning",
    "ended",
]
"""Kinds of lines in events.jsonl."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Write an event to events.jsonl; kinds "guard" and "warning" are also logged as warnings."""

    kind: EventKind
    step: int
    text: str
    worker: WorkerId | None = None
    fields: tuple[tuple[str, int | float | str], ...] = ()
    """Further fields of the line."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Flush everything recorded so far to disk, then answer the worker: its checkpoint counts only from then on."""

    worker: WorkerId
    request: int


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run for this reason."""

    reason: str
    code: int  # exit code of the run


Command = Send | Dismiss | AppendLedger | AppendRestartLog | StepClosed | EvaluationClosed | LogEvent | Persist | EndRun
