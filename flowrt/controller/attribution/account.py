"""Account of time by optimiser step: how many seconds each role spent on each kind of time, and the roots of its waits.

A step lasts from the end of the previous step to its own end. Seconds of a worker are attributed as soon as the worker
has reported its spans for them. The account of a step is complete when every worker has reported up to the end of the
step, or at most ``patience_s`` after that end: a worker that has not reported for this time counts as away, and spans
that it reports later are not counted. Memory does not grow with the length of a step.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

from flowrt.controller.attribution.causes import KINDS, Interval, Kind, WaitInterval
from flowrt.controller.attribution.sweep import sweep
from flowrt.ids import STOPPED

Key = TypeVar("Key", bound=Hashable)
BUSY_KIND = Kind.BUSY.value
MAX_WORST = 8
"""Maximum number of workers that are listed for each kind of time, those with the most seconds first."""
MIN_ROOT_SHARE = 0.01
"""Share of a role's time below which a root is left out."""
MIN_SWEEP_S = 1.0
"""Minimum seconds of a worker that are attributed at once, except at the end of a step or of the worker."""


class Sums(defaultdict[Key, float]):
    """Seconds by key; 0 for a key that is not there."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, other: Mapping[Key, float]) -> None:
        """Add the seconds of each key."""
        for key, seconds in other.items():
            self[key] += seconds

    def total(self) -> float:
        """Seconds of all keys."""
        return sum(self.values())

    def largest(self, count: int | None = None) -> list[tuple[Key, float]]:
        """The ``count`` keys with the most seconds (None: all), largest first, equal ones in order of insertion."""
        return sorted(self.items(), key=itemgetter(1), reverse=True)[:count]


@dataclass(slots=True)
class StepAccount:
    """The seconds of one step so far."""

    step: int
    start_s: float
    end_s: float = float("inf")
    is_training: bool = True
    """Whether the run trains during it; only such accounts are part of `TimeAccount.totals`."""
    seconds: dict[str, Sums[str]] = field(default_factory=lambda: defaultdict(Sums))  # by role
    roots: Sums[tuple[str, str, str]] = field(default_factory=Sums)  # by role, cause and root
    of_workers: dict[str, Sums[str]] = field(default_factory=lambda: defaultdict(Sums))  # by kind
    workers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by role

    def add(self, worker: str, role: str, seconds: dict[tuple[str, str], float]) -> None:
        """Add the seconds of a worker, by kind of time and root."""
        self.workers[role].add(worker)
        of_role = self.seconds[role]
        for (kind, root), length_s in seconds.items():
            of_role[kind] += length_s
            if root:
                self.roots[role, kind, root] += length_s
            if kind != BUSY_KIND:
                self.of_workers[kind][worker] += length_s

    def end(self, now: float) -> None:
        """End the account at ``now``."""
        self.end_s = now

    def close(self, step: int, now: float) -> None:
        """Complete it as the account of ``step``, which ended at ``now``."""
        self.step, self.end_s, self.is_training = step, now, True

    def cut(self, now: float) -> None:
        """End the account because the run ends during the step, which then does not count as training."""
        self.end_s, self.is_training = now, False

    def merge(self, other: "StepAccount") -> None:
        """Add the seconds of another part of the same step."""
        for role, counts in other.seconds.items():
            self.seconds[role].add(counts)
            self.workers[role] |= other.workers[role]
        self.roots.add(other.roots)
        for kind, workers in other.of_workers.items():
            self.of_workers[kind].add(workers)
        self.start_s = min(self.start_s, other.start_s)

    def as_json(self, origin_s: float) -> dict[str, Any]:
        """The line of attribution.jsonl; times are seconds from ``origin_s``."""
        return {
            "step": self.step,
            "from_s": round(self.start_s - origin_s, 6),
            "to_s": round(self.end_s - origin_s, 6),
            "roles": {
                role: {"workers": len(self.workers[role]), **{kind: round(counts[kind], 6) for kind in KINDS}}
                for role, counts in sorted(self.seconds.items())
            },
            "roots": [
                [role, cause, root, round(length_s, 6)]
                for (role, cause, root), length_s in self.roots.largest()
                if length_s >= MIN_ROOT_SHARE * self.seconds[role].total()
            ],
            "worst": {
                kind: [[worker, round(length_s, 6)] for worker, length_s in self.of_workers[kind].largest(MAX_WORST)]
                for kind in KINDS
                if self.of_workers.get(kind)
            },
        }


@dataclass(slots=True)
class _Lane:
    """One worker while it is in the run."""

    worker: str
    role: str
    swept_s: float
    """Time up to which its seconds are attributed."""
    reported_s: float
    """Time up to which it has reported its spans."""
    gone_s: float = float("inf")
    spans: list[Interval] = field(default_factory=list)
    waits: list[WaitInterval] = field(default_factory=list)

    def leave(self, now: float) -> None:
        """Record that the worker left the run at ``now``."""
        self.gone_s = now

    def note_report(self, until_s: float) -> None:
        """Record that the worker has reported all its spans up to ``until_s``."""
        self.reported_s = max(self.reported_s, until_s)

    def attribute(
        self,
        parts: Iterable[StepAccount],
        limit_s: float,
        now: float,
        open_waits: Iterable[WaitInterval],
        patience_s: float,
    ) -> None:
        """Attribute the worker's time up to ``limit_s`` to the accounts ``parts``."""
        known = [*self.waits, *open_waits]
        silent_s = max(self.reported_s, self.swept_s)
        if limit_s > silent_s and min(self.gone_s, now) - self.reported_s > patience_s:
            self.spans.append(Interval(STOPPED, silent_s, limit_s, 0.0))  # its link is cut, or it was stopped
        for part in parts:
            end_s = min(part.end_s, limit_s)
            if end_s > self.swept_s:
                part.add(self.worker, self.role, sweep(self.spans, known, self.swept_s, end_s))
                self.swept_s = end_s
        self.spans = [span for span in self.spans if span.end_s > self.swept_s]
        self.waits = [wait for wait in self.waits if wait.end_s > self.swept_s]


class TimeAccount:
    """Attributes the time of all workers to steps."""

    def __init__(self, start_s: float, step: int, patience_s: float) -> None:
        """Begin with ``step`` at ``start_s``, in seconds of the controller's clock.

        Args:
            start_s: when this controller started.
            step: the first step that will be closed.
            patience_s: seconds that the account of a step waits for reports.
        """
        self.patience_s = patience_s
        self.late_s = 0.0
        """Seconds of spans that were reported too late to be counted."""
        self.totals: dict[str, Sums[str]] = {}
        """Seconds of complete accounts by role and kind, from the start of training on."""
        self._lanes: dict[str, _Lane] = {}
        self._left: list[_Lane] = []  # of workers that are gone, with time that is not attributed yet
        self._parts = [StepAccount(step, start_s, is_training=False)]
        self._before: StepAccount | None = None  # the time before training; merged into the first step

    # ---- events

    def joined(self, worker: str, role: str, now: float) -> None:
        """Attribute the time of a worker from ``now`` on."""
        self.gone(worker, now)
        self._lanes[worker] = _Lane(worker, role, swept_s=now, reported_s=now)

    def gone(self, worker: str, now: float) -> None:
        """Attribute the time of a worker only up to ``now``."""
        lane = self._lanes.pop(worker, None)
        if lane is not None:
            lane.leave(now)
            self._left.append(lane)

    def role(self, worker: str) -> str:
        """The role of a worker that is in the run, or gone with time not attributed yet; empty for any other."""
        lane = self._lanes.get(worker) or next((lane for lane in self._left if lane.worker == worker), None)
        return lane.role if lane else ""

    def add_spans(self, worker: str, spans: Iterable[Interval]) -> None:
        """Add spans that a worker has reported; time that is attributed already is only added to `late_s`."""
        lane = self._lanes.get(worker)
        if lane is None:
            return
        for span in spans:
            if span.end_s > lane.swept_s:
                lane.spans.append(span)
            self.late_s += max(min(span.end_s, lane.swept_s) - span.start_s, 0.0)

    def add_waits(self, waits: Iterable[WaitInterval]) -> None:
        """Add waits of any workers that have ended."""
        for wait in waits:
            lane = self._lanes.get(wait.worker)
            lanes = [lane] if lane else [lane for lane in self._left if lane.worker == wait.worker]
            for affected in lanes:
                if wait.end_s > affected.swept_s:
                    affected.waits.append(wait)

    def note_report(self, worker: str, until_s: float) -> None:
        """Record that a worker has reported all its spans up to ``until_s``."""
        lane = self._lanes.get(worker)
        if lane is not None:
            lane.note_report(until_s)

    def training_started(self, now: float) -> None:
        """Begin the time in which the run trains at ``now``; later calls change nothing."""
        if not self._parts[-1].is_training and len(self._parts) == 1:
            last = self._parts[-1]
            last.end(now)
            self._parts.append(StepAccount(last.step, now))

    def close_step(self, step: int, now: float) -> None:
        """End the account of ``step`` and begin that of the next step."""
        self._parts[-1].close(step, now)
        self._parts.append(StepAccount(step + 1, now))

    # ---- complete accounts

    def advance(self, now: float, open_waits: Iterable[WaitInterval] = ()) -> list[StepAccount]:
        """Attribute the time that workers have reported; returns the accounts that are now complete, in order.

        Args:
            now: seconds on the controller's clock.
            open_waits: the waits in progress at ``now``.
        """
        waits: dict[str, list[WaitInterval]] = defaultdict(list)
        for wait in open_waits:
            waits[wait.worker].append(wait)
        for lane in [*self._lanes.values(), *self._left]:
            limit_s = min(max(lane.reported_s, now - self.patience_s), now)
            if lane.gone_s <= now:
                limit_s = lane.gone_s
            if (
                limit_s - lane.swept_s >= MIN_SWEEP_S
                or lane.gone_s <= now
                or lane.swept_s < self._parts[0].end_s <= now
            ):
                lane.attribute(self._parts, limit_s, now, waits.get(lane.worker, ()), self.patience_s)
        self._left = [lane for lane in self._left if lane.swept_s < lane.gone_s]
        return self._take_complete()

    def finish(self, now: float, open_waits: Iterable[WaitInterval] = ()) -> list[StepAccount]:
        """As `advance`, without waiting for any report; the step in progress ends now."""
        self._parts[-1].cut(now)
        for lane in self._lanes.values():
            lane.note_report(now)
        return self.advance(now, open_waits)

    def _take_complete(self) -> list[StepAccount]:
        behind_s = min((lane.swept_s for lane in (*self._lanes.values(), *self._left)), default=float("inf"))
        complete: list[StepAccount] = []
        while self._parts and self._parts[0].end_s <= behind_s:
            if len(self._parts) == 1 and self._parts[0].end_s == float("inf"):
                break
            part = self._parts.pop(0)
            if part.is_training and part.end_s < float("inf"):
                for role, counts in part.seconds.items():
                    self.totals.setdefault(role, Sums()).add(counts)
            if not part.is_training and self._parts:
                self._before = part
                continue
            if self._before is not None:
                part.merge(self._before)
                self._before = None
            complete.append(part)
        return complete
