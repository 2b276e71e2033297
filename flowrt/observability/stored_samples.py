"""Stored samples of a run: reads samples.sqlite during the run, after it, and in copies of its directory.

Each call opens the file and closes it again, because an open reader can keep the writer from truncating its log. Any
thread may call.
"""

import json
import re
import sqlite3
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowrt.controller.storage.integrity import connect_read_only
from flowrt.controller.storage.sample_store import SAMPLES, SAMPLES_VERSION
from flowrt.errors import ConfigError, FlowError
from flowrt.observability.sample_columns import SampleColumns
from flowrt.protocol.messages import LARGEST_PROMPT
from flowrt.protocol.sample_records import unpack_text
from flowrt.rewards.outcomes import Result

NamedOrder = Literal["newest", "oldest", "worst", "best", "random"]
Order = str
"""A `NamedOrder`, or a column of `SORTED`; with a minus before it, in descending order."""
ANY_EVALUATION = "*"
"""Name that stands for the evaluations of all data sets."""
_ROLLED_BACK = (
    "EXISTS (SELECT 1 FROM run_attempts AS later "
    "WHERE later.run_attempt > samples.run_attempt AND later.step <= samples.step)"
)
_ROW = (
    "id, step, run_attempt, flow, eval_name, epoch, prompt, member, attempt, reward, parts, finish, reason, "
    f"version_min, version_max, tokens, advantage, generate_s, reward_s, prompt_text, completion, {_ROLLED_BACK}"
)
_SAME_GROUP = "(epoch, prompt, run_attempt) = (SELECT epoch, prompt, run_attempt FROM samples WHERE id = ?)"
_SAME_EVALUATION = (
    "(eval_name, step, prompt, run_attempt) = (SELECT eval_name, step, prompt, run_attempt FROM samples WHERE id = ?)"
)
_NEWEST = "step DESC, epoch DESC, prompt, run_attempt DESC, member, id"
_ORDERS: Mapping[Order, str] = {
    "newest": _NEWEST,
    "oldest": "step, epoch, prompt, run_attempt, member, id",
    "worst": "reward IS NULL, reward, step DESC, id",
    "best": "reward DESC, step DESC, id",
    "random": "(id + ?) * 2654435761 % 4294967291, id",
}
SORTED: Mapping[str, str] = {
    **{name: name for name in ("step", "prompt", "member", "reward", "advantage", "tokens")},
    "staleness": "CASE flow WHEN 'train' THEN step - version_min END",
    "ended": "finish || reason",
}
"""Columns that samples may be sorted by, and their expressions; the index ``sample_numbers`` has all of them."""
_COLUMNS_READ = (
    "id, step, CASE flow WHEN 'eval' THEN step ELSE 0 END, run_attempt, epoch, prompt, member, attempt, tokens, "
    f"CASE WHEN reason = '{Result.NOT_APPLICABLE}' THEN NULL ELSE reward END, advantage, "
    "CASE flow WHEN 'train' THEN step - version_min END, finish = 'length', flagged"
)
"""The columns of `SampleColumns`, without the last one."""
_TYPES = (*(np.int64,) * 9, *(np.float64,) * 3, *(np.bool_,) * 2)
READ_AT_ONCE = 20_000
"""Rows of numbers that are in memory as Python objects at a time."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A stored sample without its tokens."""

    id: int
    step: int
    """The step that trained the sample; if it was dropped, the step in training then; in an evaluation, the version."""
    run_attempt: int
    """Number of the start or resume of the run that made the sample, from 1."""
    flow: str
    """train or eval."""
    eval_name: str
    """Data set of the evaluation; empty for a sample of training."""
    epoch: int
    prompt: int
    member: int
    """Number of the sample in its group."""
    attempt: int
    reward: float | None
    parts: Mapping[str, float]
    """Value of each reward function by its name, and of each of its parts as NAME/PART."""
    finish: str
    """stop, length, stop_string or aborted."""
    reason: str
    """Why the reward failed or the sample was dropped; empty otherwise. It begins with one word, such as timeout."""
    version_min: int | None
    version_max: int | None
    tokens: int
    """Number of response tokens."""
    advantage: float | None
    generate_s: float | None
    reward_s: float | None
    prompt_text: str
    completion: str
    rolled_back: bool
    """Whether a later start or resume of the run began at the step of the sample or before it."""

    @property
    def staleness(self) -> int | None:
        """The trained version minus the oldest version that generated a token; None if unknown or of an evaluation."""
        if self.flow != "train" or self.version_min is None:
            return None
        return self.step - self.version_min


@dataclass(frozen=True, slots=True)
class Sample:
    """A stored sample with its tokens. All token columns have the same length, or are empty if they are unknown."""

    row: SampleRow
    spans: tuple[int, ...]
    """(version, count) pairs, flattened: the weight version that generated each run of tokens."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """In nats, of the rollout worker, rounded to float16."""
    trainer_logprobs: tuple[float, ...]
    """In nats, of the trainer before the step, rounded to float16."""

    def versions(self) -> tuple[int | None, ...]:
        """The weight version that generated each response token; None where it is unknown."""
        pairs = zip(self.spans[::2], self.spans[1::2], strict=False)
        versions = [version for version, count in pairs for _ in range(min(count, self.row.tokens))]
        missing = max(self.row.tokens - len(versions), 0)
        return (*versions[: self.row.tokens], *(None,) * missing)


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Conditions on samples; None or an empty text: no condition."""

    first_step: int | None = None
    last_step: int | None = None
    prompt: int | None = None
    epoch: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """Bounds of the number of response tokens, inclusive."""
    reason: str = ""
    """The first word of the reason, such as timeout."""
    grep: str = ""
    """A regular expression that is found in the prompt or in the completion."""
    eval_name: str = ""
    """Data set of evaluations, or `ANY_EVALUATION`; empty: samples of training."""
    group_of: int | None = None
    """Id of a sample: those of its group, with itself. Its flow is that of ``eval_name``."""
    with_rolled_back: bool = True
    """Whether samples of steps that were rolled back are included."""

    def conditions(self) -> tuple[str, list[Any]]:
        """The WHERE clause of all conditions except ``grep``, and the values of its parameters."""
        # A literal, not a parameter: SQLite compares it with the conditions of partial indexes. They find a group; for
        # anything else ``sample_numbers`` is better, and the plus excludes them.
        is_group = self.group_of is not None or (self.prompt is not None and self.epoch is not None)
        clauses = [f"{'' if is_group else '+'}flow = '{'eval' if self.eval_name else 'train'}'"]
        values: list[Any] = []
        columns: list[tuple[str, Any]] = [
            ("step >= ?", self.first_step),
            ("step <= ?", self.last_step),
            ("prompt = ?", self.prompt),
            ("epoch = ?", self.epoch),
            ("tokens >= ?", self.min_tokens),
            ("tokens <= ?", self.max_tokens),
            ("eval_name = ?", self.eval_name if self.eval_name not in ("", ANY_EVALUATION) else None),
        ]
        given = [(clause, value) for clause, value in columns if value is not None]
        clauses += [clause for clause, _ in given]
        values += [min(value, LARGEST_PROMPT) if isinstance(value, int) else value for _, value in given]
        if self.reason:
            clauses.append("(reason = ? OR substr(reason, 1, ?) = ?)")
            values += [self.reason, len(self.reason) + 1, f"{self.reason}:"]
        if self.group_of is not None:
            clauses.append(_SAME_EVALUATION if self.eval_name else _SAME_GROUP)
            values.append(self.group_of)
        if not self.with_rolled_back:
            clauses.append(f"NOT {_ROLLED_BACK}")
        return " AND ".join(clauses), values

    def pattern(self) -> re.Pattern[str] | None:
        """The compiled ``grep``; None if it is empty. Raises ConfigError for an invalid regular expression."""
        if not self.grep:
            return None
        try:
            with warnings.catch_warnings(action="ignore"):  # about syntax whose meaning will change
                return re.compile(self.grep)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{self.grep!r:.80} is not a regular expression: {error}") from error


@dataclass(frozen=True, slots=True)
class SamplePage:
    """Some of the samples that match a filter, and the number of all that match."""

    samples: tuple[SampleRow, ...]
    total: int


class SampleReader:
    """Reads a sample store. All methods raise ConfigError if the file cannot be read."""

    def __init__(self, path: Path) -> None:
        """Check that the file can be read. ``path``: samples.sqlite, or the run directory that contains it."""
        self._path = path / SAMPLES if path.is_dir() else path
        if not self._path.is_file():
            raise ConfigError(
                f"{self._path} is not there: the run has not begun, or stores no samples (samples.per_step 0)"
            )
        with self._database():
            pass

    @property
    def count(self) -> int:
        """Number of stored samples, of training and of evaluations."""
        [(count,)] = self._rows("SELECT COUNT(*) FROM samples")
        return int(count)

    def steps(self, eval_name: str = "") -> tuple[int, int] | None:
        """The first and the last step with stored samples, of training or of evaluations; None if there are none."""
        where, values = SampleFilter(eval_name=eval_name).conditions()
        [(first, last)] = self._rows(_select("MIN(step), MAX(step)", where), values)
        return None if first is None else (int(first), int(last))

    def evaluations(self) -> tuple[str, ...]:
        """The data sets of evaluations with stored samples, in alphabetical order."""
        rows = self._rows("SELECT DISTINCT eval_name FROM samples WHERE flow = 'eval' ORDER BY eval_name")
        return tuple(str(name) for (name,) in rows)

    def reasons(self) -> dict[str, int]:
        """Number of samples by the first word of their reason."""
        rows = self._rows("SELECT reason, COUNT(*) FROM samples WHERE reason != '' GROUP BY reason")
        counts: dict[str, int] = {}
        for reason, count in rows:
            word = str(reason).partition(":")[0]
            counts[word] = counts.get(word, 0) + int(count)
        return counts

    def left_out(self) -> dict[str, int]:
        """Number of samples that were not stored, by reason."""
        return {str(reason): int(count) for reason, count in self._rows("SELECT reason, samples FROM left_out")}

    def query(
        self,
        wanted: SampleFilter | None = None,
        order: Order = "newest",
        limit: int = 20,
        offset: int = 0,
        seed: int = 0,
    ) -> SamplePage:
        """Samples that match a filter, in an order.

        Args:
            wanted: the filter; None: all samples of training.
            order: newest, oldest, worst or best (by reward) first, random, or a column of `SORTED`, ascending or, with
                a minus before it, descending; a sample without a number in it is the last one.
            limit: maximum number of samples to return.
            offset: number of matching samples to skip.
            seed: seed of the random order.

        Raises ConfigError also for an invalid regular expression.
        """
        wanted = wanted or SampleFilter()
        pattern = wanted.pattern()
        where, values = wanted.conditions()
        in_order, order_values = _in_order(order, seed)
        # Ids first: an index has all that is compared, and only the rows of the page are read.
        statement = _select("id", where, in_order)
        with self._database() as database:
            if pattern is None:
                ids = database.execute(f"{statement} LIMIT ? OFFSET ?", [*values, *order_values, limit, offset])
                rows = list(_rows_of(database, [number for (number,) in ids]))
                [(total,)] = database.execute(_select("COUNT(*)", where), values)
                return SamplePage(tuple(rows), int(total))
            containing = _containing(database, pattern, where, values)
            ids = database.execute(statement, [*values, *order_values])
            matching = [number for (number,) in ids if number in containing]
            rows = list(_rows_of(database, matching[offset : offset + limit]))
        return SamplePage(tuple(rows), len(matching))

    def matching(self, wanted: SampleFilter) -> set[int]:
        """The ids of the samples that match a filter. Raises ConfigError as `query`."""
        pattern = wanted.pattern()
        where, values = wanted.conditions()
        with self._database() as database:
            if pattern is not None:
                return _containing(database, pattern, where, values)
            return {int(number) for (number,) in database.execute(_select("id", where), values)}

    def columns(self, wanted: SampleFilter, most: int) -> SampleColumns:
        """The numbers of the newest samples that match a filter; its ``grep`` is not regarded.

        Args:
            wanted: the filter.
            most: maximum number of samples, which take about 100 bytes each.
        """
        where, values = wanted.conditions()
        blocks = [[np.zeros(0, kind) for kind in _TYPES]]
        with self._database() as database:
            attempts = database.execute("SELECT run_attempt, step FROM run_attempts").fetchall()
            rows = database.execute(_select(_COLUMNS_READ, where, "ORDER BY step DESC LIMIT ?"), [*values, most])
            while block := rows.fetchmany(READ_AT_ONCE):
                typed = zip(zip(*block, strict=True), _TYPES, strict=True)
                blocks.append([np.array(column, kind) for column, kind in typed])
        columns = [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
        step_N, attempt_N = columns[1], columns[3]
        is_rolled_back_N = np.zeros(len(step_N), np.bool_)
        for attempt, step in attempts:
            is_rolled_back_N |= (attempt_N < attempt) & (step_N >= step)
        return SampleColumns(*[*columns, is_rolled_back_N])

    def each(
        self, wanted: SampleFilter, order: Order = "oldest", limit: int | None = None, seed: int = 0
    ) -> Iterator[SampleRow]:
        """Samples that match a filter, read one by one; arguments as of `query`. ``limit`` None: all of them."""
        pattern = wanted.pattern()
        where, values = wanted.conditions()
        in_order, order_values = _in_order(order, seed)
        with self._database() as database:
            ids = database.execute(_select("id", where, in_order), [*values, *order_values]).fetchall()
            left = len(ids) if limit is None else limit
            for (number,) in ids:
                if not left:
                    break
                for row in _rows_of(database, [number]):
                    if pattern is None or pattern.search(row.completion) or pattern.search(row.prompt_text):
                        left -= 1
                        yield row

    def reward_names(self) -> tuple[str, ...]:
        """Names of the reward functions and of their parts (NAME/PART); empty if the reward of the run has no name."""
        rows = self._rows("SELECT DISTINCT key FROM samples, json_each(samples.parts) ORDER BY key")
        return tuple(str(name) for (name,) in rows)

    def get(self, sample: int) -> Sample | None:
        """The sample with this id; None if there is no such sample."""
        statement = _select(f"{_ROW}, spans, ids, logprobs, trainer_logprobs", "id = ?")
        for *row, spans, ids, logprobs, trainer_logprobs in self._rows(statement, [sample]):
            return Sample(
                _row(row),
                tuple(int(number) for number in _json(spans, [])),
                _numbers(ids, "i"),
                _numbers(logprobs, "e"),
                _numbers(trainer_logprobs, "e"),
            )
        return None

    def prompt_texts(self, samples: Sequence[int]) -> dict[int, tuple[str, str]]:
        """(data set of the evaluation, text of the prompt) of each of these samples that is there, by its id."""
        texts: dict[int, tuple[str, str]] = {}
        with self._database() as database:
            for number in samples:
                for name, text in database.execute(_select("eval_name, prompt_text", "id = ?"), [number]):
                    texts[number] = str(name), unpack_text(text or "")
        return texts

    def run_attempts(self) -> tuple[tuple[int, int], ...]:
        """(number, first step) of each start or resume of the run."""
        return tuple(
            (int(number), int(step))
            for number, step in self._rows("SELECT run_attempt, step FROM run_attempts ORDER BY run_attempt")
        )

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._database() as database:
            return database.execute(statement, values).fetchall()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """The open file. Errors of reading it are raised as ConfigError, those in the block as well."""
        try:
            with self._opened() as database:
                [(version,)] = database.execute("PRAGMA user_version").fetchall()
                if version != SAMPLES_VERSION:
                    raise sqlite3.DatabaseError(
                        f"its schema has version {version}, and this flowrt reads {SAMPLES_VERSION}"
                    )
                yield database
        except (sqlite3.Error, OSError, ValueError, TypeError, OverflowError, FlowError) as error:
            reason = " ".join(str(error).split()).encode("unicode_escape").decode()  # the error may quote damaged bytes
            raise ConfigError(
                f"{self._path} cannot be read: {reason}; nothing was changed: it is damaged, or "
                "a copy of it is not complete"
            ) from error

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        database = connect_read_only(self._path)
        try:
            database.execute("SELECT 1 FROM sqlite_master").fetchall()
        except sqlite3.OperationalError:
            # SQLite needs an index of the log, which it cannot create in a read-only directory.
            database.close()
            database = connect_read_only(self._path, private_index=True)
        with closing(database):
            yield database


def _select(columns: str, where: str, *more: str) -> str:
    """A statement of constant parts; values from a user are bound to its parameters."""
    return " ".join(("SELECT", columns, "FROM samples WHERE", where, *more))


def _in_order(order: Order, seed: int) -> tuple[str, list[int]]:
    """The ORDER BY clause of an order, and the values of its parameters. Raises ConfigError for an unknown order."""
    if order in _ORDERS:
        return f"ORDER BY {_ORDERS[order]}", [seed] if order == "random" else []
    expression = SORTED.get(order.removeprefix("-"))
    if expression is None:
        raise ConfigError(f"samples have no order {order!r:.40}; use one of {', '.join([*_ORDERS, *SORTED])}")
    direction = "DESC" if order.startswith("-") else "ASC"
    return f"ORDER BY {expression} {direction} NULLS LAST, {_NEWEST}", []


def _rows_of(database: sqlite3.Connection, ids: Iterable[int]) -> Iterator[SampleRow]:
    """The samples with these ids, in this order; one that was deleted meanwhile is left out."""
    for number in ids:
        yield from map(_row, database.execute(_select(_ROW, "id = ?"), [number]))


def _containing(database: sqlite3.Connection, pattern: re.Pattern[str], where: str, values: Sequence[Any]) -> set[int]:
    """The ids of the samples with a pattern in their prompt or completion."""
    rows = database.execute(_select("id, completion, prompt_text", where), values)
    return {int(number) for number, *texts in rows if any(pattern.search(unpack_text(text or "")) for text in texts)}


def _row(values: Sequence[Any]) -> SampleRow:
    """The sample in a row of the table. Raises ValueError for a damaged text."""
    *numbers, prompt_text, completion, rolled_back = values
    columns = dict(zip(_COLUMNS, numbers, strict=True))
    columns["parts"] = {str(name): float(value) for name, value in _json(columns["parts"], {}).items()}
    return SampleRow(
        **columns,
        prompt_text=unpack_text(prompt_text or ""),
        completion=unpack_text(completion or ""),
        rolled_back=bool(rolled_back),
    )


_COLUMNS = tuple(name.strip() for name in _ROW.split(", prompt_text")[0].split(","))


def _json(text: Any, default: Any) -> Any:
    value = json.loads(text or "null")
    return value if isinstance(value, type(default)) else default


def _numbers(data: Any, code: str) -> tuple[Any, ...]:
    """The numbers in a blob, little endian: int32 (code i) or float16 (e); empty if it is not a blob."""
    if not isinstance(data, bytes):
        return ()
    size = struct.calcsize(f"<{code}")
    return struct.unpack(f"<{len(data) // size}{code}", data[: len(data) // size * size])
