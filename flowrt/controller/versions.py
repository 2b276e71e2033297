"""Which worker has which version of a model, and who fetches what from whom.

Versions are delivered as "the latest": the newest that somebody who is here has whole. One that was skipped is never
waited for, nor one that is gone with whoever published it. A worker that is still receiving a version serves it to the
next already, so n receivers stand in a chain and cost little more than one.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowrt.controller.refresh import Receiver, Refresh
from flowrt.controller.reluctance import Reluctance, least_reluctant
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire.records import NO_BASE, Weights


class Fetching(NamedTuple):
    """A transfer of weights under way."""

    receiver: WorkerId
    holder: WorkerId
    weights: Weights


Form = tuple[int, int]
"""A version and the base that it is told as changes to."""


@dataclass(slots=True)
class ModelVersions:
    """One named model."""

    model: str
    latest: int = 0  # that somebody who is here has whole
    newest: int = 0  # that was ever published; its number is not used again
    publisher: WorkerId | None = None
    published: dict[int, tuple[Weights, ...]] = field(default_factory=dict)
    holders: dict[Form, set[WorkerId]] = field(default_factory=dict)
    receivers: dict[WorkerId, Receiver] = field(default_factory=dict)
    fetching: dict[WorkerId, Fetching] = field(default_factory=dict)
    entry: dict[WorkerId, int] = field(default_factory=dict)  # what a receiver has to fetch before it begins
    divergence: dict[int, float] = field(default_factory=dict)  # of earlier versions from the latest
    doomed: set[WorkerId] = field(default_factory=set)  # they fetch what will not come whole to whoever sends it
    suspects: set[tuple[WorkerId, int]] = field(default_factory=set)  # holders that did not deliver a version
    failures: Counter[WorkerId] = field(default_factory=Counter)  # fetches of a receiver that failed in a row
    whole_next: set[WorkerId] = field(default_factory=set)  # receivers that could not use changes
    behind: dict[WorkerId, None] = field(default_factory=dict)  # without the latest version, and not fetching
    serving: Counter[tuple[WorkerId, int]] = field(default_factory=Counter)  # fetches from a holder, by version
    loose: set[WorkerId] = field(default_factory=set)  # holders that may have something to let go of
    held: dict[WorkerId, set[Form]] = field(default_factory=lambda: defaultdict(set))
    changed: bool = False  # since it was last asked who shall fetch

    # ---- what workers say

    def publish(self, worker: WorkerId, forms: tuple[Weights, ...], divergence: dict[int, float]) -> None:
        if not forms or forms[0].base != NO_BASE or len({(form.model, form.version) for form in forms}) != 1:
            raise RemoteProtocolError(f"{worker} published {forms}, which is not one version that begins with it whole")
        version = forms[0].version
        if version <= self.newest:
            raise RemoteProtocolError(
                f"{worker} published version {version} after {self.newest}; "
                f"publish {self.newest + 1} or later, a number is never used again"
            )
        self.changed = True
        self.newest, self.publisher = version, worker
        self.published[version] = forms
        for form in forms:
            self._hold(worker, version, form.base)
        self.divergence = divergence

    def regain(self, worker: WorkerId, held: Sequence[Weights]) -> None:
        """What this worker had before the controller came back."""
        for weights in held:
            forms = {one.base: one for one in (*self.published.get(weights.version, ()), weights)}
            self.published[weights.version] = tuple(forms[base] for base in sorted(forms))
            self._hold(worker, weights.version, weights.base)
        newest = max((one.version for one in held if one.base == NO_BASE), default=0)
        self.newest, self.changed = max(self.newest, newest), True
        if (receiver := self.receivers.get(worker)) is None:
            self.publisher = worker
        else:
            self.entry[worker] = 0  # it came back with what it had: it need not catch up first
            self._received(receiver._replace(staged=max(receiver.staged, newest)))

    def applied(self, worker: WorkerId, version: int) -> None:
        self.changed = True
        if worker not in self.receivers:
            self.entry[worker] = self.latest if self.latest in self.published else version
        before = self.receivers.get(worker, Receiver(worker, version, version))
        self._received(Receiver(worker, version, max(before.staged, version)))

    def _received(self, receiver: Receiver) -> None:
        self.receivers[receiver.worker] = receiver
        if receiver.staged < self.latest and receiver.worker not in self.fetching:
            self.behind[receiver.worker] = None
        else:
            self.behind.pop(receiver.worker, None)

    def _hold(self, worker: WorkerId, version: int, base: int) -> None:
        self.holders.setdefault((version, base), set()).add(worker)
        self.held[worker].add((version, base))
        self.loose.add(worker)
        self._find_latest()

    def _find_latest(self) -> None:
        """Holders have come or gone: receivers are behind, or late, by what somebody who is here has whole."""
        latest = max((version for version, base in self.holders if base == NO_BASE), default=0)
        if latest == self.latest:
            return
        self.latest, self.divergence = latest, {}  # it was measured from another
        self.entry = {worker: min(version, latest) for worker, version in self.entry.items()}
        self.behind = {
            worker: None
            for worker, receiver in self.receivers.items()
            if receiver.staged < latest and worker not in self.fetching
        }

    def applied_version(self, worker: WorkerId) -> int:
        """The version that a worker generates with; 0 before it said anything."""
        receiver = self.receivers.get(worker)
        return receiver.applied if receiver else 0

    def is_late(self, worker: WorkerId) -> bool:
        """It came in the middle of the run, and has not caught up with the version that was the latest then."""
        return self.applied_version(worker) < self.entry.get(worker, 0)

    def staged(self, worker: WorkerId, version: int) -> None:
        if worker not in self.receivers:
            raise RemoteProtocolError(f"{worker} staged version {version}, but has never said which one it uses")
        if not 0 <= version <= self.newest:
            raise RemoteProtocolError(
                f"{worker} staged version {version}, but {self.newest} is the newest of {self.model}"
            )
        fetch = self._end_fetch(worker, version)
        receiver = self.receivers[worker]
        self._received(Receiver(worker, receiver.applied, max(receiver.staged, version)))
        self.whole_next.discard(worker)
        self.failures.pop(worker, None)
        # Also if this fetch was thought to be over: whoever is not known to hold it is never told to let go of it.
        for base in {NO_BASE, NO_BASE if fetch is None else fetch.weights.base}:
            self._hold(worker, version, base)

    def failed(self, worker: WorkerId, holder: WorkerId, weights: Weights) -> None:
        """Its fetch of this version is over; the late word of another one changes nothing."""
        fetch = self.fetching.get(worker)
        if fetch is None or (fetch.holder, fetch.weights) != (holder, weights):
            return
        if worker not in self.doomed:
            self.suspects.add((holder, weights.version))
            self.failures[worker] += 1
        self._end_fetch(worker, weights.version)
        self._doom_behind(worker, weights)
        if weights.base != NO_BASE:
            self.whole_next.add(worker)

    def _end_fetch(self, worker: WorkerId, version: int) -> Fetching | None:
        self.changed = True
        fetch = self.fetching.get(worker)
        if fetch is None or fetch.weights.version != version:
            return None
        self.doomed.discard(worker)
        self.loose.add(fetch.holder)
        del self.fetching[worker]
        self.serving[fetch.holder, version] -= 1
        if not self.serving[fetch.holder, version]:
            del self.serving[fetch.holder, version]
        if worker in self.receivers and self.receivers[worker].staged < self.latest:
            self.behind[worker] = None
        return fetch

    def _doom_behind(self, worker: WorkerId, weights: Weights) -> None:
        """What the worker was passing on will not come: neither to its receivers nor to those that they serve.

        They say so themselves, each when it learns of it. Until then they are no relays (least of all for the worker
        that they wait for), and none of them is to be blamed by the next one.
        """
        broken = [worker]
        while broken:
            one = broken.pop()
            for fetch in self.fetching.values():
                if fetch.holder == one and fetch.weights == weights and fetch.receiver not in self.doomed:
                    self.doomed.add(fetch.receiver)
                    broken.append(fetch.receiver)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: it neither holds nor fetches anything."""
        self.changed = True
        self.receivers.pop(worker, None)
        self.entry.pop(worker, None)
        self.behind.pop(worker, None)
        self.whole_next.discard(worker)
        self.failures.pop(worker, None)
        ended = [fetch for fetch in self.fetching.values() if worker in (fetch.receiver, fetch.holder)]
        for fetch in ended:
            self._end_fetch(fetch.receiver, fetch.weights.version)
        for fetch in ended:
            self._doom_behind(fetch.receiver, fetch.weights)
        for form in self.held.pop(worker, set()):
            self._let_go(worker, form)
        self.loose.discard(worker)
        self._forget_unheld()

    def _let_go(self, worker: WorkerId, form: Form) -> None:
        self.holders[form].discard(worker)
        if not self.holders[form]:
            del self.holders[form]
            self._find_latest()

    def _forget_unheld(self) -> None:
        """What is newer than what some receiver has is kept in mind: it may be about to say that it has all of it.

        That may come to be the latest, when who has newer ones is gone.
        """
        held = {version for version, _ in self.holders}
        oldest = min((one.staged for one in self.receivers.values()), default=self.latest)
        self.published = {
            version: forms
            for version, forms in self.published.items()
            if version in held or version > min(oldest, self.latest)
        }

    # ---- who fetches what from whom

    def begin_fetches(
        self, refresh: Refresh, gated: Collection[WorkerId], resting: Collection[WorkerId] = ()
    ) -> list[Fetching]:
        """Start what the policy wants, and what those need that admission keeps from starting, unless they rest."""
        if self.latest not in self.published or not self.behind:
            return []
        idle = [
            receiver._replace(divergence=self.divergence.get(receiver.applied))
            for receiver in self.receivers.values()
            if receiver.worker not in self.fetching and receiver.worker not in resting
        ]
        due = dict.fromkeys(refresh.due(self.latest, idle, len(self.fetching)))
        due |= dict.fromkeys(worker for worker in gated if worker in self.behind and worker not in resting)
        if not due:
            return []
        sources = {weights.base: self._sources(weights) for weights in self.published[self.latest]}
        started = []
        for worker in due:
            for weights in reversed(self.published[self.latest]):
                if sources[weights.base] and self._can_use(worker, weights):
                    fetch = Fetching(worker, least_reluctant(sources[weights.base], worker), weights)
                    self.fetching[worker] = fetch
                    self.serving[fetch.holder, weights.version] += 1
                    self.behind.pop(worker, None)
                    started.append(fetch)
                    break
        return started

    def _can_use(self, worker: WorkerId, weights: Weights) -> bool:
        """Changes only help whoever has their base."""
        if weights.base == NO_BASE:
            return True
        return weights.base == self.receivers[worker].staged and worker not in self.whole_next

    def _sources(self, weights: Weights) -> list[Reluctance]:
        """A heap of those that have these weights, or are receiving them by whatever chain from one that has.

        A chain that is broken somewhere is about to fail, and might come back to the one that asks.
        """
        behind: dict[WorkerId, list[WorkerId]] = defaultdict(list)
        load: Counter[WorkerId] = Counter()
        for fetch in self.fetching.values():
            load[fetch.holder] += 1
            if fetch.weights == weights and fetch.receiver not in self.doomed:
                behind[fetch.holder].append(fetch.receiver)
        found = list(self.holders.get((weights.version, weights.base), ()))
        for holder in found:  # grows while it is walked
            found += behind.pop(holder, [])
        heap = [
            Reluctance((one, weights.version) in self.suspects, load[one], one == self.publisher, one) for one in found
        ]
        heapq.heapify(heap)
        return heap

    def retire(self) -> list[tuple[WorkerId, int]]:
        """(holder, version) pairs to drop: where a newer version is, and nobody fetches the old one."""
        if not self.loose:
            return []
        retired = set()
        for worker in self.loose:
            newest = max((version for version, _ in self.held.get(worker, ())), default=0)
            for form in [
                one for one in self.held.get(worker, ()) if one[0] < newest and not self.serving[worker, one[0]]
            ]:
                self.held[worker].remove(form)
                self._let_go(worker, form)
                retired.add((worker, form[0]))
        self.loose.clear()
        if retired:
            self._forget_unheld()
        self.suspects = {(worker, version) for worker, version in self.suspects if version == self.latest}
        return sorted(retired)
