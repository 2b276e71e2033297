"""Reader of a run directory, for the page, run.html and exporters: one method for each path of the page's API.

It reads the directory of a live, finished, killed or partly copied run, and changes nothing in it. If a file is missing
or damaged, its part of the answer is empty; ``run()["files"]`` says which file, and why.

A reader is used by one thread at a time.
"""

import dataclasses
import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrt.controller.storage.integrity import LEDGER
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.storage.run_metrics import EVALUATION
from flowrt.controller.storage.sample_store import SAMPLES
from flowrt.errors import EXIT_GUARD, EXIT_INTERRUPTED, EXIT_OK, ConfigError, FlowError
from flowrt.observability.sample_statistics import GROUP_ORDERS, SampleSettings, SampleStatistics
from flowrt.observability.series import Axis, Series
from flowrt.observability.stored_samples import SORTED, Order, SampleFilter, SampleReader, SampleRow
from flowrt.observability.tails import UNLIMITED, JsonTail, file_version
from flowrt.observability.time_shares import TimeShares
from flowrt.observability.timeline_rows import MAX_LANES, TimelineRows
from flowrt.observability.token_texts import TokenTexts
from flowrt.recipes.config_io import RECIPE_NAMES, defaults, from_toml
from flowrt.recipes.run_dir import CONFIG, run_name
from flowrt.recipes.tasks.task_file import is_task_file

METRICS, EVENTS, ATTRIBUTION, TIMELINE = "metrics.jsonl", "events.jsonl", "attribution.jsonl", "timeline"
EVALUATIONS = "evaluations.jsonl"
SUMMARY = "summary.json"
PRESENT, MISSING = "present", "missing"
Outcome = Literal["complete", "stopped", "failed"]
"""How a run has ended: in order; by a signal, a time limit or a guard; in any other way."""
OUTCOMES: Mapping[int, Outcome] = {EXIT_OK: "complete", EXIT_INTERRUPTED: "stopped", EXIT_GUARD: "stopped"}
LOG_LINES = 50
LOG_BYTES = 32 << 10
MAX_LOG_LINE = 500
MAX_LOGS = 64
MAX_TEXT_CHARS = 2_000
ORDERS: tuple[Order, ...] = ("newest", "worst", "best", "random", *SORTED)
"""Orders of samples; those of `SORTED` also with a minus before them, which is descending."""


@dataclass(frozen=True, slots=True)
class FileUpdate:
    """A line or a rollback that was written since the last `RunReader.read_new`."""

    kind: str
    """step: a line of metrics.jsonl; event: a line of events.jsonl; rewound: the first step that was rolled back."""
    content: Mapping[str, Any]
    step: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The numbers of a run at one time. Their size does not depend on the number of steps."""

    step: int
    """The last step; -1 before the first."""
    metrics: Mapping[str, float]
    """The numbers of the last step, and the last results of each evaluation, by their names in metrics.jsonl."""
    shares: Mapping[str, Any] | None
    """The last line of attribution.jsonl; None before there is one."""
    seconds: Mapping[tuple[str, str], float]
    """Seconds of all steps by role and kind; empty until all of attribution.jsonl is read."""
    events: Mapping[str, int]
    """Number of events by kind."""


class RunReader:
    """Reads a run directory, repeatedly while the run continues."""

    def __init__(self, run_dir: Path) -> None:
        """Read the files. Raises ConfigError if this is not the directory of a run."""
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir} is not there, or is not a directory; name the directory of a run")
        if not is_run_dir(run_dir):
            raise ConfigError(
                f"{run_dir} is not a run directory: it has no {CONFIG}, {METRICS}, {LEDGER}, {EVENTS} or {SUMMARY}"
            )
        self.run_dir = run_dir
        self._metrics = JsonTail(run_dir / METRICS)
        self._events = JsonTail(run_dir / EVENTS)
        self._evaluations = JsonTail(run_dir / EVALUATIONS)
        self._shares = TimeShares(run_dir / ATTRIBUTION)
        self._has_all_shares = False
        self._timeline = TimelineRows(run_dir / TIMELINE)
        self._series = Series()
        self._event_lines: list[dict[str, Any]] = []
        self._thinned = 0  # number of earlier events, which are not kept
        self._event_kinds: Counter[str] = Counter()
        self._results: dict[str, float] = {}  # of evaluations, in metrics.jsonl
        self._last_results: dict[str, float] = {}  # in evaluations.jsonl, also those after the last step
        self._token_texts: TokenTexts | None = None
        self._statistics = SampleStatistics(run_dir)
        self._ledger_state = ""
        self._ledger_answer: tuple[object, dict[str, Any]] | None = None
        self.read_new()

    # ---- tailing

    def read_new(self) -> list[FileUpdate]:
        """Read what was written since the last call, except to attribution.jsonl, which has a method of its own.

        Returns updates in the order of each file: steps and rollbacks of metrics.jsonl, then the lines of events.jsonl.
        """
        self._read_evaluations()
        return [*self._read_metrics(), *self._read_events()]

    def read_attribution(self, most_bytes: int = UNLIMITED) -> bool:
        """Read what was appended to attribution.jsonl, about ``most_bytes`` of it; returns whether more is left."""
        is_behind = self._shares.read_new(most_bytes)
        self._has_all_shares |= not is_behind
        return is_behind

    def _read_metrics(self) -> list[FileUpdate]:
        new_lines, is_replaced = self._metrics.read_new()
        lines = [line for line in new_lines if _is_numbered(line, "wall_s")]
        updates: list[FileUpdate] = []
        if is_replaced:
            before, self._series = self._series, Series()
            self._results = {}
            for line in lines:
                self._append(line)
            lost = before.first_difference(self._series)
            if lost is not None:
                updates.append(FileUpdate("rewound", {"step": lost}, lost - 1))
            known = before.steps[-1] if lost is None and before.steps else (lost or 0) - 1
            lines = [line for line in lines if line["step"] > known]
        else:
            for line in lines:
                if self._series.steps and line["step"] <= self._series.steps[-1]:
                    updates.append(FileUpdate("rewound", {"step": line["step"]}, line["step"] - 1))
                self._append(line)
                updates.append(FileUpdate("step", line, line["step"]))
            return updates
        return [*updates, *(FileUpdate("step", line, line["step"]) for line in lines)]

    def _read_events(self) -> list[FileUpdate]:
        new_lines, is_replaced = self._events.read_new()
        lines = [line for line in new_lines if isinstance(line.get("text"), str) and isinstance(line.get("kind"), str)]
        if is_replaced and self._event_lines:  # thinned: lines after the last known one are new
            count = self._thinned + len(self._event_lines)
            last = self._event_lines[-1]
            known = max((at + 1 for at, line in enumerate(lines) if line == last), default=0)
            self._event_lines, self._thinned = lines[:known], count - known
            self._event_kinds = Counter(line["kind"] for line in self._event_lines)
            lines = lines[known:]
        self._event_lines += lines
        self._event_kinds.update(line["kind"] for line in lines)
        return [FileUpdate("event", line, _whole(line.get("step"), -1)) for line in lines]

    def _read_evaluations(self) -> None:
        lines, is_replaced = self._evaluations.read_new()
        if is_replaced:
            self._last_results = {}
        for line in lines:
            if isinstance(name := line.pop("name", None), str):
                line.pop("wall_s", None)
                results = {f"{EVALUATION}{name}/{result}": value for result, value in line.items()}
                self._last_results |= _finite(results)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._series.append(line)
        self._results |= _finite({name: value for name, value in line.items() if name.startswith(EVALUATION)})

    @property
    def steps(self) -> Sequence[int]:
        """The steps of metrics.jsonl, ascending."""
        return self._series.steps

    @property
    def next_step(self) -> int:
        """The step after the last one of metrics.jsonl."""
        return self._series.steps[-1] + 1 if self._series.steps else 0

    # ---- the page's API

    def run(self) -> dict[str, Any]:
        """Name, recipe, state (live, finished or killed), outcome, configuration, summary and files of the run."""
        text, table, problem = read_config(self.run_dir)
        summary, summary_problem = self._summary()
        files = {
            CONFIG: problem,
            METRICS: self._metrics.state,
            EVENTS: self._events.state,
            ATTRIBUTION: self._shares.state,
            TIMELINE: self._timeline.state,
            **{name: self._presence(name) for name in (SAMPLES, "recording")},
            LEDGER: self._ledger_state or self._presence(LEDGER),
            SUMMARY: summary_problem,
        }
        return {
            "name": run_name(self.run_dir, str(table.get("recipe", ""))),
            "recipe": str(table.get("recipe", "")),
            "outcome": outcome_of(code) if type(code := (summary or {}).get("exit_code")) is int else None,
            "state": "finished" if summary is not None else "live" if is_locked(self.run_dir) else "killed",
            "config": table,
            "changed": _changed(text),
            "summary": summary,
            "files": files,
            "steps": _whole(table.get("steps"), 0),
            "staleness_bound": _whole(table.get("max_staleness"), -1),
        }

    def figures(self) -> RunFigures:
        """The numbers of the run, as far as it was read."""
        seconds = self._shares.seconds if self._has_all_shares else {}
        return RunFigures(
            step=self.next_step - 1,
            metrics={**self._results, **self._series.last(), **self._last_results},
            shares=self._shares.last,
            seconds={(role, kind): value for role, of in seconds.items() for kind, value in of.items()},
            events=dict(self._event_kinds),
        )

    def series(self, from_step: int = 0) -> dict[str, Any]:
        """The numbers of all steps from this one on, by column; see `Series.since`."""
        return self._series.since(from_step)

    def series_window(self, axis: Axis, low: float, high: float, points: int) -> dict[str, Any]:
        """The numbers between two steps or times, decimated to this number of points; see `Series.window`."""
        return self._series.window(axis, low, high, points)

    def attribution(self, from_step: int = 0) -> dict[str, Any]:
        """Seconds of each role by kind, for each step that `read_attribution` has read; see `TimeShares.lines`."""
        return {"lines": self._shares.lines(from_step)}

    def events(self, start: int = 0) -> dict[str, Any]:
        """The events from number ``start`` on, and ``next``, the number of the next event."""
        lines = self._event_lines[max(start - self._thinned, 0) :]
        return {"events": lines, "next": self._thinned + len(self._event_lines)}

    def timeline(
        self, t0: float | None = None, t1: float | None = None, rows: int = MAX_LANES, first: int | None = None
    ) -> dict[str, Any]:
        """Spans and waits of the workers; see `TimelineRows.window`."""
        self._timeline.read_new()
        return self._timeline.window(t0, t1, rows=rows, first=first)

    def samples(self, asked: Mapping[str, str], limit: int, offset: int = 0) -> dict[str, Any]:
        """Samples as ``samples``, with texts cut at 2,000 characters, and the number of all that match as ``total``.

        Args:
            asked: the parameters of ``api/samples``, as texts: step, from, to, order, reason, grep, eval, prompt,
                epoch, group (the id of one of its samples), shortest and longest (response tokens), seed.
            limit: maximum number of samples.
            offset: number of matching samples to skip.

        Raises ConfigError if samples cannot be read or the regular expression is invalid, ValueError for other invalid
        values.
        """
        settings, order = self._sample_settings(asked), _order(asked, ORDERS)
        wanted = _filter(asked, settings)
        if not self._has_samples:
            return {"samples": [], "total": 0}
        page = SampleReader(self.run_dir).query(wanted, order, limit, offset, _number(asked, "seed") or 0)
        name = settings.prompt_name
        lines = [_sample_line(sample) | {"name": name(sample.prompt, sample.eval_name)} for sample in page.samples]
        return {"samples": lines, "total": page.total}

    def groups(self, asked: Mapping[str, str], limit: int, offset: int = 0) -> dict[str, Any]:
        """Groups of samples; see `SampleStatistics.groups`, and `samples` for the arguments.

        ``right``: reward from which a sample is right, in place of that of the configuration.
        """
        order = _order(asked, ("newest", "worst", "best", "random", *GROUP_ORDERS))
        settings = self._sample_settings(asked)
        wanted = _filter(asked, settings)
        if not self._has_samples:
            return {"groups": [], "total": 0, "from_step": None, "right_from": settings.right_from}
        return self._statistics.groups(wanted, settings, order, limit, offset)

    def distributions(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """Histograms and means of samples; see `SampleStatistics.distributions`, and `groups` for the arguments.

        ``dropped``: 1 to count the samples of groups that were dropped, or are not trained yet, too.
        """
        settings = self._sample_settings(asked)
        wanted = _filter(asked, settings)
        if not self._has_samples:
            return {"samples": 0}
        return self._statistics.distributions(wanted, settings, with_dropped=asked.get("dropped") == "1")

    @property
    def _has_samples(self) -> bool:
        return (self.run_dir / SAMPLES).is_file()

    def _sample_settings(self, asked: Mapping[str, str]) -> SampleSettings:
        settings = SampleSettings.of(read_config(self.run_dir)[1])
        right = asked.get("right", "")
        if not right:
            return settings
        value = float(right)
        if not math.isfinite(value):
            raise ValueError("right is not a reward")
        return dataclasses.replace(settings, right_from=value)

    def sample(self, number: int) -> dict[str, Any]:
        """A sample with its tokens. Raises ConfigError if it is not there or unreadable."""
        sample = SampleReader(self.run_dir).get(number)
        if sample is None:
            raise ConfigError(f"{SAMPLES} has no sample {number}; it may have been left out since, to save space")
        if self._token_texts is None:
            self._token_texts = TokenTexts(self._model_dirs())
        columns = sample.ids, sample.logprobs, sample.trainer_logprobs, sample.versions()
        texts = self._token_texts.of(sample.ids)
        tokens = [
            {"text": None if texts is None else texts[at], "id": token, "logprob": _at(columns[1], at)}
            | {"trainer_logprob": _at(columns[2], at), "version": _at(columns[3], at)}
            for at, token in enumerate(sample.ids)
        ]
        row = {**dataclasses.asdict(sample.row), "staleness": sample.row.staleness, "parts": dict(sample.row.parts)}
        row["name"] = self._sample_settings({}).prompt_name(sample.row.prompt, sample.row.eval_name)
        return {**row, "count": sample.row.tokens, "tokens": tokens}

    def _model_dirs(self) -> list[Path]:
        """Directories in which the model of the run may be; the first one with a tokenizer is used."""
        table = read_config(self.run_dir)[1]
        named = [table["model"]] if isinstance(table.get("model"), str) and table["model"] else []
        return [self.run_dir / "model", self.run_dir / "start", *map(Path, named), self.run_dir / "final"]

    def prompt(self, epoch: int, number: int) -> dict[str, Any]:
        """The history of a prompt in an epoch, from the ledger; times are seconds since the start of their run attempt.

        Raises ConfigError if the ledger cannot be read.
        """
        with LedgerReader(self.run_dir / LEDGER) as ledger:
            events = ledger.history(number, epoch)
        return {
            "events": [
                {
                    "at_s": round(event.since_s, 4),
                    "state": event.state,
                    "step": event.step,
                    "reason": event.reason,
                    "reward": event.reward,
                    "attempt": event.attempt,
                }
                for event in events
            ]
        }

    def prompts(self, state: str, reason: str, limit: int, offset: int = 0) -> dict[str, Any]:
        """The prompts that `ledger` counts under a state and a reason, newest change first; see `LedgerReader.prompts`.

        Each has its ``name`` too, as `samples` has it. Raises ConfigError if the ledger cannot be read.
        """
        with LedgerReader(self.run_dir / LEDGER) as ledger:
            prompts, total = ledger.prompts(state, reason, limit, offset)
        name = self._sample_settings({}).prompt_name
        return {"prompts": [prompt._asdict() | {"name": name(prompt.prompt)} for prompt in prompts], "total": total}

    def ledger(self) -> dict[str, Any]:
        """The number of prompts by state, and of dropped ones by reason; empty if the ledger cannot be read."""
        path = self.run_dir / LEDGER
        version = file_version(path), file_version(path.with_name(f"{path.name}-wal"))
        if self._ledger_answer is not None and self._ledger_answer[0] == version:
            return self._ledger_answer[1]
        answer: dict[str, Any] = {"states": {}, "dropped": {}}
        if path.is_file():
            try:
                with LedgerReader(path) as ledger:
                    answer = {"states": ledger.states(), "dropped": ledger.reasons()}
                self._ledger_state = PRESENT
            except (FlowError, OSError, ValueError) as error:
                self._ledger_state = str(error)
        self._ledger_answer = version, answer
        return answer

    def logs(self) -> dict[str, Any]:
        """The last lines of each log file, at most 50 of each of the 64 newest files."""
        directory = self.run_dir / "logs"
        try:
            paths = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            paths = []
        return {"files": {path.name: _last_lines(path) for path in sorted(paths[:MAX_LOGS])}}

    # ---- files

    def _presence(self, name: str) -> str:
        return PRESENT if (self.run_dir / name).exists() else MISSING

    def _summary(self) -> tuple[dict[str, Any] | None, str]:
        try:
            summary: object = json.loads((self.run_dir / SUMMARY).read_bytes())
        except FileNotFoundError:
            return None, MISSING
        except (OSError, ValueError, RecursionError) as error:
            return None, f"{SUMMARY} cannot be read: {error}"
        if not isinstance(summary, dict):
            return None, f"{SUMMARY} is not the summary of a run"
        return summary, PRESENT


def outcome_of(exit_code: int) -> Outcome:
    """How a run with this exit code has ended."""
    return OUTCOMES.get(exit_code, "failed")


def is_run_dir(path: Path) -> bool:
    """Whether a directory has a file of a run."""
    return any((path / name).exists() for name in (CONFIG, METRICS, LEDGER, SUMMARY, EVENTS))


def read_config(run_dir: Path) -> tuple[str, dict[str, Any], str]:
    """The configuration of a run as text and as a table, both empty if it cannot be read; and the state of its file."""
    try:
        text = (run_dir / CONFIG).read_bytes().decode()
        return text, tomllib.loads(text), PRESENT
    except FileNotFoundError:
        return "", {}, MISSING
    except (OSError, ValueError, RecursionError) as error:
        return "", {}, f"{CONFIG} cannot be read: {' '.join(str(error).split())}"


def _sample_line(row: SampleRow) -> dict[str, Any]:
    """A sample in a list, with shortened texts."""
    line = {**dataclasses.asdict(row), "staleness": row.staleness, "parts": dict(row.parts)}
    return line | {name: line[name][:MAX_TEXT_CHARS] for name in ("prompt_text", "completion")}


def _filter(asked: Mapping[str, str], settings: SampleSettings) -> SampleFilter:
    """The filter in the parameters of a request. Raises ValueError."""
    step, prompt, eval_name = _number(asked, "step"), asked.get("prompt"), asked.get("eval", "")
    return SampleFilter(
        first_step=_number(asked, "from") if step is None else step,
        last_step=_number(asked, "to") if step is None else step,
        prompt=settings.prompt_number(prompt, eval_name) if prompt else None,
        epoch=_number(asked, "epoch"),
        min_tokens=_number(asked, "shortest"),
        max_tokens=_number(asked, "longest"),
        reason=asked.get("reason", ""),
        grep=asked.get("grep", ""),
        eval_name=eval_name,
        group_of=_number(asked, "group"),
    )


def _order(asked: Mapping[str, str], orders: Collection[Order]) -> Order:
    """The order in the parameters of a request. Raises ValueError."""
    order = asked.get("order") or "newest"
    if order.removeprefix("-") not in orders:
        raise ValueError(f"order is one of {', '.join(orders)}")
    return order


def _at(column: Sequence[Any], at: int) -> Any:
    return column[at] if at < len(column) else None


def _number(asked: Mapping[str, str], name: str) -> int | None:
    """The whole number in a parameter of a request; None if it is missing. Raises ValueError."""
    text = asked.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(f"{name} is not a whole number")
    return int(text)


def is_locked(run_dir: Path) -> bool:
    """Whether a controller on this host holds the lock of the run directory.

    If the lock file or /proc/locks cannot be read: whether there is an address file of a controller.
    """
    locks = locked_files()
    try:
        if locks is not None:
            return os.stat(run_dir / ".lock").st_ino in locks
    except OSError:
        pass
    return (run_dir / "address").exists()


def locked_files() -> frozenset[int] | None:
    """Inodes of the files that processes of this host have locked; None if /proc/locks cannot be read."""
    try:
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    inodes = (fields[5].rpartition(":")[2] for line in locks if len(fields := line.split()) > 5 and "->" not in fields)
    return frozenset(int(inode) for inode in inodes if inode.isdecimal())


def _is_numbered(line: Mapping[str, Any], name: str) -> bool:
    step, value = line.get("step"), line.get(name)
    if type(step) is not int or not 0 <= step < 1 << 53:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, default: int) -> int:
    return value if type(value) is int else default


def _finite(numbers: Mapping[str, object]) -> dict[str, float]:
    """The finite ones of these values, by name."""
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
    }


def _changed(text: str) -> list[list[Any]] | None:
    """(key, value, default) of each setting that differs from the recipe's default; None if it cannot be read.

    A user's task file is not executed: its settings are compared with the defaults of a built-in task.
    """
    try:
        config = from_toml(text)
        base = defaults(RECIPE_NAMES[0] if is_task_file(config.recipe) else config.recipe, config.algorithm.name)
    except (ConfigError, KeyError, ValueError):  # written by another version of flowrt
        return None
    mine, usual = dict(flat(dataclasses.asdict(config))), dict(flat(dataclasses.asdict(base)))
    return [[key, value, usual.get(key)] for key, value in mine.items() if value != usual.get(key)]


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a configuration with the names of their tables, as ("rollout.rows", 16)."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    return [line[-MAX_LOG_LINE:] for line in text.splitlines()[-LOG_LINES:]]
