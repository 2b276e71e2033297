"""Run metrics: metrics.jsonl, evaluations.jsonl, and the numbers of summary.json.

A resumed run continues in the same files: the lines of steps that were rolled back are removed, and the summary counts
the whole run.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrt.controller.events import COUNTED, FRACTIONS, ZERO_VARIANCE, EvaluationClosed, StepClosed
from flowrt.controller.state.counters import finite, non_finite_names
from flowrt.controller.storage.ledger import Account
from flowrt.controller.transitions.step_metrics import FILTERED_GROUPS, OF_SAMPLES, REFUSED_TRAINED, SKIPPED_PROMPTS
from flowrt.errors import FlowError
from flowrt.protocol.messages import Evaluation, Position
from flowrt.runtime.files import atomic_write
from flowrt.runtime.run_lines import NONFINITE, LineWriter, is_step, read_lines

RESERVED_FIELDS = frozenset(
    (
        *("step", "wall_s", "samples_per_s", *COUNTED),
        *(ZERO_VARIANCE, FILTERED_GROUPS, REFUSED_TRAINED, SKIPPED_PROMPTS),
        *(*FRACTIONS.values(), NONFINITE),
    )
)
"""Fields of a line of metrics.jsonl that no metric or column may overwrite."""
EVALUATION = "eval/"
"""Prefix of the fields with results of evaluations, followed by the name of the data set."""
GUARD = "guard_"
"""Prefix of the fields of guards that have fired, followed by the metric; the value is the number of violations."""
ETA_STEPS = 64
"""Number of step ends from whose rate the remaining time is estimated."""
MAX_WINDOW_STEPS = 10
"""Maximum number of steps in the means `reward_first` and `reward_last`; the two windows never overlap."""


class RunMetrics:
    """Writer of the metrics files. Its memory does not grow with the length of the run."""

    def __init__(
        self,
        run_dir: Path,
        start_s: float,
        position: Position | None = None,
        resumed_from: int | None = None,
        lines: Sequence[str] = (),
        evaluations: Mapping[tuple[str, int], str] | None = None,
    ) -> None:
        """Open the files of a new, resumed or restarted run.

        Args:
            run_dir: the run directory.
            start_s: start of this controller, in seconds on its own clock.
            position: position from which the run continues; None for a new run.
            resumed_from: the step from which the run was resumed; None: the step of ``position``, which is a later one
                after a restart of the controller.
            lines: the ledger's lines of the steps before ``position``; metrics.jsonl is rewritten from them.
            evaluations: the ledger's lines of evaluations, by data set and version; evaluations.jsonl is rewritten from
                them.
        """
        position = position or Position()
        metrics = run_dir / "metrics.jsonl"
        self.evaluations: dict[tuple[str, int], dict[str, Any]] = {
            key: json.loads(line) for key, line in (evaluations or {}).items()
        }
        earlier_lines, elapsed_s, self.rolled_back = _rewrite_metrics(metrics, lines)
        """``rolled_back``: the first and the last step that metrics.jsonl had and the ledger does not have; or None."""
        evaluated = run_dir / "evaluations.jsonl"
        if evaluated.exists() or self.evaluations:
            atomic_write(evaluated, "".join(json.dumps(line) + "\n" for line in self.evaluations.values()))
        self.start_s = start_s - elapsed_s
        """Start of the run on this controller's clock, over all its resumes, in seconds: zero of the run clock."""
        self._first_step = position.step if resumed_from is None else resumed_from
        self._metrics, self._evaluations = LineWriter(metrics), LineWriter(evaluated)
        self._new_results: dict[str, float] = {}  # of evaluations since the last line of a step
        self._training_start_s: float | None = None  # in this attempt of the run, on the controller's clock
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=MAX_WINDOW_STEPS)
        self._totals = {"samples": 0, "tokens": 0, "lag_sum": 0, "lag_max": 0, "steps": 0}
        self._train_end_s = start_s
        self._step_ends: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS)  # number of steps done, and the time
        self._earlier_training_s = 0.0  # in earlier attempts, for steps that were not rolled back
        self._first_step_s: float | None = None  # from the start of the run to that of its first step
        self.numbers: dict[str, float] = dict(position.numbers)
        self.latest: dict[str, Any] = {}
        reported = {name: -1 for name, _ in self.evaluations}  # the last version whose results a line has
        for line in earlier_lines:
            self._count(line)
            for name, version in reported.items():
                reported[name] = line.get(f"{EVALUATION}{name}/version", version)
            step_s = line["samples"] / line["samples_per_s"] if line["samples_per_s"] else 0.0
            self._earlier_training_s += step_s
            if self._first_step_s is None:
                self._first_step_s = line["wall_s"] - step_s
        for (name, version), line in self.evaluations.items():
            if version > reported[name]:
                self._new_results |= _named(line)

    def on_training_started(self, now: float) -> None:
        """Note that a prompt was opened for training; the training time starts at the first one of an attempt.

        ``now``: seconds on the controller's clock.
        """
        if self._training_start_s is None:
            self._training_start_s = self._train_end_s = now
        if self._first_step_s is None:
            self._first_step_s = now - self.start_s

    def write_step(self, closed: StepClosed, now: float) -> str:
        """Write the line of a closed step; returns it.

        NaN and infinity are left out, as JSON has neither; the field ``nonfinite`` names the metrics with such values.
        """
        means = dict(finite(closed.inline_means))
        reserved = RESERVED_FIELDS.union(OF_SAMPLES)
        elapsed_s = max(now - self._train_end_s, 1e-9)
        if not self._step_ends:
            self._step_ends.append((closed.step, self._train_end_s))
        self._step_ends.append((closed.step + 1, now))
        self._train_end_s = now
        line: dict[str, Any] = {
            "step": closed.step,
            "wall_s": round(now - self.start_s, 4),
            **{name: round(value, 6) for name, value in means.items() if name not in RESERVED_FIELDS},
            "samples": closed.samples,
            "groups": closed.groups,
            "tokens": closed.tokens,
            "samples_per_s": round(closed.samples / elapsed_s, 6),
            "staleness_mean": round(closed.staleness_mean, 4),
            "staleness_max": max(closed.lags, default=0),
            **dict(closed.counts),
            **{name: round(value, 6) for name, value in closed.fractions},
            **{name: float(f"{value:.6g}") for name, value in finite(closed.metrics) if name not in reserved},
            **{f"{GUARD}{metric}": violations for metric, violations in closed.fired},
            **self._new_results,
        }
        if nonfinite := non_finite_names((*closed.inline_means, *closed.metrics)):
            line[NONFINITE] = nonfinite
        self._new_results = {}
        text = self._metrics.add(line)
        self._count(line, sum(closed.lags))
        return text

    def eta_s(self, steps: int) -> float | None:
        """Seconds until this number of steps is done, by the rate of the last steps; None before a step has ended."""
        if not self._step_ends:
            return None
        (first, first_s), (last, last_s) = self._step_ends[0], self._step_ends[-1]
        return round(max(steps - last, 0) * (last_s - first_s) / max(last - first, 1), 1)

    def is_evaluated(self, name: str, version: int) -> bool:
        """Whether the results of this evaluation are known."""
        return (name, version) in self.evaluations

    def write_evaluation(self, closed: EvaluationClosed, now: float) -> str:
        """Write the line of an evaluation; returns it. The next line of a step repeats the results."""
        results = dict(finite(closed.numbers))
        line = {"name": closed.name, "version": closed.version, "wall_s": round(now - self.start_s, 4), **results}
        self.evaluations[closed.name, closed.version] = line
        self._new_results |= _named(line)
        return self._evaluations.add(line)

    def evaluated(self) -> tuple[Evaluation, ...]:
        """The results of all evaluations: from before this controller's start by version, then in order of arrival."""
        return tuple(
            Evaluation(name, version, tuple(_results(line).items()))
            for (name, version), line in self.evaluations.items()
        )

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
            if len(self._first) < MAX_WINDOW_STEPS:
                self._first.append(line["reward"])
            self._last.append(line["reward"])

    def add_numbers(self, numbers: Iterable[tuple[str, float]]) -> None:
        """Keep numbers that a worker has reported; a later number replaces an earlier one of the same name."""
        self.numbers.update(numbers)

    def check(self) -> None:
        """Raises FlowError if an earlier write failed."""
        for file in (self._metrics, self._evaluations):
            if file.error is not None:
                raise FlowError(f"{file.path} cannot be written: {file.error.strerror}; is the disk full?")

    def persist(self) -> None:
        """Sync metrics.jsonl to disk, so that a power failure cannot undo its lines. Raises OSError if that fails."""
        self._metrics.sync()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._evaluations.close()

    def summary(self, account: Account, bound: int, dropped: dict[str, int], now: float) -> dict[str, Any]:
        """The numbers of summary.json for the run so far; None for a number that does not exist.

        Args:
            account: counts of the ledger.
            bound: maximum staleness of the configuration, in versions.
            dropped: number of dropped prompts by reason.
            now: seconds on the controller's clock.
        """
        totals = self._totals
        training_start_s = self._train_end_s if self._training_start_s is None else self._training_start_s
        window = max(min(MAX_WINDOW_STEPS, totals["steps"] // 2), 1)
        training_s = max(self._earlier_training_s + self._train_end_s - training_start_s, 1e-9)
        return {
            "steps": totals["steps"],
            "resumed_from": self._first_step,
            "wall_s": round(now - self.start_s, 3),
            "first_step_s": round(self._first_step_s or 0.0, 3),
            "training_s": round(training_s, 3),
            "reward_window": window,
            "reward_first": _mean(self._first[:window]),
            "reward_last": _mean(list(self._last)[-window:]),
            "evaluations": self.evaluation_summary(),
            "eval_first": self.numbers.get("eval_first"),
            "eval_last": self.numbers.get("eval_last"),
            "samples": totals["samples"],
            "samples_per_s": round(totals["samples"] / training_s, 6),
            "tokens_per_s": round(totals["tokens"] / training_s, 3),
            "staleness_bound": bound,
            "staleness_max": totals["lag_max"],
            "staleness_mean": round(totals["lag_sum"] / max(totals["samples"], 1), 4),
            "prompts_lost": account.lost,
            "prompts_trained_twice": account.trained_twice,
            "prompts": account.states,
            "dropped": dict(dropped),
        }

    def evaluation_summary(self) -> dict[str, Any]:
        """By data set: the number of evaluations, and the newest evaluated version with its results."""
        latest: dict[str, Any] = {}
        for name in dict.fromkeys(name for name, _ in self.evaluations):
            versions = [version for of, version in self.evaluations if of == name]
            last = max(versions)
            results = _results(self.evaluations[name, last])
            latest[name] = {"evaluations": len(versions), "version": last, **results}
        return latest


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def _results(line: Mapping[str, Any]) -> dict[str, float]:
    """The results in the line of an evaluation."""
    return {key: value for key, value in line.items() if key not in ("name", "version", "wall_s")}


def _named(line: Mapping[str, Any]) -> dict[str, float]:
    """The version and the results in the line of an evaluation, by their names in metrics.jsonl."""
    results = {**_results(line), "version": line["version"]}
    return {f"{EVALUATION}{line['name']}/{name}": value for name, value in results.items()}


def _rewrite_metrics(path: Path, known: Sequence[str]) -> tuple[list[dict[str, Any]], float, tuple[int, int] | None]:
    """Rewrite metrics.jsonl from the ledger's lines.

    Returns the parsed lines, the elapsed seconds of the run, and the first and last step that were removed, or None.
    """
    recorded, _ = read_lines(path, is_step) if path.is_file() else ([], 0)
    kept = [json.loads(text) for text in known]
    if path.exists() or kept:
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
    undone = {line["step"] for line in recorded} - {line["step"] for line in kept}
    elapsed_s = max((line["wall_s"] for line in (*recorded, *kept)), default=0.0)
    return kept, elapsed_s, (min(undone), max(undone)) if undone else None
