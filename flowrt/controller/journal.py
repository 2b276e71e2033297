"""What a run leaves behind besides its ledger: metrics.jsonl, timeline.jsonl, and the numbers of summary.json.

A run that goes back to a checkpoint goes on in the same files: the lines of steps that were taken back are cut off, and
the summary counts the whole run.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from flowrt.controller.events import StepClosed
from flowrt.controller.ledger import Account
from flowrt.errors import FlowError
from flowrt.metrics import Span, busy_fraction
from flowrt.wire.records import BusySpan, Position

ENDS = 10
"""Steps at either end of the run that `reward_first` and `reward_last` are means of."""


class Journal:
    """Written as the run goes; its memory does not grow with the run."""

    def __init__(
        self, run_dir: Path, start_s: float, position: Position | None = None, began: int | None = None
    ) -> None:
        """``began`` is the step from which the run was resumed, where ``position`` is that of a controller's return."""
        position = position or Position()
        metrics, timeline = run_dir / "metrics.jsonl", run_dir / "timeline.jsonl"
        before, spent_s = _before(metrics, position.step)
        self._run_dir = run_dir
        self._start_s = start_s - spent_s
        self._first_step = position.step if began is None else began
        _cut_half_line(timeline)
        for path in (metrics, timeline):
            path.touch(mode=0o600)  # whose directory it is, and who may look into it, is not known here
        self._metrics: TextIO = metrics.open("a", buffering=1)
        self._timeline: TextIO = timeline.open("a", buffering=1)
        self._timeline_start = self._timeline.tell()  # of this controller: those before it may have had another clock
        self._began_s: float | None = None  # training, in this life of the run
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=ENDS)
        self._totals = {"samples": 0, "tokens": 0, "lag_sum": 0, "lag_max": 0, "steps": 0}
        self._train_end_s = start_s
        self._fault = ""
        self._trained_s = 0.0  # in earlier lives, for the steps that count
        self._first_step_s: float | None = None  # from the start of the run to that of its first step
        self.numbers: dict[str, float] = dict(position.numbers)
        self.latest: dict[str, Any] = {}
        for line in before:
            self._count(line)
            elapsed_s = line["samples"] / max(line["samples_per_s"], 0.001)
            self._trained_s += elapsed_s
            if self._first_step_s is None:
                self._first_step_s = line["wall_s"] - elapsed_s

    def training_began(self, now: float) -> None:
        """A prompt to be trained on has been opened; of the first one in a life, this is where training begins."""
        if self._began_s is None:
            self._began_s = self._train_end_s = now
        if self._first_step_s is None:
            self._first_step_s = now - self._start_s

    def step(self, closed: StepClosed, now: float) -> None:
        means = dict(closed.inline_means)
        elapsed_s = max(now - self._train_end_s, 1e-9)
        self._train_end_s = now
        line = {
            "step": closed.step,
            "wall_s": round(now - self._start_s, 4),
            **{name: round(value, 6) for name, value in means.items()},
            "samples": closed.samples,
            "groups": closed.groups,
            "tokens": closed.tokens,
            "samples_per_s": round(closed.samples / elapsed_s, 3),
            "staleness_mean": round(sum(closed.lags) / max(len(closed.lags), 1), 4),
            "staleness_max": max(closed.lags, default=0),
            **{name: float(f"{value:.6g}") for name, value in closed.metrics},
        }
        self._write(self._metrics, line)
        self._count(line, sum(closed.lags))

    def _count(self, line: dict[str, Any], lag_sum: int | None = None) -> None:
        """Add a step to the numbers of the summary."""
        self.latest = line
        totals = self._totals
        totals["steps"] += 1
        totals["samples"] += line["samples"]
        totals["tokens"] += line["tokens"]
        totals["lag_sum"] += round(line["staleness_mean"] * line["samples"]) if lag_sum is None else lag_sum
        totals["lag_max"] = max(totals["lag_max"], line["staleness_max"])
        if "reward" in line:
            if len(self._first) < ENDS:
                self._first.append(line["reward"])
            self._last.append(line["reward"])

    def report(self, worker: str, role: str, spans: Iterable[BusySpan], numbers: Iterable[tuple[str, float]]) -> None:
        """Spans of work of one worker, and numbers for the summary."""
        for span in spans:
            line = {"worker": worker, "role": role, "kind": span.kind, "start_s": span.start_s, "end_s": span.end_s}
            self._write(self._timeline, line)
        self.numbers.update(numbers)

    def _write(self, file: TextIO, line: Mapping[str, Any]) -> None:
        """Nothing more is written after a failure: half a line would be followed by a whole one."""
        if self._fault:
            return
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._fault = f"{file.name} cannot be written: {error.strerror}; is the disk full?"

    def check(self) -> None:
        """Raises FlowError when something could not be written."""
        if self._fault:
            raise FlowError(self._fault)

    def persist(self) -> None:
        """What was written about steps outlasts the machine."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        for file in (self._metrics, self._timeline):
            # What could not be written is tried once more, and fails once more.
            with contextlib.suppress(OSError):
                file.close()

    def summary(self, account: Account, bound: int, dropped: dict[str, int], now: float) -> dict[str, Any]:
        """The run in numbers; call after `close`."""
        totals = self._totals
        began_s = self._train_end_s if self._began_s is None else self._began_s
        training_s = max(self._trained_s + self._train_end_s - began_s, 1e-9)
        return {
            "steps": totals["steps"],
            "resumed_from": self._first_step,
            "wall_s": round(now - self._start_s, 3),
            "first_step_s": round(self._first_step_s or 0.0, 3),
            "training_s": round(training_s, 3),
            "reward_first": _mean(self._first),
            "reward_last": _mean(list(self._last)),
            "eval_first": self.numbers.get("eval_first"),
            "eval_last": self.numbers.get("eval_last"),
            "samples": totals["samples"],
            "samples_per_s": round(totals["samples"] / training_s, 3),
            "tokens_per_s": round(totals["tokens"] / training_s, 3),
            "staleness_bound": bound,
            "staleness_max": totals["lag_max"],
            "staleness_mean": round(totals["lag_sum"] / max(totals["samples"], 1), 4),
            "prompts_lost": account.lost,
            "prompts_trained_twice": account.trained_twice,
            "prompts": account.states,
            "dropped": dict(dropped),
            "busy_fraction": self._busy(began_s, self._train_end_s),
        }

    def _busy(self, start_s: float, end_s: float) -> dict[str, float]:
        """Mean over a role's workers of the share of this life's training time in which each was at work."""
        spans: dict[str, dict[str, list[Span]]] = {}
        with (self._run_dir / "timeline.jsonl").open() as timeline:
            timeline.seek(self._timeline_start)
            lines = [json.loads(text) for text in timeline]
        for line in lines:
            workers = spans.setdefault(line["role"], {})
            workers.setdefault(line["worker"], []).append(Span(line["kind"], line["start_s"], line["end_s"]))
        return {
            role: round(sum(busy_fraction(one, start_s, end_s) for one in workers.values()) / len(workers), 4)
            for role, workers in sorted(spans.items())
        }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def _cut_half_line(path: Path) -> None:
    """What a disk that was full took of the last line is no line: the next one would be written behind it."""
    if path.is_file():
        whole = path.read_bytes().rpartition(b"\n")
        if whole[2]:
            os.truncate(path, len(whole[0]) + len(whole[1]))


def _before(path: Path, step: int) -> tuple[list[dict[str, Any]], float]:
    """The lines of the steps before ``step``, all others cut off; and the time that the run has taken so far."""
    if not path.is_file():
        return [], 0.0
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break  # the last one, of a controller that was killed while it wrote
    kept = [line for line in lines if line["step"] < step]
    aside = path.with_name(f".{path.name}.part")
    aside.touch(mode=0o600)
    aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
    aside.rename(path)
    return kept, lines[-1]["wall_s"] if lines else 0.0
