"""Weight sync policy: which workers fetch the latest version now.

No policy can stop a run: a worker that may start no sample because its version is too old fetches the latest version in
any case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flowrt.errors import ConfigError
from flowrt.ids import WorkerId


class Receiver(NamedTuple):
    """A worker that generates: the version that it generates with, and the newest version that it has received."""

    worker: WorkerId
    applied: int
    staged: int
    divergence: float | None = None  # KL of the version in use from the latest one, if it was measured


class WeightSyncPolicy(Protocol):
    """Which workers fetch new weights now?"""

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:
        """The receivers that are to fetch ``latest``, by name.

        Args:
            latest: the newest version that a connected worker has complete.
            receivers: workers that generate and are not fetching.
            fetching: number of workers that already fetch.
        """
        ...


@dataclass(frozen=True, slots=True)
class DelayedUpdate:
    """All workers that are behind fetch immediately, while they generate, and swap at their own safe points."""

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [receiver.worker for receiver in receivers if receiver.staged < latest]


@dataclass(frozen=True, slots=True)
class Rolling:
    """At most ``at_once`` workers fetch or activate new weights at a time; the others keep generating.

    A worker counts from the order to fetch until it generates with the new version. Workers with the oldest version
    fetch first, because admission stops them first. A worker more than ``max_behind`` versions behind fetches
    immediately: with ``max_behind`` up to the staleness bound, that includes every worker that could start no sample.
    With ``max_behind`` 0 this is the default, all at once. Raises ConfigError for a value out of range.
    """

    at_once: int
    max_behind: int = 1

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ConfigError(f"rolling refresh of {self.at_once} workers at once would never be done; use 1 or more")
        if self.max_behind < 0:
            raise ConfigError(f"max_behind is {self.max_behind}, but no worker can be ahead; use 0 or more")

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:
        swapping = sum(receiver.applied < receiver.staged for receiver in receivers)
        free = max(0, self.at_once - fetching - swapping)
        behind = sorted(
            (receiver for receiver in receivers if receiver.staged < latest),
            key=lambda receiver: (receiver.applied, receiver.staged, receiver.worker),
        )
        cannot_wait = [receiver for receiver in behind if latest - receiver.staged > self.max_behind]
        others = [receiver for receiver in behind if latest - receiver.staged <= self.max_behind]
        in_turn = others[: max(0, free - len(cannot_wait))]
        chosen = {receiver.worker for receiver in [*cannot_wait, *in_turn]}
        return [receiver.worker for receiver in receivers if receiver.worker in chosen]


@dataclass(frozen=True, slots=True)
class EveryN:
    """Fetch when the latest version is ``versions`` ahead of the newest received one; 1 is the default, every version.

    Raises ConfigError for less than 1.
    """

    versions: int

    def __post_init__(self) -> None:
        if self.versions < 1:
            raise ConfigError(f"a refresh every {self.versions} versions is none; use 1 or more")

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [receiver.worker for receiver in receivers if latest - receiver.staged >= self.versions]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Fetch when the divergence exceeds ``threshold``, or the newest received version is ``max_age`` versions behind.

    The divergence is the KL of the version in use from the latest one, as the trainer measured it on samples of the
    version in use (APS of ClusterEnv, arXiv 2507.10990, with both policies on the same observations). ``max_age`` is
    not optional: under a clipped loss the trainer cannot move far from stale samples, so the divergence may stay below
    any threshold forever. A threshold below 0 is the default, every version.

    Raises ConfigError for ``max_age`` below 1.
    """

    threshold: float
    max_age: int

    def __post_init__(self) -> None:
        if self.max_age < 1:
            raise ConfigError(f"max_age is {self.max_age} versions; use 1 (every version) or more")

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [
            receiver.worker
            for receiver in receivers
            if receiver.staged < latest
            and (
                self.threshold < 0
                or latest - receiver.staged >= self.max_age
                or (receiver.divergence is not None and receiver.divergence > self.threshold)
            )
        ]
