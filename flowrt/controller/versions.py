"""Which worker has which version of a model, who fetches what from whom, and the refresh seam.

Versions are delivered as "the latest": a version that was skipped is never waited for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire.messages import Publish


class Receiver(NamedTuple):
    """A worker that generates with a model: the version it uses and the newest that it has in its staging copy."""

    worker: WorkerId
    applied: int
    staged: int


class Refresh(Protocol):
    """Who takes new weights now?"""

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:
        """The receivers (none of them fetching) that shall fetch ``latest``; ``fetching`` others already are."""
        ...


@dataclass(frozen=True, slots=True)
class DelayedUpdate:
    """Everyone that is behind fetches at once, beside its generation, and swaps at its own safe point."""

    def due(self, latest: int, receivers: Sequence[Receiver], fetching: int) -> list[WorkerId]:  # noqa: ARG002
        return [receiver.worker for receiver in receivers if receiver.staged < latest]


class Fetching(NamedTuple):
    """A transfer of weights under way."""

    receiver: WorkerId
    holder: WorkerId
    version: int


@dataclass(slots=True)
class ModelVersions:
    """One named model."""

    model: str
    latest: int = 0
    published: dict[int, Publish] = field(default_factory=dict)
    holders: dict[int, set[WorkerId]] = field(default_factory=dict)
    receivers: dict[WorkerId, Receiver] = field(default_factory=dict)
    fetching: dict[WorkerId, Fetching] = field(default_factory=dict)
    changed: bool = False  # since it was last asked who shall fetch

    def publish(self, worker: WorkerId, message: Publish) -> None:
        if message.version <= self.latest:
            raise RemoteProtocolError(f"{worker} published version {message.version} after {self.latest}")
        self.changed = True
        self.latest = message.version
        self.published[message.version] = message
        self.holders[message.version] = {worker}

    def applied(self, worker: WorkerId, version: int) -> None:
        self.changed = True
        before = self.receivers.get(worker, Receiver(worker, version, version))
        self.receivers[worker] = Receiver(worker, version, max(before.staged, version))

    def applied_version(self, worker: WorkerId) -> int:
        """The version that a worker generates with; 0 before it said anything."""
        receiver = self.receivers.get(worker)
        return receiver.applied if receiver else 0

    def staged(self, worker: WorkerId, version: int) -> None:
        if worker not in self.receivers:
            raise RemoteProtocolError(f"{worker} staged version {version}, but has never said which one it uses")
        self.failed(worker, version)
        receiver = self.receivers[worker]
        self.receivers[worker] = Receiver(worker, receiver.applied, max(receiver.staged, version))
        if version in self.holders:
            self.holders[version].add(worker)

    def failed(self, worker: WorkerId, version: int) -> None:
        """Its fetch of this version is over; the late word of another one changes nothing."""
        self.changed = True
        fetch = self.fetching.get(worker)
        if fetch is not None and fetch.version == version:
            del self.fetching[worker]

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: it neither holds nor fetches anything."""
        self.changed = True
        self.receivers.pop(worker, None)
        self.fetching.pop(worker, None)
        self.fetching = {who: fetch for who, fetch in self.fetching.items() if fetch.holder != worker}
        for version in list(self.holders):
            self.holders[version].discard(worker)
            if not self.holders[version]:
                del self.holders[version], self.published[version]

    def begin_fetches(self, refresh: Refresh) -> list[Fetching]:
        """Start what the policy wants: each receiver from the holder that serves the fewest others."""
        if self.latest not in self.holders:
            return []
        idle = [receiver for receiver in self.receivers.values() if receiver.worker not in self.fetching]
        started = []
        for worker in refresh.due(self.latest, idle, len(self.fetching)):
            load = Counter(fetch.holder for fetch in self.fetching.values())
            holder = min(self.holders[self.latest], key=lambda one: (load[one], one))
            self.fetching[worker] = Fetching(worker, holder, self.latest)
            started.append(self.fetching[worker])
        return started

    def retire(self) -> list[tuple[WorkerId, int]]:
        """Old versions that nobody is fetching: (holder, version) pairs to drop."""
        wanted = {fetch.version for fetch in self.fetching.values()} | {self.latest}
        old = [version for version in self.holders if version not in wanted]
        retired = [(worker, version) for version in old for worker in sorted(self.holders[version])]
        for version in old:
            del self.holders[version], self.published[version]
        return retired
