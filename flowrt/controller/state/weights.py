"""The versions of a model: which worker holds which version, and which worker fetches it from which holder.

- A version is the number of a publication of a trainer's weights. When a worker fetches it is a policy
  (`flowrt.controller.policies.weight_sync`). With the default, `DelayedUpdate`, a worker fetches a version while it
  generates with older weights, and begins to use it at a safe point (`flowrt.roles.rollout`).
- Receivers fetch the latest version, the newest that a connected worker holds completely. A version that was skipped,
  or lost with its publisher, is never waited for.
- A worker that is still receiving a version relays it (`flowrt.controller.state.weight_sources`).
- A receiver keeps what has arrived when its fetch fails, and goes on from there with another source. The receivers
  below it wait meanwhile: their own links are sound.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowrt.controller.policies.weight_sync import Receiver, Receivers, WeightSyncPolicy
from flowrt.controller.state.weight_arrivals import Arrivals
from flowrt.controller.state.weight_sources import SourceRank, Sources, fan_out
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol.messages import NO_BASE, LaneTurn, Weights

FIRST_BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0


class Fetching(NamedTuple):
    """A transfer of weights under way."""

    receiver: WorkerId
    holder: WorkerId
    weights: Weights
    older: bool = False
    """Whether the receiver returns from a newer version to this one, for an evaluation."""
    first: int = 0
    """The first chunk that the receiver does not have yet."""


class Pin(NamedTuple):
    """A worker that generates with one version until the samples of its evaluation are generated."""

    worker: WorkerId
    version: int


NOT_STALLED = "not stalled"
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
    broken: dict[WorkerId, None] = field(default_factory=dict)  # receivers whose fetches will be reported as failed
    stalled: dict[WorkerId, None] = field(default_factory=dict)  # receivers below one that is broken, or that resumes
    resumable: dict[WorkerId, tuple[Weights, int]] = field(default_factory=dict)
    """Receivers whose fetch has failed, and the chunks that they have and go on from."""
    suspects: set[tuple[WorkerId, int]] = field(default_factory=set)  # holders that did not deliver a version
    failures: Counter[WorkerId] = field(default_factory=Counter)  # fetches of a receiver that failed in a row
    whole_next: set[WorkerId] = field(default_factory=set)  # receivers that could not apply a delta
    behind: dict[WorkerId, None] = field(default_factory=dict)  # without the latest version, and not fetching
    serving: Counter[tuple[WorkerId, int]] = field(default_factory=Counter)  # fetches from a holder, by version
    evictable: set[WorkerId] = field(default_factory=set)  # holders that may have versions to evict
    held: dict[WorkerId, set[Form]] = field(default_factory=lambda: defaultdict(set))
    pin: Pin | None = None
    evaluated: frozenset[int] = frozenset()  # versions that their publisher keeps for evaluations
    outdated: dict[WorkerId, None] = field(default_factory=dict)
    """Workers that fetch the latest version whatever the policy decides: theirs is too old for the ready slots."""
    resting: dict[WorkerId, None] = field(default_factory=dict)
    """Receivers that do not fetch now: they back off after failures, or have sent no inventory yet."""
    idle: Receivers = field(default_factory=Receivers)  # receivers that do not fetch and do not rest
    staging: Counter[int] = field(default_factory=Counter)  # receivers by the newest version that they have received
    _urgent: dict[WorkerId, None] = field(default_factory=dict)  # outdated and behind
    served: dict[WorkerId, dict[WorkerId, None]] = field(default_factory=dict)  # receivers by holder
    _depth: dict[WorkerId, int] = field(default_factory=dict)  # of fetching receivers below holders
    sources: dict[Form, Sources] = field(default_factory=lambda: defaultdict(Sources))
    _fan_out: int = 1
    rewound: set[tuple[WorkerId, int]] = field(default_factory=set)  # to evict: the holder returns to an older version
    is_changed: bool = False  # since `begin_fetches` was last called

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
        before, self.newest, self.publisher = self.publisher, version, worker
        self._fan_out = fan_out(len(self.receivers))
        self._rank(before)
        self.published[version] = forms
        for form in forms:
            self._hold(worker, version, form.base)
        self.divergence = divergence

    def regain(self, worker: WorkerId, held: Sequence[Weights]) -> None:
        """Add the versions that a rejoined worker holds; one that never said which it uses may be the publisher."""
        for weights in held:
            forms = {form.base: form for form in (*self.published.get(weights.version, ()), weights)}
            self.published[weights.version] = tuple(forms[base] for base in sorted(forms))
            self._hold(worker, weights.version, weights.base)
        newest = max((weights.version for weights in held if weights.base == NO_BASE), default=0)
        self.newest = max(self.newest, newest)
        self.is_changed = True
        if (receiver := self.receivers.get(worker)) is None:
            if self.publisher is None or newest == self.newest:  # else another one has published since
                before, self.publisher = self.publisher, worker
                self._rank(before)
                self._rank(worker)
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
        self.staging[receiver.staged] += 1
        self._place(receiver.worker)

    def _place(self, worker: WorkerId) -> None:
        """Update whether a worker is idle, and behind."""
        receiver = self.receivers.get(worker)
        is_free = receiver is not None and worker not in self.fetching
        if receiver is not None and is_free and worker not in self.resting:
            self.idle.add(receiver)
        else:
            self.idle.discard(worker)
        if receiver is not None and is_free and receiver.staged < self.latest:
            self.behind[worker] = None
            if worker in self.outdated:
                self._urgent[worker] = None
        else:
            self.behind.pop(worker, None)
            self._urgent.pop(worker, None)

    def _count_out(self, receiver: Receiver | None) -> None:
        """Remove a receiver from the counts by version."""
        if receiver is not None:
            for counts, version in ((self.applying, receiver.applied), (self.staging, receiver.staged)):
                counts[version] -= 1
                if not counts[version]:
                    del counts[version]

    def rest(self, worker: WorkerId) -> None:
        """Let a receiver fetch nothing."""
        self.resting[worker] = None
        self._place(worker)

    def wake(self, worker: WorkerId) -> None:
        """Let a receiver fetch again."""
        if worker in self.resting:
            del self.resting[worker]
            self._place(worker)
            self.is_changed = True

    def mark_outdated(self, worker: WorkerId) -> None:
        """The worker needs newer weights: it fetches the latest version whatever the policy decides."""
        if worker not in self.outdated:
            self.outdated[worker] = None
            self.is_changed = True
            self._place(worker)

    def clear_outdated(self, worker: WorkerId) -> None:
        """The worker does not need newer weights to start what is ready."""
        if worker in self.outdated:
            del self.outdated[worker]
            self._urgent.pop(worker, None)

    def _hold(self, worker: WorkerId, version: int, base: int) -> None:
        self.holders.setdefault((version, base), set()).add(worker)
        self.held[worker].add((version, base))
        self.evictable.add(worker)
        self._rank(worker)
        if base == NO_BASE and version > self.latest:
            self._find_latest()

    def _find_latest(self) -> None:
        """Update the latest version, and which receivers are behind, after a change of holders."""
        latest = max((version for version, base in self.holders if base == NO_BASE), default=0)
        if latest == self.latest:
            return
        self.latest, self.divergence = latest, {}  # the divergence was measured from another version
        self.entry = {worker: min(version, latest) for worker, version in self.entry.items()}
        for worker in self.receivers:
            self._place(worker)

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
        self._abandon_rest(worker)
        receiver = self.receivers[worker]
        is_older = fetch is not None and fetch.older
        self._received(Receiver(worker, receiver.applied, version if is_older else max(receiver.staged, version)))
        self.whole_next.discard(worker)
        self.failures.pop(worker, None)
        # Even if the fetch had ended before: only known holders are told to evict a version.
        for base in {NO_BASE, NO_BASE if fetch is None else fetch.weights.base}:
            self._hold(worker, version, base)
        if fetch is not None:
            self._release(worker, fetch.weights)

    def failed(self, worker: WorkerId, holder: WorkerId, weights: Weights, received: int = 0) -> bool:
        """End a failed fetch; a late message about another fetch changes nothing.

        Args:
            worker: the receiver.
            holder: the worker that it fetched from.
            weights: what it fetched.
            received: the chunks that it keeps, to go on from; 0: none, and its own receivers fail too.

        Returns:
            Whether the fetch has failed now, and counts as a failure of its holder or their link.
        """
        fetch = self.fetching.get(worker)
        if fetch is None or (fetch.holder, fetch.weights) != (holder, weights):
            return False
        is_blamed = worker not in self.broken and worker not in self.stalled
        if is_blamed:
            self.suspects.add((holder, weights.version))
            self.failures[worker] += 1
        self._end_fetch(worker, weights.version)
        if received:
            self.resumable[worker] = weights, received
            self._stall(worker, weights)
        else:
            self._break(worker, (weights,))
            if weights.base != NO_BASE:
                self.whole_next.add(worker)
        return is_blamed

    def _end_fetch(self, worker: WorkerId, version: int) -> Fetching | None:
        self.is_changed = True
        fetch = self.fetching.get(worker)
        if fetch is None or fetch.weights.version != version:
            return None
        self.broken.pop(worker, None)
        self.stalled.pop(worker, None)
        self.evictable.add(fetch.holder)
        del self.fetching[worker], self._depth[worker]
        self.serving[fetch.holder, version] -= 1
        if not self.serving[fetch.holder, version]:
            del self.serving[fetch.holder, version]
        served = self.served[fetch.holder]
        del served[worker]
        if not served:
            del self.served[fetch.holder]
        self._unrank(worker, fetch.weights)
        self._rank(fetch.holder)
        self._place(worker)
        return fetch

    # ---- receivers below a fetch that failed

    @property
    def orphaned(self) -> set[WorkerId]:
        """Receivers that do not receive now: no further receiver fetches from them, and a failure of their fetch does
        not make its holder a suspect.
        """
        return {*self.broken, *self.stalled}

    def _below(self, worker: WorkerId, weights: Weights) -> list[WorkerId]:
        """The receivers that fetch these weights from a worker."""
        return [receiver for receiver in self.served.get(worker, ()) if self.fetching[receiver].weights == weights]

    def _break(self, worker: WorkerId, lost: Iterable[Weights]) -> None:
        """The receivers below this worker will not get the rest of these from it; each of them reports that."""
        for weights in dict.fromkeys(lost):
            for receiver in self._below(worker, weights):
                self.stalled.pop(receiver, None)
                self.broken[receiver] = None
                self._unrank(receiver, weights)
                self._stall(receiver, weights)

    def _stall(self, worker: WorkerId, weights: Weights) -> None:
        """All receivers below this worker receive nothing until it does."""
        pending = [worker]
        while pending:
            for receiver in self._below(pending.pop(), weights):
                if receiver not in self.broken and receiver not in self.stalled:
                    self.stalled[receiver] = None
                    self._unrank(receiver, weights)
                    pending.append(receiver)

    def _release(self, worker: WorkerId, weights: Weights) -> None:
        """This worker has these weights, or receives them again: so do those below it that have waited for it."""
        pending = [worker]
        while pending:
            for receiver in self._below(pending.pop(), weights):
                if self.stalled.pop(receiver, NOT_STALLED) is None:
                    self._rank(receiver)
                    pending.append(receiver)

    def _abandon_rest(self, worker: WorkerId) -> None:
        """The worker will not go on with what it has of a failed fetch."""
        if rest := self.resumable.pop(worker, None):
            self._break(worker, rest[:1])

    # ---- sources

    def _rank(self, worker: WorkerId | None) -> None:
        """Update the rank of a worker among the sources of all that it holds or receives."""
        if worker is None:
            return
        load = len(self.served.get(worker, ()))
        excess, is_publisher = max(0, load + 1 - self._fan_out), worker == self.publisher
        for form in self.held.get(worker, ()):
            is_suspect = (worker, form[0]) in self.suspects
            self.sources[form].set(SourceRank(is_suspect, excess, 0, load, is_publisher, worker))
        fetch = self.fetching.get(worker)
        if fetch is not None and worker not in self.broken and worker not in self.stalled:
            form = fetch.weights.version, fetch.weights.base
            if form not in self.held.get(worker, ()):
                is_suspect = (worker, form[0]) in self.suspects
                rank = SourceRank(is_suspect, excess, self._depth[worker], load, is_publisher, worker)
                self.sources[form].set(rank)

    def _unrank(self, worker: WorkerId, weights: Weights) -> None:
        """The worker does not receive these weights: it is a source of them only if it holds them."""
        form = weights.version, weights.base
        if form not in self.held.get(worker, ()) and form in self.sources:
            self.sources[form].discard(worker)

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker with what it holds and fetches."""
        self.is_changed = True
        self._count_out(self.receivers.pop(worker, None))
        self.entry.pop(worker, None)
        self.whole_next.discard(worker)
        self.failures.pop(worker, None)
        self.resumable.pop(worker, None)
        self.resting.pop(worker, None)
        self.clear_outdated(worker)
        if (fetch := self.fetching.get(worker)) is not None:
            self._end_fetch(worker, fetch.weights.version)
        self._break(worker, [self.fetching[receiver].weights for receiver in self.served.get(worker, ())])
        self._place(worker)
        for form in self.held.pop(worker, set()):
            self._drop_form(worker, form)
        self.evictable.discard(worker)
        self._forget_unheld()

    def _drop_form(self, worker: WorkerId, form: Form) -> None:
        self.holders[form].discard(worker)
        self.sources[form].discard(worker)
        if not self.holders[form]:
            del self.holders[form]
            self._find_latest()

    def _forget_unheld(self) -> None:
        """Forget versions without a holder, except those newer than what some receiver has staged.

        Such a receiver may be about to report that it has staged one of them, which may then be the latest.
        """
        held = {version for version, _ in self.holders}
        oldest = min(self.staging, default=self.latest)
        self.published = {
            version: forms
            for version, forms in self.published.items()
            if version in held or version > min(oldest, self.latest)
        }
        for form in [form for form in self.sources if form[0] not in self.published]:
            del self.sources[form]

    # ---- fetches

    def begin_fetches(self, policy: WeightSyncPolicy) -> list[Fetching]:
        """Start the fetches that are due; returns them. ``policy`` says which workers fetch the latest version.

        A pinned worker fetches the version that it is pinned to, whatever the policy decides, and no other.
        """
        self.is_changed = False
        started = self._fetch_pinned()
        if self.latest not in self.published or not self.behind:
            return started
        pinned = self.pin.worker if self.pin else None
        if pinned is not None:
            self.idle.discard(pinned)
        fetching = len(self.fetching) - (pinned is not None and pinned in self.fetching)
        self.idle.divergence = self.divergence
        due = dict.fromkeys(policy.due(self.latest, self.idle, fetching))
        due |= dict.fromkeys(worker for worker in self._urgent if worker not in self.resting)
        if pinned is not None:
            due.pop(pinned, None)
            self._place(pinned)
        return started + self._fetch(due, self.latest)

    def _fetch(self, due: Iterable[WorkerId], version: int, *, older: bool = False) -> list[Fetching]:
        """Start fetches of a version by these workers, of a delta to it where they can use one."""
        started = []
        for worker in due:
            for weights in reversed(self.published[version]):
                source = self.sources[version, weights.base].best() if self._can_use(worker, weights) else None
                if source is not None:
                    started.append(self._start(worker, source, weights, older=older))
                    break
        return started

    def _start(self, worker: WorkerId, holder: WorkerId, weights: Weights, *, older: bool) -> Fetching:
        """Start a fetch: where an earlier one of the same weights has failed, from the first chunk that is missing."""
        kept, received = self.resumable.pop(worker, (None, 0))
        first = received if kept == weights else 0
        fetch = self.fetching[worker] = Fetching(worker, holder, weights, older, first)
        self.serving[holder, weights.version] += 1
        self.served.setdefault(holder, {})[worker] = None
        is_whole = (weights.version, weights.base) in self.held.get(holder, ())
        self._depth[worker] = 1 if is_whole else self._depth[holder] + 1
        self._rank(holder)
        self._rank(worker)
        self._place(worker)
        if kept is not None:
            if first:
                self._release(worker, weights)
            else:
                self._break(worker, (kept,))
        return fetch

    # ---- evaluations

    def is_gone(self, version: int) -> bool:
        """Whether a version was published (or is version 0), and no worker has it any more."""
        if version > self.newest or (version == self.newest == 0):
            return False
        if version in self.applying or version in self.staging:
            return False
        # A holder that is a receiver has something newer staged, and is about to evict this version.
        return all(holder in self.receivers for holder in self.holders.get((version, NO_BASE), ()))

    def set_evaluated(self, versions: Iterable[int]) -> None:
        """Set the versions that are evaluated: their publisher does not evict them."""
        kept = frozenset(versions)
        if kept != self.evaluated:
            self.evaluated = kept
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
            staying = [receiver for receiver in self.receivers.values() if receiver.worker not in leaving]
            if staying:
                self.pin = Pin(min(staying, key=lambda receiver: self._pin_order(receiver, version)).worker, version)
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

    def _fetch_pinned(self) -> list[Fetching]:
        """Let the pinned worker fetch its version, unless it has the version or is fetching.

        A worker with a newer version drops all that it holds, and returns to the older version.
        """
        if self.pin is None or self.pin.worker in self.fetching or self.pin.worker in self.resting:
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
        self._break(worker, [self.fetching[receiver].weights for receiver in self.served.get(worker, ())])
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

    def _take_lost(self) -> list[tuple[WorkerId, int]]:
        """(receiver, version) pairs, sorted, of parts that are not completed: no worker has the rest or receives it."""
        if not self.resumable:
            return []
        available = {version for (version, _), sources in self.sources.items() if sources.best() is not None}
        lost = sorted(
            (worker, weights.version)
            for worker, (weights, _) in self.resumable.items()
            if weights.version not in available
        )
        for worker, _ in lost:
            self._abandon_rest(worker)
        return lost

    def _can_use(self, worker: WorkerId, weights: Weights) -> bool:
        """Whether a receiver can use these weights: a delta needs its base."""
        if weights.base == NO_BASE:
            return True
        return weights.base == self.receivers[worker].staged and worker not in self.whole_next

    def retire(self) -> list[tuple[WorkerId, int]]:
        """(worker, version) pairs to evict, sorted: a holder has a newer version, and no receiver fetches this one from
        it; or a receiver has a part of a version that no worker has whole.
        """
        lost = self._take_lost()
        if not self.evictable:
            return lost
        retired = set(lost)
        for worker in self.evictable:
            newest = max((version for version, _ in self.held.get(worker, ())), default=0)
            kept = self.evaluated if worker == self.publisher else ()
            for form in [
                form
                for form in self.held.get(worker, ())
                if form[0] < newest and not self.serving[worker, form[0]] and form[0] not in kept
            ]:
                self.held[worker].remove(form)
                self._drop_form(worker, form)
                retired.add((worker, form[0]))
        self.evictable.clear()
        if retired:
            self._forget_unheld()
        current = {self.latest, *self.evaluated}
        self.suspects = {(worker, version) for worker, version in self.suspects if version in current}
        return sorted(retired)


class Models:
    """The versions of every named model, and the fetches of them that were ordered.

    The first model is the policy, whose staleness admission bounds.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.of = {name: VersionTable(name) for name in names}
        self.policy = self.of[names[0]]
        self.backing_off: dict[str, dict[WorkerId, float]] = {name: {} for name in names}
        """Receivers of each model whose fetches keep failing, and until when each waits."""
        self.back_offs: list[tuple[float, str, WorkerId]] = []  # a heap; some may have ended before
        self.arrivals = {name: Arrivals() for name in names}
        """How fast the fetches of each model advance."""
        self._turns: dict[tuple[str, WorkerId], LaneTurn] = {}  # of the last order to each receiver
        self._ordered_s: dict[tuple[str, WorkerId], float] = {}  # time of that order

    def named(self, worker: WorkerId, model: str) -> VersionTable:
        """The versions of a model that the worker names. Raises RemoteProtocolError if there is none."""
        versions = self.of.get(model)
        if versions is None:
            raise RemoteProtocolError(f"{worker} speaks of model {model!r}; this run has {sorted(self.of)}")
        return versions

    def note_order(self, fetch: Fetching, turn: LaneTurn, now: float) -> None:
        """Record the order to a receiver to fetch in this turn."""
        model, receiver = fetch.weights.model, fetch.receiver
        self._turns[model, receiver] = turn
        self._ordered_s[model, receiver] = now
        self.arrivals[model].begin(receiver, sum(fetch.weights.bucket_bytes), now)

    def last_turn(self, model: str, receiver: WorkerId) -> LaneTurn | None:
        """The turn of the last fetch that the receiver was ordered; None if there was none."""
        return self._turns.get((model, receiver))

    def ordered_s(self, model: str, receiver: WorkerId) -> float | None:
        """The time of the last order to the receiver to fetch; None if there was none."""
        return self._ordered_s.get((model, receiver))

    def back_off(self, versions: VersionTable, worker: WorkerId, now: float) -> None:
        """Let a receiver whose fetch has failed wait, if its fetches keep failing."""
        until_s = self._ordered_s[versions.model, worker] + back_off_s(versions.failures[worker])
        if now < until_s:
            self.backing_off[versions.model][worker] = until_s
            heapq.heappush(self.back_offs, (until_s, versions.model, worker))
            versions.rest(worker)

    def end_back_offs(self, now: float) -> None:
        """Let the receivers fetch again whose back-off is over."""
        while self.back_offs and self.back_offs[0][0] <= now:
            until_s, model, worker = heapq.heappop(self.back_offs)
            if self.backing_off[model].get(worker) == until_s:
                self._end_back_off(model, worker)

    def _end_back_off(self, model: str, worker: WorkerId) -> None:
        if self.backing_off[model].pop(worker, None) is not None:
            self.of[model].wake(worker)

    def rest(self, worker: WorkerId) -> None:
        """Let a worker fetch nothing before its inventory."""
        for versions in self.of.values():
            versions.rest(worker)

    def wake(self, worker: WorkerId) -> None:
        """The worker has sent its inventory."""
        for versions in self.of.values():
            versions.wake(worker)

    @property
    def outdated(self) -> dict[WorkerId, None]:
        """Workers whose version of the policy is too old for the ready slots."""
        return self.policy.outdated

    def staged(self, versions: VersionTable, worker: WorkerId, version: int) -> None:
        """As `VersionTable.staged`; the worker need not wait any more."""
        versions.staged(worker, version)
        self.arrivals[versions.model].end(worker)
        self._end_back_off(versions.model, worker)

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker."""
        for name, versions in self.of.items():
            versions.forget(worker)
            self.backing_off[name].pop(worker, None)
            self.arrivals[name].end(worker)
            self._turns.pop((name, worker), None)
            self._ordered_s.pop((name, worker), None)


def back_off_s(failures: int) -> float:
    """Seconds between two orders to fetch, after this number of failures in a row: none after the first one, because
    another holder is asked at once; 0.1 s after two, then doubled with each failure up to 5 s.
    """
    return 0.0 if failures < 2 else min(FIRST_BACK_OFF_S * 2 ** min(failures - 2, 30), MAX_BACK_OFF_S)
