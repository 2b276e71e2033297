"""The versions of a model: which worker holds which version, and which worker fetches it from which holder.

Receivers fetch the latest version, the newest that a connected worker holds completely. A version that was skipped, or
lost with its publisher, is never waited for. A worker that is still receiving a version already relays it, so n
receivers form a chain, and the transfer to all of them takes little longer than that to one.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowrt.controller.policies.weight_sync import Receiver, WeightSyncPolicy
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol.messages import NO_BASE, LaneTurn, Weights

FIRST_BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0


class SourceRank(NamedTuple):
    """Order of sources, smallest first: not a suspect, fewest receivers, not the publisher (all share its link)."""

    suspect: bool
    load: int
    publisher: bool
    worker: WorkerId


def pick_source(heap: list[SourceRank], receiver: WorkerId) -> WorkerId:
    """Take the first source and count its load; the receiver becomes a source too."""
    first = heap[0]
    heapq.heapreplace(heap, first._replace(load=first.load + 1))
    heapq.heappush(heap, SourceRank(False, 0, False, receiver))
    return first.worker


class Fetching(NamedTuple):
    """A transfer of weights under way."""

    receiver: WorkerId
    holder: WorkerId
    weights: Weights
    older: bool = False
    """Whether the receiver returns from a newer version to this one, for an evaluation."""


class Pin(NamedTuple):
    """A worker that generates with one version until the samples of its evaluation are generated."""

    worker: WorkerId
    version: int


Form = tuple[int, int]
"""A version and the base of its delta; NO_BASE for the whole version."""


@dataclass(slots=True)
class VersionTable:
    """The versions of one named model."""

    model: str
    latest: int = 0  # newest version that a connected worker holds completely
    newest: int = 0  # newest version ever published; numbers are never reused
    publisher: WorkerId | None = None
    published: dict[int, tuple[Weights, ...]] = field(default_factory=dict)
    holders: dict[Form, set[WorkerId]] = field(default_factory=dict)
    receivers: dict[WorkerId, Receiver] = field(default_factory=dict)
    applying: Counter[int] = field(default_factory=Counter)  # receivers by the version that they generate with
    fetching: dict[WorkerId, Fetching] = field(default_factory=dict)
    entry: dict[WorkerId, int] = field(default_factory=dict)  # version that a late receiver needs before it may start
    divergence: dict[int, float] = field(default_factory=dict)  # KL of earlier versions from the latest
    orphaned: set[WorkerId] = field(default_factory=set)  # receivers whose source will not get the whole version
    suspects: set[tuple[WorkerId, int]] = field(default_factory=set)  # holders that did not deliver a version
    failures: Counter[WorkerId] = field(default_factory=Counter)  # fetches of a receiver that failed in a row
    whole_next: set[WorkerId] = field(default_factory=set)  # receivers that could not apply a delta
    behind: dict[WorkerId, None] = field(default_factory=dict)  # without the latest version, and not fetching
    serving: Counter[tuple[WorkerId, int]] = field(default_factory=Counter)  # fetches from a holder, by version
    evictable: set[WorkerId] = field(default_factory=set)  # holders that may have versions to evict
    held: dict[WorkerId, set[Form]] = field(default_factory=lambda: defaultdict(set))
    pin: Pin | None = None
    kept: frozenset[int] = frozenset()  # versions that their publisher keeps for evaluations
    rewound: set[tuple[WorkerId, int]] = field(default_factory=set)  # to evict: the holder returns to an older version
    is_changed: bool = False  # since `begin_fetches` was last called

    def restore(self, newest: int) -> None:
        """Continue the numbering of an earlier controller."""
        self.newest = newest

    def recheck(self) -> None:
        """Mark the versions as changed, so that the next event orders the fetches that are due."""
        self.is_changed = True

    # ---- messages of workers

    def publish(self, worker: WorkerId, forms: tuple[Weights, ...], divergence: dict[int, float]) -> None:
        """Add a version that the worker has published.

        Args:
            worker: the publisher.
            forms: the whole version, then its deltas.
            divergence: KL of earlier versions from this one, where measured.

        Raises RemoteProtocolError if the forms are not one version that begins with the whole one, or if its number is
        not above that of all published versions.
        """
        if not forms or forms[0].base != NO_BASE or len({(form.model, form.version) for form in forms}) != 1:
            raise RemoteProtocolError(f"{worker} published {forms}, which is not one version that begins with it whole")
        version = forms[0].version
        if version <= self.newest:
            raise RemoteProtocolError(
                f"{worker} published version {version} after {self.newest}; "
                f"publish {self.newest + 1} or later, a number is never used again"
            )
        self.is_changed = True
        self.newest, self.publisher = version, worker
        self.published[version] = forms
        for form in forms:
            self._hold(worker, version, form.base)
        self.divergence = divergence

    def regain(self, worker: WorkerId, held: Sequence[Weights]) -> None:
        """Add the versions that a rejoined worker holds; one that never said which it uses may be the publisher."""
        for weights in held:
            forms = {one.base: one for one in (*self.published.get(weights.version, ()), weights)}
            self.published[weights.version] = tuple(forms[base] for base in sorted(forms))
            self._hold(worker, weights.version, weights.base)
        newest = max((one.version for one in held if one.base == NO_BASE), default=0)
        self.newest = max(self.newest, newest)
        self.is_changed = True
        if (receiver := self.receivers.get(worker)) is None:
            if self.publisher is None or newest == self.newest:  # else another one has published since
                self.publisher = worker
        else:
            self.entry[worker] = 0  # it rejoined with its weights and need not catch up
            self._received(receiver._replace(staged=max(receiver.staged, newest)))

    def applied(self, worker: WorkerId, version: int) -> None:
        """Record that a worker generates with a version. Raises RemoteProtocolError if it is above the newest."""
        if not 0 <= version <= self.newest:
            raise RemoteProtocolError(
                f"{worker} generates with version {version}, but {self.newest} is the newest of {self.model}"
            )
        self.is_changed = True
        if worker not in self.receivers:
            self.entry[worker] = self.latest if self.latest in self.published else version
        before = self.receivers.get(worker, Receiver(worker, version, version))
        # A worker that has returned to an older version, for an evaluation, has nothing newer staged.
        staged = version if version < before.applied else max(before.staged, version)
        self._received(Receiver(worker, version, staged))

    def _received(self, receiver: Receiver) -> None:
        self._count_out(self.receivers.get(receiver.worker))
        self.receivers[receiver.worker] = receiver
        self.applying[receiver.applied] += 1
        if receiver.staged < self.latest and receiver.worker not in self.fetching:
            self.behind[receiver.worker] = None
        else:
            self.behind.pop(receiver.worker, None)

    def _count_out(self, receiver: Receiver | None) -> None:
        """Remove a receiver from the counts of `applying`."""
        if receiver is not None:
            self.applying[receiver.applied] -= 1
            if not self.applying[receiver.applied]:
                del self.applying[receiver.applied]

    def _hold(self, worker: WorkerId, version: int, base: int) -> None:
        self.holders.setdefault((version, base), set()).add(worker)
        self.held[worker].add((version, base))
        self.evictable.add(worker)
        self._find_latest()

    def _find_latest(self) -> None:
        """Update the latest version, and which receivers are behind, after a change of holders."""
        latest = max((version for version, base in self.holders if base == NO_BASE), default=0)
        if latest == self.latest:
            return
        self.latest, self.divergence = latest, {}  # the divergence was measured from another version
        self.entry = {worker: min(version, latest) for worker, version in self.entry.items()}
        self.behind = {
            worker: None
            for worker, receiver in self.receivers.items()
            if receiver.staged < latest and worker not in self.fetching
        }

    def applied_version(self, worker: WorkerId) -> int:
        """The version that a worker generates with; 0 before its first report."""
        receiver = self.receivers.get(worker)
        return receiver.applied if receiver else 0

    def is_late(self, worker: WorkerId) -> bool:
        """Whether the worker joined during the run and has not caught up with the version that was the latest then."""
        return self.applied_version(worker) < self.entry.get(worker, 0)

    def staged(self, worker: WorkerId, version: int) -> None:
        """Record that a receiver has staged a version, which it holds from now on.

        Raises RemoteProtocolError if the version is above the newest, or the worker has never said which one it uses.
        """
        if worker not in self.receivers:
            raise RemoteProtocolError(f"{worker} staged version {version}, but has never said which one it uses")
        if not 0 <= version <= self.newest:
            raise RemoteProtocolError(
                f"{worker} staged version {version}, but {self.newest} is the newest of {self.model}"
            )
        fetch = self._end_fetch(worker, version)
        receiver = self.receivers[worker]
        is_older = fetch is not None and fetch.older
        self._received(Receiver(worker, receiver.applied, version if is_older else max(receiver.staged, version)))
        self.whole_next.discard(worker)
        self.failures.pop(worker, None)
        # Even if the fetch had ended before: only known holders are told to evict a version.
        for base in {NO_BASE, NO_BASE if fetch is None else fetch.weights.base}:
            self._hold(worker, version, base)

    def failed(self, worker: WorkerId, holder: WorkerId, weights: Weights) -> None:
        """End a failed fetch; a late message about another fetch changes nothing."""
        fetch = self.fetching.get(worker)
        if fetch is None or (fetch.holder, fetch.weights) != (holder, weights):
            return
        if worker not in self.orphaned:
            self.suspects.add((holder, weights.version))
            self.failures[worker] += 1
        self._end_fetch(worker, weights.version)
        self._orphan_downstream(worker, weights)
        if weights.base != NO_BASE:
            self.whole_next.add(worker)

    def _end_fetch(self, worker: WorkerId, version: int) -> Fetching | None:
        self.is_changed = True
        fetch = self.fetching.get(worker)
        if fetch is None or fetch.weights.version != version:
            return None
        self.orphaned.discard(worker)
        self.evictable.add(fetch.holder)
        del self.fetching[worker]
        self.serving[fetch.holder, version] -= 1
        if not self.serving[fetch.holder, version]:
            del self.serving[fetch.holder, version]
        if worker in self.receivers and self.receivers[worker].staged < self.latest:
            self.behind[worker] = None
        return fetch

    def _orphan_downstream(self, worker: WorkerId, weights: Weights) -> None:
        """Mark all receivers downstream of a failed fetch: they will not get the whole version.

        Each of them reports its own failure. Until then no further receiver fetches from it, and a failure of its own
        fetch does not make its holder a suspect.
        """
        broken = [worker]
        while broken:
            one = broken.pop()
            for fetch in self.fetching.values():
                if fetch.holder == one and fetch.weights == weights and fetch.receiver not in self.orphaned:
                    self.orphaned.add(fetch.receiver)
                    broken.append(fetch.receiver)

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker with what it holds and fetches."""
        self.is_changed = True
        self._count_out(self.receivers.pop(worker, None))
        self.entry.pop(worker, None)
        self.behind.pop(worker, None)
        self.whole_next.discard(worker)
        self.failures.pop(worker, None)
        ended = [fetch for fetch in self.fetching.values() if worker in (fetch.receiver, fetch.holder)]
        for fetch in ended:
            self._end_fetch(fetch.receiver, fetch.weights.version)
        for fetch in ended:
            self._orphan_downstream(fetch.receiver, fetch.weights)
        for form in self.held.pop(worker, set()):
            self._drop_form(worker, form)
        self.evictable.discard(worker)
        self._forget_unheld()

    def _drop_form(self, worker: WorkerId, form: Form) -> None:
        self.holders[form].discard(worker)
        if not self.holders[form]:
            del self.holders[form]
            self._find_latest()

    def _forget_unheld(self) -> None:
        """Forget versions without a holder, except those newer than what some receiver has staged.

        Such a receiver may be about to report that it has staged one of them, which may then be the latest.
        """
        held = {version for version, _ in self.holders}
        oldest = min((one.staged for one in self.receivers.values()), default=self.latest)
        self.published = {
            version: forms
            for version, forms in self.published.items()
            if version in held or version > min(oldest, self.latest)
        }

    # ---- fetches

    def begin_fetches(
        self, refresh: WeightSyncPolicy, outdated: Collection[WorkerId], resting: Collection[WorkerId] = ()
    ) -> list[Fetching]:
        """Start the fetches that are due; returns them.

        A pinned worker fetches the version that it is pinned to, whatever the policy decides, and no other.

        Args:
            refresh: the policy that says which workers fetch the latest version.
            outdated: workers that fetch the latest version whatever the policy decides.
            resting: receivers that do not fetch now: they back off after failures, or have sent no inventory yet.
        """
        self.is_changed = False
        started = self._fetch_pinned(resting)
        if self.latest not in self.published or not self.behind:
            return started
        pinned = self.pin.worker if self.pin else None
        idle = [
            receiver._replace(divergence=self.divergence.get(receiver.applied))
            for receiver in self.receivers.values()
            if receiver.worker not in self.fetching and receiver.worker not in resting and receiver.worker != pinned
        ]
        fetching = len(self.fetching) - (pinned is not None and pinned in self.fetching)
        due = dict.fromkeys(refresh.due(self.latest, idle, fetching))
        due |= dict.fromkeys(worker for worker in outdated if worker in self.behind and worker not in resting)
        if pinned is not None:
            due.pop(pinned, None)
        return started + self._fetch(due, self.latest)

    def _fetch(self, due: Iterable[WorkerId], version: int, *, older: bool = False) -> list[Fetching]:
        """Start fetches of a version by these workers, of a delta to it where they can use one."""
        if not due:
            return []
        sources = {weights.base: self._sources(weights) for weights in self.published[version]}
        started = []
        for worker in due:
            for weights in reversed(self.published[version]):
                if sources[weights.base] and self._can_use(worker, weights):
                    fetch = Fetching(worker, pick_source(sources[weights.base], worker), weights, older)
                    self.fetching[worker] = fetch
                    self.serving[fetch.holder, weights.version] += 1
                    self.behind.pop(worker, None)
                    started.append(fetch)
                    break
        return started

    # ---- evaluations

    def is_gone(self, version: int) -> bool:
        """Whether a version was published (or is version 0), and no worker has it any more."""
        if version > self.newest or (version == self.newest == 0):
            return False
        if any(version in (receiver.applied, receiver.staged) for receiver in self.receivers.values()):
            return False
        # A holder that is a receiver has something newer staged, and is about to evict this version.
        return not self.holders.get((version, NO_BASE), set()) - self.receivers.keys()

    def keep(self, versions: Iterable[int]) -> None:
        """Set the versions that are evaluated: their publisher does not evict them."""
        kept = frozenset(versions)
        if kept != self.kept:
            self.kept = kept
            self.is_changed = True
            self.evictable.update(self.held)

    def set_pin(self, version: int | None, leaving: Collection[WorkerId]) -> bool:
        """Pin a worker to a version (None: no worker is pinned any more). Returns whether the pin has changed.

        A pinned worker stays pinned until it leaves. Otherwise the first worker in this order is pinned: one that
        generates with the version, one that has staged or is fetching it, one with an older version, one with a newer
        version; by name within each. Workers of ``leaving`` are not pinned.
        """
        pin = self.pin
        if pin is not None and pin.version == version and pin.worker in self.receivers and pin.worker not in leaving:
            return False
        self.pin = None
        if version is not None:
            found = [one for one in self.receivers.values() if one.worker not in leaving]
            if found:
                self.pin = Pin(min(found, key=lambda one: self._pin_order(one, version)).worker, version)
        if self.pin != pin:
            self.is_changed = True
        return self.pin != pin

    def _pin_order(self, receiver: Receiver, version: int) -> tuple[int, WorkerId]:
        fetch = self.fetching.get(receiver.worker)
        coming = receiver.staged if fetch is None else max(fetch.weights.version, receiver.staged)
        if coming == version:
            return int(receiver.applied != version), receiver.worker
        return 2 if coming < version else 3, receiver.worker

    def is_pinned(self, worker: WorkerId) -> bool:
        """Whether the worker is pinned to a version."""
        return self.pin is not None and self.pin.worker == worker

    def _fetch_pinned(self, resting: Collection[WorkerId]) -> list[Fetching]:
        """Let the pinned worker fetch its version, unless it has the version or is fetching.

        A worker with a newer version drops all that it holds, and returns to the older version.
        """
        if self.pin is None or self.pin.worker in self.fetching or self.pin.worker in resting:
            return []
        worker, version = self.pin
        receiver = self.receivers[worker]
        if receiver.staged == version or (version, NO_BASE) not in self.holders or version not in self.published:
            return []
        if receiver.staged < version:
            return self._fetch((worker,), version)
        if self.holders[version, NO_BASE] == {worker}:
            return []
        # The base of a delta is dropped too, so the worker fetches the whole version.
        self.whole_next.add(worker)
        for form in list(self.held.get(worker, ())):
            self.held[worker].remove(form)
            self._drop_form(worker, form)
            self.rewound.add((worker, form[0]))
        return self._fetch((worker,), version, older=True)

    def take_rewound(self) -> list[tuple[WorkerId, int]]:
        """(holder, version) pairs, sorted, of holders that return to an older version.

        They are evicted before the fetches of `begin_fetches` are ordered: a later eviction could drop the version that
        has just been fetched.
        """
        rewound, self.rewound = self.rewound, set()
        if rewound:
            self._forget_unheld()
        return sorted(rewound)

    def _can_use(self, worker: WorkerId, weights: Weights) -> bool:
        """Whether a receiver can use these weights: a delta needs its base."""
        if weights.base == NO_BASE:
            return True
        return weights.base == self.receivers[worker].staged and worker not in self.whole_next

    def _sources(self, weights: Weights) -> list[SourceRank]:
        """A heap of the workers that hold these weights or receive them through an unbroken chain from a holder."""
        behind: dict[WorkerId, list[WorkerId]] = defaultdict(list)
        load: Counter[WorkerId] = Counter()
        for fetch in self.fetching.values():
            load[fetch.holder] += 1
            if fetch.weights == weights and fetch.receiver not in self.orphaned:
                behind[fetch.holder].append(fetch.receiver)
        found = list(self.holders.get((weights.version, weights.base), ()))
        for holder in found:  # grows during the loop
            found += behind.pop(holder, [])
        heap = [
            SourceRank((one, weights.version) in self.suspects, load[one], one == self.publisher, one) for one in found
        ]
        heapq.heapify(heap)
        return heap

    def retire(self) -> list[tuple[WorkerId, int]]:
        """(holder, version) pairs to evict, sorted: the holder has a newer version, and no receiver fetches this one
        from it.
        """
        if not self.evictable:
            return []
        retired: set[tuple[WorkerId, int]] = set()
        for worker in self.evictable:
            newest = max((version for version, _ in self.held.get(worker, ())), default=0)
            kept = self.kept if worker == self.publisher else ()
            for form in [
                one
                for one in self.held.get(worker, ())
                if one[0] < newest and not self.serving[worker, one[0]] and one[0] not in kept
            ]:
                self.held[worker].remove(form)
                self._drop_form(worker, form)
                retired.add((worker, form[0]))
        self.evictable.clear()
        if retired:
            self._forget_unheld()
        current = {self.latest, *self.kept}
        self.suspects = {(worker, version) for worker, version in self.suspects if version in current}
        return sorted(retired)


class Models:
    """The versions of every named model, and the fetches of them that were ordered.

    The first model is the policy, whose staleness admission bounds.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.of = {name: VersionTable(name) for name in names}
        self.policy = self.of[names[0]]
        self.outdated: dict[WorkerId, None] = {}
        """Workers whose version of the policy is too old for the ready slots."""
        self.backing_off: dict[str, dict[WorkerId, float]] = {name: {} for name in names}
        """Receivers of each model whose fetches keep failing, and until when each waits."""
        self._turns: dict[tuple[str, WorkerId], LaneTurn] = {}  # of the last order to each receiver
        self._ordered_s: dict[tuple[str, WorkerId], float] = {}  # time of that order

    def named(self, worker: WorkerId, model: str) -> VersionTable:
        """The versions of a model that the worker names. Raises RemoteProtocolError if there is none."""
        found = self.of.get(model)
        if found is None:
            raise RemoteProtocolError(f"{worker} speaks of model {model!r}; this run has {sorted(self.of)}")
        return found

    def note_order(self, model: str, receiver: WorkerId, turn: LaneTurn, now: float) -> None:
        """Record the order to a receiver to fetch in this turn."""
        self._turns[model, receiver] = turn
        self._ordered_s[model, receiver] = now

    def last_turn(self, model: str, receiver: WorkerId) -> LaneTurn | None:
        """The turn of the last fetch that the receiver was ordered; None if there was none."""
        return self._turns.get((model, receiver))

    def ordered_s(self, model: str, receiver: WorkerId) -> float | None:
        """The time of the last order to the receiver to fetch; None if there was none."""
        return self._ordered_s.get((model, receiver))

    def update_back_off(self, versions: VersionTable, now: float) -> dict[WorkerId, float]:
        """Find the receivers whose fetches keep failing; returns and stores until when each waits."""
        until_s = {
            worker: self._ordered_s[versions.model, worker] + back_off_s(failures)
            for worker, failures in versions.failures.items()
            if worker not in versions.fetching
        }
        found = {worker: end_s for worker, end_s in until_s.items() if now < end_s}
        self.backing_off[versions.model] = found
        return found

    def mark_outdated(self, worker: WorkerId) -> None:
        """The worker needs newer weights: it fetches the latest version whatever the policy says."""
        if worker not in self.outdated:
            self.policy.recheck()
        self.outdated[worker] = None

    def clear_outdated(self, worker: WorkerId) -> None:
        """The worker does not need newer weights to start what is ready."""
        self.outdated.pop(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker."""
        self.clear_outdated(worker)
        for name, versions in self.of.items():
            versions.forget(worker)
            self._turns.pop((name, worker), None)
            self._ordered_s.pop((name, worker), None)


def back_off_s(failures: int) -> float:
    """Seconds between two orders to fetch, after this number of failures in a row: none after the first one, because
    another holder is asked at once; 0.1 s after two, then doubled with each failure up to 5 s.
    """
    return 0.0 if failures < 2 else min(FIRST_BACK_OFF_S * 2 ** min(failures - 2, 30), MAX_BACK_OFF_S)
