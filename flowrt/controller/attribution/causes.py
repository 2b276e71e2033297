"""Kinds of time, causes of waits, and intervals of both."""

from enum import Enum
from typing import NamedTuple

from flowrt.ids import WorkerId


class Cause(Enum):
    """Why a worker has no work."""

    SAMPLES = "samples"
    """Nothing is ready for its stage."""
    GATE = "gate"
    """Admission holds back what it could start: the staleness bound, or a budget of rows and bytes."""
    WEIGHTS = "weights"
    """The weights that it needs are being transferred, or not published yet."""
    UPDATE = "update"
    """The weights that it needs are staged, and not used yet."""


class Kind(Enum):
    """What a second of a worker is spent on. Waits have the kind of their `Cause`."""

    BUSY = "busy"
    SAMPLES = "samples"
    """Also a wait for tensors of granted samples, for a larger batch, or for another rank."""
    GATE = "gate"
    WEIGHTS = "weights"
    UPDATE = "update"
    """Weights are put into use, or copied to be published."""
    SAVE = "save"
    AWAY = "away"
    """The worker loads, its process or host is stopped, or it does not report."""
    OTHER = "other"
    """Everything else: round trips, event loops, garbage collection."""


KINDS = tuple(kind.value for kind in Kind)
"""All kinds of time, in the order in which they are shown."""


class WaitInterval(NamedTuple):
    """A wait that the core has recorded, in seconds of the controller's clock."""

    worker: WorkerId
    cause: Cause
    root: str
    """The worker that the wait is blocked on in the end; empty if none is found."""
    start_s: float
    end_s: float


class Interval(NamedTuple):
    """A span of work that a worker has reported, in seconds of the controller's clock."""

    kind: str
    start_s: float
    end_s: float
    worked_s: float
    """Seconds of it that were work; the rest are gaps between spans that were merged."""
    rows: float = -1.0
    """Mean number of occupied rows of the engine; -1: unknown."""
    root: str = ""
    """Of a wait for tensors: the worker that sends them; of a wait for another rank: that rank; else empty."""
