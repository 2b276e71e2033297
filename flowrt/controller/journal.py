"""What a run leaves behind besides its ledger: metrics.jsonl, timeline.jsonl, and the numbers of summary.json."""

import contextlib
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flowrt.controller.events import StepClosed
from flowrt.controller.ledger import Account
from flowrt.errors import FlowError
from flowrt.metrics import Span, busy_fraction
from flowrt.wire.messages import Report

ENDS = 10
"""Steps at either end of the run that `reward_first` and `reward_last` are means of."""


class Journal:
    """Written as the run goes; its memory does not grow with the run."""

    def __init__(self, run_dir: Path, start_s: float) -> None:
        self._run_dir = run_dir
        self._start_s = start_s
        self._metrics: TextIO = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._timeline: TextIO = (run_dir / "timeline.jsonl").open("a", buffering=1)
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=ENDS)
        self._totals = {"samples": 0, "tokens": 0, "lag_sum": 0, "lag_max": 0, "steps": 0}
        self._train_start_s: float | None = None
        self._train_end_s = start_s
        self._fault = ""
        self.numbers: dict[str, float] = {}
        self.latest: dict[str, Any] = {}

    def training_began(self, now: float) -> None:
        """The first prompt to be trained on has been opened."""
        if self._train_start_s is None:
            self._train_start_s = self._train_end_s = now

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
        self.latest = line
        totals = self._totals
        totals["steps"] += 1
        totals["samples"] += closed.samples
        totals["tokens"] += closed.tokens
        totals["lag_sum"] += sum(closed.lags)
        totals["lag_max"] = max(totals["lag_max"], *closed.lags, 0)
        if "reward" in means:
            if len(self._first) < ENDS:
                self._first.append(means["reward"])
            self._last.append(means["reward"])

    def report(self, worker: str, role: str, report: Report) -> None:
        """Spans of work of one worker, and numbers for the summary."""
        for span in report.spans:
            line = {"worker": worker, "role": role, "kind": span.kind, "start_s": span.start_s, "end_s": span.end_s}
            self._write(self._timeline, line)
        self.numbers.update(dict(report.numbers))

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

    def close(self) -> None:
        for file in (self._metrics, self._timeline):
            # What could not be written is tried once more, and fails once more.
            with contextlib.suppress(OSError):
                file.close()

    def summary(self, account: Account, bound: int, dropped: dict[str, int], now: float) -> dict[str, Any]:
        """The run in numbers; call after `close`."""
        totals = self._totals
        start_s = self._start_s if self._train_start_s is None else self._train_start_s
        training_s = max(self._train_end_s - start_s, 1e-9)
        return {
            "steps": totals["steps"],
            "wall_s": round(now - self._start_s, 3),
            "first_step_s": round(start_s - self._start_s, 3),
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
            "busy_fraction": self._busy(start_s, self._train_end_s),
        }

    def _busy(self, start_s: float, end_s: float) -> dict[str, float]:
        """Mean over a role's workers of the share of training time in which each was at work."""
        spans: dict[str, dict[str, list[Span]]] = {}
        for text in (self._run_dir / "timeline.jsonl").read_text().splitlines():
            line = json.loads(text)
            workers = spans.setdefault(line["role"], {})
            workers.setdefault(line["worker"], []).append(Span(line["kind"], line["start_s"], line["end_s"]))
        return {
            role: round(sum(busy_fraction(one, start_s, end_s) for one in workers.values()) / len(workers), 4)
            for role, workers in sorted(spans.items())
        }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None
