"""Feed of an exporter: reads the files of a live or finished run, and passes new lines on."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from flowrt.controller.storage.time_files import is_attribution
from flowrt.errors import ConfigError
from flowrt.observability.attribution import drop_repeated
from flowrt.observability.exporters.sink import Sink
from flowrt.observability.run_reader import ATTRIBUTION, EVENTS, METRICS, SUMMARY, is_locked
from flowrt.observability.stored_samples import SampleFilter, SampleReader
from flowrt.observability.tails import JsonTail
from flowrt.runtime.run_lines import is_step

SAMPLES_LAG_S = 2.0
"""Seconds to wait for the samples of a step after its line was read, because they are stored later."""
MAX_SAMPLES = 64
"""Maximum number of samples of one step or evaluation that an exporter is given, lowest reward first."""
ROUNDED_S = 0.001
"""Upper bound in seconds of the difference of a step's end in two files, which round it to different digits."""
GONE_S = 60.0
"""Seconds without a controller after which a run without a summary is taken as over."""


class Feed:
    """Passes the lines of a run to one exporter, each line once."""

    def __init__(self, run_dir: Path, sink: Sink, first: int = 0, last: int | None = None) -> None:
        """Set up; nothing is read yet.

        Args:
            run_dir: the run directory.
            sink: the exporter.
            first: the first step to pass on.
            last: the last step to pass on; None: no limit.
        """
        self._run_dir = run_dir
        self._sink = sink
        self._first, self._last = first, last
        self._metrics = JsonTail(run_dir / METRICS)
        self._events = JsonTail(run_dir / EVENTS)
        self._shares = JsonTail(run_dir / ATTRIBUTION)
        self._steps, self._ends_s = array("q"), array("d")
        self._event_count = 0
        self._unclosed: list[dict[str, Any]] = []  # lines of attribution.jsonl of steps that metrics.jsonl lacks
        self._samples_due: dict[tuple[str, int], float] = {}
        self._gone_since_s: float | None = None

    def read_new(self, is_last: bool = False) -> int:
        """Pass on new lines; returns their number. ``is_last``: do not wait for samples that are stored later."""
        events = self._new_events()
        steps = self._new_steps()
        sink = self._sink
        for line in events:
            sink.event(line)
            is_new = _time(line, "wall_s") > sink.steps_until_s
            if is_new and line.get("kind") == "evaluation" and isinstance(line.get("name"), str):
                self._samples_due.setdefault((line["name"], int(line.get("version", 0))), monotonic())
        steps = [line for line in steps if line["wall_s"] > sink.steps_until_s]
        for line in steps:
            sink.step(line)
            self._samples_due.setdefault(("", line["step"]), monotonic())
        shares = [line for line in self._new_shares() if line["to_s"] > sink.shares_until_s]
        for line in shares:
            sink.shares(line)
        self._pass_samples(monotonic() - (0.0 if is_last else SAMPLES_LAG_S))
        return len(events) + len(steps) + len(shares)

    def is_over(self, now: float) -> bool:
        """Whether the run has no controller, and either has a summary or has had no controller for `GONE_S`.

        ``now`` is monotonic time in seconds.
        """
        if is_locked(self._run_dir):
            self._gone_since_s = None
            return False
        if (self._run_dir / SUMMARY).exists():
            return True
        self._gone_since_s = now if self._gone_since_s is None else self._gone_since_s
        return now - self._gone_since_s > GONE_S

    def _is_wanted(self, step: object) -> bool:
        return type(step) is int and self._first <= step and (self._last is None or step <= self._last)

    def _new_steps(self) -> list[dict[str, Any]]:
        new_lines, is_replaced = self._metrics.read_new()
        lines = [line for line in new_lines if is_step(line)]
        if is_replaced:  # rewritten after a resume
            known = 0
            for line in lines:
                if known >= len(self._steps) or not self._is_known(known, line):
                    break
                known += 1
            self._go_back(known)
            lines = lines[known:]
        new: list[dict[str, Any]] = []
        for line in lines:
            if self._steps and line["step"] <= self._steps[-1]:
                self._go_back(next(at for at, step in enumerate(self._steps) if step >= line["step"]))
                new = [kept for kept in new if kept["step"] < line["step"]]
            self._steps.append(line["step"])
            self._ends_s.append(line["wall_s"])
            if self._is_wanted(line["step"]):
                new.append(line)
        return new

    def _new_shares(self) -> list[dict[str, Any]]:
        """The new lines of attribution.jsonl of steps that are closed, as metrics.jsonl has them.

        Lines of steps that were rolled back, and of a step in which the run ended, have another end.
        """
        for line in self._shares.read_new()[0]:
            if is_attribution(line):
                drop_repeated(self._unclosed, line["step"])
                self._unclosed.append(line)
        last = self._steps[-1] if self._steps else -1
        closed = [line for line in self._unclosed if line["step"] <= last]
        self._unclosed = self._unclosed[len(closed) :]
        return [line for line in closed if self._is_wanted(line["step"]) and self._ends_with(line)]

    def _ends_with(self, line: Mapping[str, Any]) -> bool:
        """Whether the step of a line of attribution.jsonl ended when this line says."""
        at = bisect_left(self._steps, line["step"])
        return bool(self._steps[at] == line["step"] and abs(self._ends_s[at] - line["to_s"]) <= ROUNDED_S)

    def _is_known(self, at: int, line: Mapping[str, Any]) -> bool:
        return bool(self._steps[at] == line["step"] and self._ends_s[at] == line["wall_s"])

    def _go_back(self, count: int) -> None:
        """Forget all steps but the first ``count``."""
        if count < len(self._steps):
            self._sink.rewound(max(self._steps[count], self._first))
            del self._steps[count:], self._ends_s[count:]

    def _new_events(self) -> list[dict[str, Any]]:
        new_lines, is_replaced = self._events.read_new()
        lines = [line for line in new_lines if isinstance(line.get("kind"), str) and isinstance(line.get("text"), str)]
        if is_replaced:  # thinned: lines up to the newest known time were passed on before
            lines = [line for line in lines if _time(line, "unix_s") > self._last_event_s]
        self._last_event_s = max([self._last_event_s, *(_time(line, "unix_s") for line in lines)])
        return lines

    _last_event_s = float("-inf")

    def _pass_samples(self, until_s: float) -> None:
        due = [key for key, since_s in self._samples_due.items() if since_s <= until_s]
        if not due:
            return
        for key in due:
            del self._samples_due[key]
        try:
            reader = SampleReader(self._run_dir)
            for name, step in due:
                chosen = SampleFilter(first_step=step, last_step=step, eval_name=name)
                page = reader.query(chosen, order="worst", limit=MAX_SAMPLES)
                if rows := [_sample(row) for row in page.samples]:
                    self._sink.samples(rows)
        except ConfigError:
            return  # the run stores no samples, or the file is damaged, which readers of samples report


def _time(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else float("-inf")


def _sample(row: Any) -> dict[str, Any]:
    """The columns of a sample that exporters are given."""
    names = ("id", "step", "eval_name", "epoch", "prompt", "member", "reward", "finish", "reason", "tokens")
    columns = {name: getattr(row, name) for name in (*names, "advantage", "prompt_text", "completion", "staleness")}
    return {**columns, "parts": dict(row.parts)}
