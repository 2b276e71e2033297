"""Weight sync policy: which workers fetch the latest version now.

No policy can stop a run: a worker that may start no sample because its version is too old fetches the latest version in
any case.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, Protocol

from flowrt.errors import ConfigError
from flowrt.ids import WorkerId


class Receiver(NamedTuple):
    """A worker that generates: the version that it generates with, and the newest version that it has received."""

    worker: WorkerId
    applied: int
    staged: int
    divergence: float | None = None  # KL of the version in use from the latest one, if it was measured


class Receivers:
    """Receivers by the versions that they use and have received.

    A policy that reads them by version, as those of this module do, costs as much as there are different versions and
    workers that fetch. Iteration yields every receiver.
    """

    def __init__(self, receivers: Iterable[Receiver] = (), divergence: Mapping[int, float] | None = None) -> None:
        """``divergence``: KL of earlier versions from the latest one, where measured."""
        self._of: dict[tuple[int, int], dict[WorkerId, None]] = {}
        self._versions: dict[WorkerId, tuple[int, int]] = {}
        self.divergence = {} if divergence is None else divergence
        for receiver in receivers:
            self.add(receiver)

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, worker: object) -> bool:
        return worker in self._versions

    def __iter__(self) -> Iterator[Receiver]:
        for (applied, staged), workers in self.by_version():
            for worker in workers:
                yield Receiver(worker, applied, staged, self.divergence.get(applied))

    def by_version(self) -> list[tuple[tuple[int, int], Iterable[WorkerId]]]:
        """((version in use, newest version received), the workers of these), ascending; workers that have had them
        longest come first.
        """
        return sorted(self._of.items(), key=itemgetter(0))

    @property
    def swapping(self) -> int:
        """Number of receivers that have received a newer version than they use."""
        return sum(len(workers) for (applied, staged), workers in self._of.items() if applied < staged)

    def add(self, receiver: Receiver) -> None:
        """Add a receiver, or change its versions."""
        versions = receiver.applied, receiver.staged
        if self._versions.get(receiver.worker) != versions:
            self.discard(receiver.worker)
            self._versions[receiver.worker] = versions
            self._of.setdefault(versions, {})[receiver.worker] = None

    def discard(self, worker: WorkerId) -> None:
        """Remove a receiver, if it is one."""
        versions = self._versions.pop(worker, None)
        if versions is not None:
            del self._of[versions][worker]
            if not self._of[versions]:
                del self._of[versions]


class WeightSyncPolicy(Protocol):
    """Which workers fetch new weights now?"""

    def due(self, latest: int, receivers: Receivers, fetching: int) -> list[WorkerId]:
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

    def due(self, latest: int, receivers: Receivers, fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [worker for (_, staged), workers in receivers.by_version() if staged < latest for worker in workers]


@dataclass(frozen=True, slots=True)
class Rolling:
    """At most ``max_concurrent`` workers fetch or activate new weights at a time; the others keep generating.

    A worker counts from the order to fetch until it generates with the new version. Workers with the oldest version
    fetch first, because admission stops them first. A worker more than ``max_behind`` versions behind fetches
    immediately: with ``max_behind`` up to the staleness bound, that includes every worker that could start no sample.
    With ``max_behind`` 0 this is the default, all at once. Raises ConfigError for a value out of range.
    """

    max_concurrent: int
    max_behind: int = 1

    def __post_init__(self) -> None:
        if self.max_concurrent < 1:
            raise ConfigError(
                f"a rolling update of {self.max_concurrent} workers at once would never be done; use 1 or more"
            )
        if self.max_behind < 0:
            raise ConfigError(f"max_behind is {self.max_behind}, but no worker can be ahead; use 0 or more")

    def due(self, latest: int, receivers: Receivers, fetching: int) -> list[WorkerId]:
        behind = [(latest - staged, workers) for (_, staged), workers in receivers.by_version() if staged < latest]
        cannot_wait = [worker for age, workers in behind if age > self.max_behind for worker in workers]
        free = max(0, self.max_concurrent - fetching - receivers.swapping - len(cannot_wait))
        others = (worker for age, workers in behind if age <= self.max_behind for worker in workers)
        return [*cannot_wait, *islice(others, free)]


@dataclass(frozen=True, slots=True)
class EveryN:
    """Fetch when the latest version is ``interval`` ahead of the newest received one; 1 is the default, every version.

    Raises ConfigError for less than 1.
    """

    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"an update every {self.interval} versions is none; use 1 or more")

    def due(self, latest: int, receivers: Receivers, fetching: int) -> list[WorkerId]:  # noqa: ARG002
        of_versions = receivers.by_version()
        return [
            worker for (_, staged), workers in of_versions if latest - staged >= self.interval for worker in workers
        ]


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

    def due(self, latest: int, receivers: Receivers, fetching: int) -> list[WorkerId]:  # noqa: ARG002
        chosen: list[WorkerId] = []
        for (applied, staged), workers in receivers.by_version():
            divergence = receivers.divergence.get(applied)
            is_far = self.threshold < 0 or (divergence is not None and divergence > self.threshold)
            if staged < latest and (is_far or latest - staged >= self.max_age):
                chosen += workers
        return chosen
