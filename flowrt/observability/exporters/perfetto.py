"""Trace of a run for Perfetto (ui.perfetto.dev) and chrome://tracing: the JSON format of trace events.

- The format forbids that slices of a track overlap. So concurrent work of a worker is on further tracks of it, and its
  waits are on tracks of their own.
- Times are microseconds since the start of the run, with a resolution of 1 ns.

Format: "Trace Event Format", a document of the Chromium project.
"""

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from flowrt.errors import ConfigError
from flowrt.observability.exporters.exported_names import exported_name
from flowrt.observability.run_reader import EVENTS, METRICS, TIMELINE
from flowrt.observability.tails import GzipTail, JsonTail, parse_line
from flowrt.runtime.files import partial_path
from flowrt.runtime.run_lines import is_step

MAX_SLICES = 1_000_000
RUN_PID = 1
"""Process id of the tracks that belong to no worker."""
EVENTS_TID, VERSIONS_TID = 1, 2
COUNTERS = (
    *("reward", "reward_std", "length_mean", "truncated", "staleness_mean", "staleness_max", "samples_per_s"),
    *("nll", "kl", "mismatch_kl_k3", "grad_norm"),
)
SWAP = "swap"
LAST_NS = 10**9
"""Length of the slice of the newest version, in nanoseconds."""


@dataclass(slots=True)
class _Span:
    """A slice of a worker's track, in nanoseconds."""

    start_ns: int
    end_ns: int
    name: str
    args: dict[str, Any]


@dataclass(slots=True)
class _WorkerTracks:
    name: str
    role: str
    work: list[_Span] = field(default_factory=list)
    waits: list[_Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PerfettoTrace:
    """The numbers of slices written and left out, and problems."""

    slices: int
    left_out: int
    problems: tuple[str, ...]
    """Parts of the run's files that could not be read."""


def write_trace(
    run_dir: Path, path: Path, first: int = 0, last: int | None = None, max_slices: int = MAX_SLICES
) -> PerfettoTrace:
    """Write the trace of a run, compressed if the name ends with .gz.

    Args:
        run_dir: the run directory, of a live or finished run.
        path: the file to write; an existing one is replaced.
        first: the first step.
        last: the last step; None: no limit.
        max_slices: maximum number of spans and waits; those that begin last are left out.

    Returns:
        What was written and left out. The slices of versions are written in addition.

    Raises ConfigError if there is nothing to write or the run has none of these steps, OSError if writing fails.
    """
    metrics, events = JsonTail(run_dir / METRICS), JsonTail(run_dir / EVENTS)
    steps = [line for line in metrics.read_new()[0] if is_step(line)]
    happened = [line for line in events.read_new()[0] if _is_event(line)]
    from_ns, to_ns = _window(steps, first, last)
    workers, problems = _read(run_dir / TIMELINE)
    problems += [tail.state for tail in (metrics, events) if tail.state not in ("present", "missing")]
    if not steps and not workers and not happened:
        raise ConfigError(f"{run_dir} has no {METRICS}, {EVENTS} and {TIMELINE} yet; there is nothing to export")
    left_out = _limit(workers, from_ns, to_ns, max_slices)
    versions = [line for line in happened if line["kind"] == "published" and type(line.get("version")) is int]
    slices = 0
    with _opened(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _all_events(workers, steps, happened, versions, (from_ns, to_ns)):
            slices += event["ph"] == "X"
            file.write(f"{separator}{json.dumps(event, allow_nan=False)}")
            separator = ",\n"
        file.write("\n]}\n")
    return PerfettoTrace(slices, left_out, tuple(problems))


def _all_events(
    workers: Iterable[_WorkerTracks],
    steps: Iterable[Mapping[str, Any]],
    happened: Iterable[Mapping[str, Any]],
    versions: Sequence[Mapping[str, Any]],
    window: tuple[int, int],
) -> Iterator[dict[str, Any]]:
    host = {line["worker"]: str(line.get("host", "")) for line in happened if "worker" in line and "host" in line}
    yield _named("process_name", RUN_PID, 0, "run")
    yield _named("thread_name", RUN_PID, EVENTS_TID, "events")
    yield _named("thread_name", RUN_PID, VERSIONS_TID, "versions")
    yield from _version_slices(versions, window)
    pids: dict[tuple[str, str], int] = {}
    tid = 0
    arrows = itertools.count(1)  # positive integers: the trace processor accepts no other ids
    for worker in workers:
        place = host.get(worker.name, ""), worker.role
        if place not in pids:
            pids[place] = RUN_PID + 1 + len(pids)
            yield _named("process_name", pids[place], 0, f"{worker.role}{f' on {place[0]}' if place[0] else ''}")
        tracks = [(worker.name, track) for track in _tracks(worker.work)]
        tracks += [(f"{worker.name} waits", track) for track in _tracks(worker.waits)]
        for name, track in tracks:
            tid += 1
            yield _named("thread_name", pids[place], tid, name)
            yield {"ph": "M", "name": "thread_sort_index", "pid": pids[place], "tid": tid, "args": {"sort_index": tid}}
            for span in track:
                yield {
                    "ph": "X",
                    "name": span.name,
                    "cat": "wait" if name.endswith(" waits") else "work",
                    "pid": pids[place],
                    "tid": tid,
                    "ts": _us(span.start_ns),
                    "dur": _us(span.end_ns - span.start_ns),
                    "args": span.args,
                }
                if span.name == SWAP:
                    yield from _arrow(versions, span, (pids[place], tid), next(arrows))
    yield from _counters(steps, window)
    for line in happened:
        at_ns = _ns(line["wall_s"])
        if window[0] <= at_ns <= window[1]:
            yield {
                "ph": "i",
                "s": "g" if line["kind"] in ("guard", "warning", "ended", "rolled_back") else "t",
                "name": line["kind"],
                "pid": RUN_PID,
                "tid": EVENTS_TID,
                "ts": _us(at_ns),
                "args": {"text": line["text"], "step": line.get("step")},
            }


def _counters(steps: Iterable[Mapping[str, Any]], window: tuple[int, int]) -> Iterator[dict[str, Any]]:
    for line in steps:
        at_ns = _ns(line["wall_s"])
        if window[0] <= at_ns <= window[1]:
            for name in COUNTERS:
                if name in line:
                    yield {
                        "ph": "C",
                        "name": exported_name(name),
                        "pid": RUN_PID,
                        "ts": _us(at_ns),
                        "args": {"": line[name]},  # a name here would be appended to the name of the track
                    }


def _version_slices(versions: Sequence[Mapping[str, Any]], window: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """A slice for each version, over the time in which it is the newest one."""
    starts = [_ns(line["wall_s"]) for line in versions]
    for line, start_ns, end_ns in zip(
        versions, starts, [*starts[1:], *(start + LAST_NS for start in starts[-1:])], strict=True
    ):
        if start_ns <= window[1] and end_ns >= window[0] and end_ns >= start_ns:
            yield {
                "ph": "X",
                "name": f"version {line['version']}",
                "cat": "version",
                "pid": RUN_PID,
                "tid": VERSIONS_TID,
                "ts": _us(start_ns),
                "dur": _us(end_ns - start_ns),
                "args": {"version": line["version"]},
            }


def _arrow(
    versions: Sequence[Mapping[str, Any]], swap: _Span, track: tuple[int, int], number: int
) -> Iterator[dict[str, Any]]:
    """An arrow to a swap from the newest version that was published before it."""
    before = [line for line in versions if _ns(line["wall_s"]) <= swap.start_ns]
    if not before:
        return
    source = before[-1]
    common = {"cat": "version", "name": f"version {source['version']}", "id": number}
    yield {"ph": "s", **common, "pid": RUN_PID, "tid": VERSIONS_TID, "ts": _us(_ns(source["wall_s"]))}
    yield {"ph": "f", "bp": "e", **common, "pid": track[0], "tid": track[1], "ts": _us(swap.start_ns)}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


# ---- reading

_FOREVER = 1 << 62


def _window(steps: list[dict[str, Any]], first: int, last: int | None) -> tuple[int, int]:
    """The time of the wanted steps, in nanoseconds. Raises ConfigError if the run has none of them."""
    if first == 0 and last is None:
        return 0, _FOREVER
    wanted = [line for line in steps if first <= line["step"] and (last is None or line["step"] <= last)]
    if not wanted:
        have = f"its steps are {steps[0]['step']} to {steps[-1]['step']}" if steps else "it has no step yet"
        raise ConfigError(f"the run has no step in {first}:{'' if last is None else last}; {have}")
    before = [line["wall_s"] for line in steps if line["step"] < first]
    return _ns(before[-1]) if before else 0, _ns(wanted[-1]["wall_s"]) if last is not None else _FOREVER


def _read(directory: Path) -> tuple[list[_WorkerTracks], list[str]]:
    """The workers with their spans, by role and name, and descriptions of what could not be read."""
    workers: dict[str, _WorkerTracks] = {}
    problems: list[str] = []
    damaged = 0
    for path in sorted(directory.glob("*.jsonl.gz")):
        tail = GzipTail(path)
        for text in tail.read_new().lines:
            line = parse_line(text)
            if line is None or not _is_span(line):
                damaged += bool(text.strip())
                continue
            worker = workers.setdefault(line["worker"], _WorkerTracks(line["worker"], str(line.get("role", ""))))
            is_wait = "wait" in line
            name = str(line["wait"] if is_wait else line.get("kind", ""))
            keys = ("root",) if is_wait else ("rows", "worked_s")
            args = {key: line[key] for key in keys if line.get(key) is not None}
            span = _Span(_ns(line["start_s"]), _ns(line["end_s"]), name, args)
            (worker.waits if is_wait else worker.work).append(span)
        problems += [tail.problem] if tail.problem else []
    problems += [f"{damaged} damaged lines of the timeline are left out"] if damaged else []
    return sorted(workers.values(), key=lambda worker: (worker.role, worker.name)), problems


def _limit(workers: Iterable[_WorkerTracks], from_ns: int, to_ns: int, most: int) -> int:
    """Sort the spans of the window and drop the latest ones beyond ``most``; returns the number dropped."""
    starts: list[int] = []
    lists = [spans for worker in workers for spans in (worker.work, worker.waits)]
    for spans in lists:
        spans[:] = sorted(
            (span for span in spans if span.end_ns >= from_ns and span.start_ns <= to_ns),
            key=lambda span: (span.start_ns, -span.end_ns),
        )
        starts += [span.start_ns for span in spans]
    if len(starts) <= most:
        return 0
    latest_ns = sorted(starts)[most]
    for spans in lists:
        spans[:] = [span for span in spans if span.start_ns < latest_ns]
    return len(starts) - sum(map(len, lists))


def _tracks(spans: Iterable[_Span]) -> list[list[_Span]]:
    """The spans, sorted by start, on tracks without overlap: each span is on the first track that is free."""
    tracks: list[list[_Span]] = []
    for span in spans:
        track = next((track for track in tracks if track[-1].end_ns <= span.start_ns), None)
        if track is None:
            tracks.append([span])
        else:
            track.append(span)
    return tracks


def _is_span(line: Mapping[str, Any]) -> bool:
    start_s, end_s = line.get("start_s"), line.get("end_s")
    return (
        isinstance(line.get("worker"), str)
        and isinstance(start_s, int | float)
        and isinstance(end_s, int | float)
        and 0 <= start_s <= end_s < 1e9
    )


def _is_event(line: Mapping[str, Any]) -> bool:
    at_s = line.get("wall_s")
    is_timed = isinstance(at_s, int | float) and 0 <= at_s < 1e9
    return is_timed and isinstance(line.get("kind"), str) and isinstance(line.get("text"), str)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A temporary file that is renamed to ``path`` when the block succeeds, and deleted when it fails."""
    partial = partial_path(path)
    partial.unlink(missing_ok=True)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as raw:
            if path.suffix == ".gz":
                with gzip.open(raw, "wt", compresslevel=6, encoding="utf-8") as packed:
                    yield packed
            else:
                text = os.fdopen(os.dup(descriptor), "w", encoding="utf-8")
                with text:
                    yield text
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)  # it is still there if the block has failed
