"""The words of attribution: kinds of time, causes of waits, and their intervals."""

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
    """The weights that it needs are on their way, or not published yet."""
    UPDATE = "update"
    """It has the weights that it needs, and does not use them yet."""


class Kind(Enum):
    """What a second of a worker is spent on."""

    BUSY = "busy"
    SAMPLES = "samples"
    GATE = "gate"
    WEIGHTS = "weights"
    UPDATE = "update"
    """Weights are put into use, or copied to be published."""
    SAVE = "save"
    AWAY = "away"
    """It loads, or its process or host is stopped."""
    OTHER = "other"
    """Everything else: round trips, event loops, garbage collection."""


KINDS = tuple(kind.value for kind in Kind)
"""All kinds of time, in the order in which they are shown."""


class WaitInterval(NamedTuple):
    """A wait that the core has noted, in seconds of the controller's clock."""

    worker: WorkerId
    cause: Cause
    root: str
    """The worker at work that the wait is blocked on in the end; empty if there is none."""
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
    """Mean number of occupied rows; -1 if the worker has none."""
    root: str = ""
    """Of a wait for tensors: the worker that sends them."""
