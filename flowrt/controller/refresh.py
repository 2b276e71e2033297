"""The refresh seam: everybody at once; or fewer workers at a time, fewer versions, only versions that differ enough.

None of them can stop a run: whoever admission keeps from starting, because its version is too old, fetches the latest
version whatever the policy says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flowrt.errors import ConfigError
from flowrt.ids import WorkerId


class Receiver(NamedTuple):
    """A worker that generates with a model: the version it uses and the newest that it has in its staging copy."""

    worker: WorkerId
    applied: int
    staged: int
    divergence: float | None = None  # of the version that it uses from the latest one, where somebody measured it


class Refresh(Protocol):
    """Who takes new weights now?"""

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:
        """The receivers (none of them fetching) that shall fetch ``latest``; ``fetching`` others already are.

        Whoever admission keeps from starting, because its version is too old, fetches in any case.
        """
        ...


@dataclass(frozen=True, slots=True)
class DelayedUpdate:
    """Everyone that is behind fetches at once, beside its generation, and swaps at its own safe point."""

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [receiver.worker for receiver in receivers if receiver.staged < latest]


@dataclass(frozen=True, slots=True)
class Rolling:
    """At most ``at_once`` workers fetch or put new weights into use at a time; the others go on feeding the trainer.

    A worker counts from the order to fetch until it generates with what it fetched. Whoever has the oldest version goes
    first: admission stops it first. Whoever is more than ``max_behind`` versions behind does not wait for its turn at
    all: with ``max_behind`` no larger than the staleness bound, that is everybody who could not begin any sample.
    At 0 this is the default, everyone at once.
    """

    at_once: int
    max_behind: int = 1

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ConfigError(f"rolling refresh of {self.at_once} workers at once would never be done; use 1 or more")
        if self.max_behind < 0:
            raise ConfigError(f"max_behind is {self.max_behind}, but nobody can be ahead; use 0 or more")

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:
        swapping = sum(receiver.applied < receiver.staged for receiver in receivers)
        places = max(0, self.at_once - fetching - swapping)
        behind = sorted(
            (receiver for receiver in receivers if receiver.staged < latest),
            key=lambda receiver: (receiver.applied, receiver.staged, receiver.worker),
        )
        cannot_wait = [receiver for receiver in behind if latest - receiver.staged > self.max_behind]
        others = [receiver for receiver in behind if latest - receiver.staged <= self.max_behind]
        in_turn = others[: max(0, places - len(cannot_wait))]
        chosen = {receiver.worker for receiver in [*cannot_wait, *in_turn]}
        return [receiver.worker for receiver in receivers if receiver.worker in chosen]


@dataclass(frozen=True, slots=True)
class EveryN:
    """Fetch when the latest version is ``versions`` ahead; with 1 it is the default, every version."""

    versions: int

    def __post_init__(self) -> None:
        if self.versions < 1:
            raise ConfigError(f"a refresh every {self.versions} versions is none; use 1 or more")

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [receiver.worker for receiver in receivers if latest - receiver.staged >= self.versions]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Fetch when what a worker generates with has moved away from the latest version, or has become ``max_age`` old.

    The divergence is the KL that the trainer measured on samples of that version (APS of ClusterEnv, arXiv 2507.10990,
    with both policies on the same observations). ``max_age`` is not optional: under a clipped loss the trainer cannot
    move far from stale samples, so the divergence may stay below any threshold for ever. A threshold below 0 is the
    default, every version.
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
