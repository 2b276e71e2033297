"""Files of time: attribution.jsonl, a line for each step, and the timeline of spans and waits.

After a failed write, one warning is logged and nothing more is written; the run and the attribution continue. A resumed
or restarted run continues the files. The lines of steps that were rolled back stay, because their seconds were spent: a
line replaces all earlier lines of its step and of later ones.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from flowrt.controller.attribution.account import StepAccount, TimeAccount
from flowrt.controller.attribution.causes import KINDS, Interval, Kind, WaitInterval
from flowrt.controller.attribution.resources import ResourceAccount
from flowrt.controller.storage.timeline_file import DEFAULT_MAX_BYTES, TimelineFile
from flowrt.protocol.resources import unpack_use
from flowrt.protocol.spans import MAX_KIND_CHARS, unpack_spans
from flowrt.runtime.run_lines import LineWriter
from flowrt.runtime.timeline import Span

log = logging.getLogger(__name__)
ATTRIBUTION = "attribution.jsonl"
PATIENCE_HEARTBEATS = 3
MIN_WAIT_S = 0.001
"""Waits shorter than this are attributed, but not written to the timeline."""


Seconds = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""A finite number."""


class RoleSeconds(msgspec.Struct):
    """The fields of a role: the number of its workers, and their seconds by kind, `KINDS`."""

    workers: int
    busy: Seconds
    samples: Seconds
    gate: Seconds
    weights: Seconds
    update: Seconds
    save: Seconds
    away: Seconds
    other: Seconds


class AttributionLine(msgspec.Struct):
    """The fields that every line of attribution.jsonl has."""

    step: int
    from_s: Seconds
    to_s: Seconds
    roles: dict[str, RoleSeconds]
    roots: list[tuple[str, str, str, Seconds]]
    worst: dict[str, list[tuple[str, Seconds]]]


def is_attribution(line: dict[str, Any]) -> bool:
    """Whether this is a line of attribution.jsonl."""
    try:
        msgspec.convert(line, AttributionLine)
    except msgspec.ValidationError:
        return False
    return True


class TimeFilesStart(NamedTuple):
    """Where and when a controller begins to write its files of time."""

    run_dir: str
    now: float
    """Start of this controller, in seconds on its clock."""
    origin_s: float
    """Start of the run on that clock: zero of all times in the files."""
    step: int
    """The first step that this controller closes."""
    heartbeat_s: float
    """Seconds between heartbeats of a worker."""
    timeline_bytes: int = DEFAULT_MAX_BYTES
    """Maximum size of the timeline on disk."""


class TimeFiles:
    """Attributes the time of a run's workers and writes its files."""

    def __init__(self, start: TimeFilesStart) -> None:
        """Continue the files of the run, or begin them."""
        self.account = TimeAccount(start.now, start.step, PATIENCE_HEARTBEATS * start.heartbeat_s)
        self.latest: dict[str, Any] | None = None
        """The line of the last complete step."""
        self.resources = ResourceAccount(start.now)
        """What the workers use."""
        self.malformed = 0
        """Records of spans and resources that could not be read."""
        self._origin_s = start.origin_s
        self._is_broken = False
        self._file: LineWriter | None = None
        run_dir = Path(start.run_dir)
        self._timeline = TimelineFile(run_dir, start.timeline_bytes)
        try:
            self._file = LineWriter(run_dir / ATTRIBUTION)
        except OSError as error:
            self._fail(error)

    # ---- spans, waits and resources

    def add_record(self, worker: str, record: bytes) -> None:
        """Add packed spans that a worker has reported; bytes that are none are counted as ``malformed``."""
        try:
            spans = unpack_spans(record)
        except ValueError:
            self.malformed += 1
        else:
            self.add_spans(worker, spans)

    def add_resources(self, worker: str, record: bytes) -> None:
        """Add what a worker uses; bytes that are no record are counted as ``malformed``."""
        try:
            use = unpack_use(record)
        except ValueError:
            self.malformed += 1
        else:
            self.resources.add(worker, self.account.role(worker), use)

    def add_spans(self, worker: str, spans: Iterable[Span]) -> None:
        """Add spans that a worker has reported, except spans with times that are not finite or not in order."""
        intervals = []
        for kind, start_s, end_s, worked_s, rows, root in spans:
            length_s = end_s - start_s
            if not 0 <= length_s < math.inf:  # neither is a NaN
                continue
            if not 0 <= worked_s <= length_s:
                worked_s = length_s
            intervals.append(Interval(kind[:MAX_KIND_CHARS], start_s, end_s, worked_s, rows, root[:MAX_KIND_CHARS]))
        self.account.add_spans(worker, intervals)
        role = self.account.role(worker)
        for interval in () if self._is_broken else intervals:
            line = {
                "worker": worker,
                "role": role,
                "kind": interval.kind,
                **self._times(interval.start_s, interval.end_s),
            }
            if interval.worked_s < interval.end_s - interval.start_s:
                line["worked_s"] = round(interval.worked_s, 6)
            if 0 <= interval.rows < math.inf:
                line["rows"] = round(interval.rows, 2)
            if interval.root:
                line["root"] = interval.root
            self._timeline.add(line)

    def add_waits(self, waits: Iterable[WaitInterval]) -> None:
        """Add waits that have ended."""
        ended = list(waits)
        for wait in () if self._is_broken else ended:
            role = self.account.role(wait.worker)
            if role and wait.end_s - wait.start_s >= MIN_WAIT_S:
                line = {"worker": wait.worker, "role": role, "wait": wait.cause.value, "root": wait.root}
                self._timeline.add({**line, **self._times(wait.start_s, wait.end_s)})
        self.account.add_waits(ended)

    def write(self, now: float, open_waits: Iterable[WaitInterval]) -> None:
        """Write the steps that are complete, and the buffered spans and waits; called at each tick."""
        self.resources.advance(now)
        self._write(self.account.advance(now, open_waits))

    def close(self, now: float, open_waits: Iterable[WaitInterval]) -> None:
        """Write all steps, spans and waits, and close the files; the step in progress ends ``now``."""
        self.add_waits(open_waits)
        self.resources.finish(now)
        self._write(self.account.finish(now))
        if self._file is not None:
            self._file.close()
        try:
            self._timeline.close()
        except OSError as error:
            self._fail(error)

    def shares(self) -> dict[str, dict[str, float]]:
        """By role and kind, the fraction of the role's time in complete steps of this controller that the kind took."""
        return {
            role: {kind: round(counts[kind] / max(counts.total(), 1e-9), 4) for kind in KINDS}
            for role, counts in sorted(self.account.totals.items())
        }

    def busy(self) -> dict[str, float]:
        """By role, the fraction of the role's time in complete steps of this controller in which it was busy."""
        return {role: of[Kind.BUSY.value] for role, of in self.shares().items()}

    def _times(self, start_s: float, end_s: float) -> dict[str, Any]:
        return {"start_s": round(start_s - self._origin_s, 6), "end_s": round(end_s - self._origin_s, 6)}

    def _write(self, steps: Iterable[StepAccount]) -> None:
        for step in steps:
            self.latest = step.as_json(self._origin_s)
            if (used := self.resources.take(self._origin_s)) is not None:
                self.latest["resources"] = used
            if not self._is_broken and self._file is not None:
                self._file.add(self.latest)
                if self._file.error is not None:
                    self._fail(self._file.error)
        if not self._is_broken:
            try:
                self._timeline.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._is_broken:
            return
        self._is_broken = True
        log.warning("where the time goes is not written any more: %s; free the disk and resume the run", error)
