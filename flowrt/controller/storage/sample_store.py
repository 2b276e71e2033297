"""Sample store: samples.sqlite, written by a thread of its own, never within a transaction of the ledger.

- The event loop buffers the records that workers send, within a rate and a size, and passes them to the thread at each
  tick. Records above the rate or the size are counted and left out.
- Groups are stored whole: a group whose first record is accepted is accepted to its end, even if that exceeds the rate;
  no other group begins until the rate has made up for it. One whose first record is left out is left out.
- A scored sample comes from a reward worker, the time of its generation from a rollout worker, its advantage and
  log-probabilities from a trainer, and the end of its prompt from the ledger's records; they are joined by epoch,
  prompt, member and attempt, in any order of arrival.
- The ``step`` of a sample is the step that trained it or in which its prompt was dropped; before that, the step in
  training when its record arrived; for a sample of an evaluation, the evaluated version.
- A failure does not end the run: it is reported by one notice, and samples that could not be written are counted.

Tables: ``samples`` has a row for each sample. A text is stored as TEXT, or as a BLOB: zlib over its UTF-8 bytes
(``surrogatepass``). ``run_attempts`` has a row for each start or resume of the run, with the step from which it
continued: samples of earlier attempts with that step or a later step were rolled back. ``left_out`` counts the samples
that were not stored, by reason. The index ``sample_numbers`` has what lists and statistics of samples read: without it
they would read the texts.
"""

import json
import queue
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from flowrt.errors import FlowError
from flowrt.protocol.messages import MAX_RECORD_BYTES
from flowrt.protocol.sample_records import (
    EVAL,
    TRAIN,
    GeneratedSample,
    ScoredSample,
    TrainedSample,
    decode_record,
    group_of,
    stored_text,
)
from flowrt.runtime.waits import BoundedElsewhere, blocking, join_thread

SAMPLES = "samples.sqlite"
"""File name of the sample store in the run directory."""
SAMPLES_VERSION = 2
_TABLES = """
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, run_attempt INTEGER NOT NULL, flow TEXT NOT NULL,
    eval_name TEXT NOT NULL, epoch INTEGER NOT NULL, prompt INTEGER NOT NULL, member INTEGER NOT NULL,
    attempt INTEGER NOT NULL, reward REAL, parts TEXT NOT NULL, finish TEXT NOT NULL, reason TEXT NOT NULL,
    version_min INTEGER, version_max INTEGER, spans TEXT NOT NULL, tokens INTEGER NOT NULL, prompt_text, completion,
    ids BLOB, logprobs BLOB, trainer_logprobs BLOB, advantage REAL, generate_s REAL, reward_s REAL,
    flagged INTEGER NOT NULL
);
CREATE UNIQUE INDEX trained_sample ON samples (epoch, prompt, member, attempt, run_attempt) WHERE flow = 'train';
CREATE UNIQUE INDEX evaluated_sample ON samples (eval_name, step, prompt, member, run_attempt) WHERE flow = 'eval';
CREATE INDEX sample_numbers ON samples (step, flagged, flow, eval_name, epoch, prompt, run_attempt, member, attempt,
    reward, tokens, finish, reason, version_min, advantage);
CREATE TABLE run_attempts (run_attempt INTEGER PRIMARY KEY, step INTEGER NOT NULL, unix_s REAL NOT NULL);
CREATE TABLE left_out (reason TEXT PRIMARY KEY, samples INTEGER NOT NULL) WITHOUT ROWID;
"""


def create_sample_file(path: Path) -> None:
    """Create the file with all its tables, unless it exists and is not empty. Raises sqlite3.Error and OSError.

    The file is renamed to ``path`` when it is complete, so that a reader never finds a file without tables.
    """
    if path.is_file() and path.stat().st_size:
        return
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)  # SQLite would make it readable for all users; its log gets the same rights
    with closing(sqlite3.connect(new, isolation_level=None)) as database:
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")
        database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {SAMPLES_VERSION}; COMMIT")
    new.replace(path)


BYTES_PER_S = 1_000_000.0
"""Mean rate, in bytes of records per second, that is accepted from all workers."""
BURST_BYTES = 4_000_000
"""Bytes of records that are accepted at once."""
MAX_WAITING_BYTES = 16_000_000
"""Bytes of records that wait for the thread above which no group begins."""
MAX_GROUP_BYTES = 256_000_000
"""Bytes by which records of groups that have begun may exceed the rate, and that may wait for the thread; a group of 64
samples of 32,000 tokens has 23 MB."""
MAX_GROUPS = 8192
"""Number of groups, the newest, of which is known whether they are accepted."""
MAX_SINGLES = 8
"""Maximum number of truncated samples of a step that are stored although their group is not."""
RECENT_STEPS = 50
"""Number of newest steps, whose samples are deleted last."""
MAX_REMEMBERED = 8192
"""Maximum number of ends of prompts, and of samples with early records, that are kept for records of reward workers."""
PRUNE_TO = 0.9
"""Fraction of the size limit down to which samples are deleted."""
DELETED_STEPS = 32
"""Number of steps whose samples are deleted in one transaction, so that the write-ahead log stays short."""
RETRY_S = 30.0
CLOSE_S = 10.0
LOG_PAGES = 256
"""Length of the write-ahead log, in pages, at which it is checkpointed."""
OVER_RATE, SLOW_DISK, MALFORMED, NOT_WRITTEN = "over the rate", "slow disk", "malformed", "not written"
FILTERED, DELETED, TRUNCATED = "of filtered groups", "deleted", "truncated"
_FILTERED_REASON = "filtered"

_INSERT = """
INSERT INTO samples (step, run_attempt, flow, eval_name, epoch, prompt, member, attempt, reward, parts, finish, reason,
    version_min, version_max, spans, tokens, prompt_text, completion, ids, reward_s, flagged)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET reward = excluded.reward, parts = excluded.parts, finish = excluded.finish,
    reason = excluded.reason, attempt = excluded.attempt, version_min = excluded.version_min,
    version_max = excluded.version_max, spans = excluded.spans, tokens = excluded.tokens,
    prompt_text = excluded.prompt_text, completion = excluded.completion, ids = excluded.ids,
    reward_s = excluded.reward_s, flagged = excluded.flagged
"""
_TRAINED = """
UPDATE samples SET step = ?, advantage = ?, logprobs = ?, trainer_logprobs = ?
WHERE flow = 'train' AND epoch = ? AND prompt = ? AND member = ? AND attempt = ? AND run_attempt = ?
"""
_GENERATED = """
UPDATE samples SET generate_s = ?
WHERE flow = 'train' AND epoch = ? AND prompt = ? AND member = ? AND attempt = ? AND run_attempt = ?
"""
_ENDED = """
UPDATE samples SET step = ?, flagged = MAX(flagged, ?), reason = CASE reason WHEN '' THEN ? ELSE reason END
WHERE flow = 'train' AND epoch = ? AND prompt = ? AND run_attempt = ?
"""

CLOSED = BoundedElsewhere("SampleStore.close")


class GroupEnd(NamedTuple):
    """The end of a prompt: the step in which it was trained or dropped, and the reason."""

    epoch: int
    prompt: int
    step: int
    reason: str = ""
    """Empty if it was trained."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Records and ends of prompts that are written in one transaction."""

    records: Sequence[tuple[bytes, int]]
    """Records, each with the step in training when it arrived."""
    outcomes: Sequence[GroupEnd]
    left_out: Counter[str]
    size: int


class SampleStore:
    """The sample store of a run: its methods are called on the event loop, and its thread writes the file."""

    def __init__(self, path: Path, *, per_step: int, max_bytes: int) -> None:
        """Nothing is opened before `begin`.

        Args:
            path: the file, which is continued if it exists.
            per_step: maximum number of samples of filtered groups in a step.
            max_bytes: size of the file above which samples are deleted.
        """
        self._path = path
        self._per_step = per_step
        self._max_bytes = max_bytes
        self._records: list[tuple[bytes, int]] = []
        self._outcomes: list[GroupEnd] = []
        self._left_out: Counter[str] = Counter()
        self._size = 0
        self._allowed = float(BURST_BYTES)
        self._allowed_at_s: float | None = None
        self._groups: OrderedDict[tuple[int, int], str] = OrderedDict()
        """Why the records of a group are left out; empty if they are accepted."""
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()  # of _waiting
        self._thread: threading.Thread | None = None

    def begin(self, run_attempt: int, step: int) -> None:
        """Start the thread. ``run_attempt``: number of starts and resumes of the run; it continues from ``step``."""
        writer = SampleWriter(
            self._path, per_step=self._per_step, max_bytes=self._max_bytes, run_attempt=run_attempt, step=step
        )
        self._thread = threading.Thread(target=self._run, args=(writer,), name="samples", daemon=True)
        self._batches.put(_Batch((), (), Counter(), 0))  # creates the file
        self._thread.start()

    def add(self, records: Sequence[bytes], step: int, now: float) -> None:
        """Buffer the records of a message; those that exceed the rate or the size limit are left out and counted.

        Args:
            records: of one `SampleRecords` message.
            step: the step in training.
            now: seconds on the controller's clock.
        """
        before_s = now if self._allowed_at_s is None else self._allowed_at_s
        self._allowed = min(self._allowed + (now - before_s) * BYTES_PER_S, BURST_BYTES)
        self._allowed_at_s = now
        if sum(map(len, records)) > MAX_RECORD_BYTES:
            self._left_out[MALFORMED] += len(records)
            return
        for record in records:
            try:
                group = group_of(record)
            except FlowError:
                self._left_out[MALFORMED] += 1
                continue
            if why := self._why_left_out(group, len(record)):
                self._left_out[why] += 1
            else:
                self._allowed -= len(record)
                self._size += len(record)
                self._records.append((record, step))

    def _why_left_out(self, group: tuple[int, int] | None, size: int) -> str:
        """Why a record of this size is left out; empty if it is accepted. Decides on a group with its first record."""
        waiting = self._waiting + self._size + size
        begins = OVER_RATE if size > self._allowed else SLOW_DISK if waiting > MAX_WAITING_BYTES else ""
        if group is None:
            return begins
        if group not in self._groups:
            self._groups[group] = begins
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        if why := self._groups[group]:
            return why
        if self._allowed - size < -MAX_GROUP_BYTES:
            return OVER_RATE
        return SLOW_DISK if waiting > MAX_GROUP_BYTES else ""

    def ended(self, outcome: GroupEnd) -> None:
        """Buffer the end of a prompt that was trained or dropped."""
        self._outcomes.append(outcome)

    def tick(self) -> list[str]:
        """Pass the buffered records to the thread; returns the new notices of the thread, a sentence each."""
        if self._records or self._outcomes or self._left_out:
            with self._lock:
                self._waiting += self._size
            self._batches.put(_Batch(self._records, self._outcomes, self._left_out, self._size))
            self._records, self._outcomes, self._left_out, self._size = [], [], Counter(), 0
        notices: list[str] = []
        with suppress(queue.Empty):
            while True:
                notices.append(self._notices.get_nowait())
        return notices

    def close(self) -> list[str]:
        """Write the buffered records, and end the thread, within `CLOSE_S` seconds; returns the last notices."""
        notices = self.tick()
        if self._thread is not None:
            self._batches.put(None)
            if not join_thread(self._thread, CLOSE_S):
                notices.append(f"{self._path} was not completed within {CLOSE_S:.0f} s: is the disk stuck?")
            self._thread = None
        return notices + self.tick()

    def _run(self, writer: "SampleWriter") -> None:
        while (batch := blocking(self._batches.get, CLOSED, "samples to write", "the event loop")) is not None:
            if notice := writer.write(batch.records, batch.outcomes, batch.left_out):
                self._notices.put(notice)
            with self._lock:
                self._waiting -= batch.size
        writer.close()


class SampleWriter:
    """Writes samples.sqlite; used by one thread."""

    def __init__(self, path: Path, *, per_step: int, max_bytes: int, run_attempt: int, step: int) -> None:
        """Nothing is opened before the first `write`. Arguments: see `SampleStore` and `SampleStore.begin`."""
        self._path = path
        self._per_step = per_step
        self._max_bytes = max_bytes
        self._run_attempt = run_attempt
        self._step = step
        self._db: sqlite3.Connection | None = None
        self._retry_s = 0.0
        self._has_failed = False
        self._left_out: Counter[str] = Counter()
        self._ends: OrderedDict[tuple[int, int], GroupEnd] = OrderedDict()
        self._early: OrderedDict[tuple[int, int, int, int], list[GeneratedSample | TrainedSample]] = OrderedDict()
        """Records of rollout workers and trainers on samples whose record of the reward worker has not arrived."""
        self._singles: OrderedDict[int, int] = OrderedDict()
        self._filtered: OrderedDict[int, int] = OrderedDict()

    def write(
        self,
        records: Sequence[tuple[bytes, int]],
        outcomes: Sequence[GroupEnd] = (),
        left_out: Counter[str] | None = None,
    ) -> str:
        """Write records and ends of prompts in one transaction, then delete samples if the file is too large.

        Args:
            records: records of `SampleRecords`, each with the step in training when it arrived; malformed ones are
                counted.
            outcomes: ends of prompts.
            left_out: number of samples that were left out before, by reason.

        Returns:
            A notice if writing has failed for the first time, or works again after a failure; otherwise empty.
        """
        self._left_out.update(left_out or {})
        if monotonic() < self._retry_s:
            self._left_out[NOT_WRITTEN] += len(records)
            return ""
        before = Counter(self._left_out)
        try:
            database = self._opened()
            database.execute("BEGIN IMMEDIATE")
            for data, step in records:
                self._add(database, data, step)
            for outcome in outcomes:
                self._end(database, outcome)
            database.executemany(
                "INSERT INTO left_out VALUES (?, ?) ON CONFLICT DO UPDATE SET samples = samples + excluded.samples",
                list(self._left_out.items()),
            )
            database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            before[NOT_WRITTEN] += len(records)
            return self._failed(error, before)
        self._left_out.clear()
        try:
            self._prune(database)
        except sqlite3.Error as error:
            return self._failed(error, self._left_out)
        if self._has_failed:
            self._has_failed = False
            return f"samples are stored in {self._path} again"
        return ""

    def close(self) -> None:
        """Close the file; SQLite then checkpoints its write-ahead log."""
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _failed(self, error: Exception, left_out: Counter[str]) -> str:
        """Keep the counts that are not written, and pause for `RETRY_S` seconds; returns the notice for `write`."""
        self._left_out = left_out
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()  # rolls back
            self._db = None
        self._retry_s = monotonic() + RETRY_S
        if self._has_failed:
            return ""
        self._has_failed = True
        return (
            f"samples are not stored: {self._path} cannot be written: {error}; the run goes on without, and tries "
            f"again every {RETRY_S:.0f} s: is the disk full, or the file damaged?"
        )

    def _opened(self) -> sqlite3.Connection:
        """The open file, which is created if it does not exist. Raises sqlite3.Error and OSError."""
        if self._db is not None:
            return self._db
        create_sample_file(self._path)
        database = sqlite3.connect(self._path, isolation_level=None, timeout=5.0, check_same_thread=False)
        try:
            [(version,)] = database.execute("PRAGMA user_version").fetchall()
            if version != SAMPLES_VERSION:
                raise sqlite3.DatabaseError(f"it has schema version {version}, and this flowrt has {SAMPLES_VERSION}")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
            database.execute(f"PRAGMA journal_size_limit={LOG_PAGES * 4096}")
            database.execute(
                "INSERT OR IGNORE INTO run_attempts VALUES (?, ?, ?)", (self._run_attempt, self._step, time.time())
            )
        except sqlite3.Error:
            database.close()
            raise
        self._db = database
        return database

    # ---- records

    def _add(self, database: sqlite3.Connection, data: bytes, step: int) -> None:
        try:
            record = decode_record(data)
            if isinstance(record, ScoredSample):
                texts = [stored_text(part) for part in record.data[:2]]
        except FlowError:
            self._left_out[MALFORMED] += 1
            return
        if isinstance(record, ScoredSample):
            self._add_scored(database, record, texts, step)
        else:
            self._join(database, record)

    def _add_scored(
        self, database: sqlite3.Connection, record: ScoredSample, texts: Sequence[bytes | str], step: int
    ) -> None:
        versions = [version for version, count in zip(record.spans[::2], record.spans[1::2], strict=True) if count]
        newest, oldest = max(versions, default=None), min(versions, default=None)
        reason, is_flagged = record.reason, bool(record.reason) or record.is_single
        if record.flow == EVAL:
            step = newest or 0
            is_flagged = True
        elif (end := self._ends.get((record.epoch, record.prompt))) is not None:
            step, reason = end.step, reason or end.reason
            is_flagged |= bool(end.reason)
        is_truncated = record.flow == TRAIN and record.is_single and not record.reason
        if is_truncated and not _take(self._singles, step, 1, MAX_SINGLES):
            self._left_out[TRUNCATED] += 1
            return
        database.execute(
            _INSERT,
            (
                *(step, self._run_attempt, record.flow, record.eval_name, record.epoch, record.prompt),
                *(
                    record.member,
                    record.attempt,
                    record.reward,
                    json.dumps(dict(record.parts)) if record.parts else "{}",
                    record.finish,
                    reason,
                ),
                *(oldest, newest, str(list(record.spans)), sum(record.spans[1::2]), *texts),
                *(record.data[2] or None, record.reward_s, is_flagged),
            ),
        )
        key = (record.epoch, record.prompt, record.member, record.attempt)
        if record.flow == TRAIN:
            for other in self._early.pop(key, ()):
                self._join(database, other)

    def _join(self, database: sqlite3.Connection, record: GeneratedSample | TrainedSample) -> None:
        """Add the record of a rollout worker or a trainer to the row of its sample, or keep it until the row exists."""
        key = (record.epoch, record.prompt, record.member, record.attempt)
        if isinstance(record, GeneratedSample):
            done = database.execute(_GENERATED, (record.generate_s, *key, self._run_attempt))
        else:
            values = (record.step, record.advantage, record.data[0] or None, record.data[1] or None)
            done = database.execute(_TRAINED, (*values, *key, self._run_attempt))
        if not done.rowcount:
            self._early.setdefault(key, []).append(record)
            if len(self._early) > MAX_REMEMBERED:
                self._early.popitem(last=False)

    def _end(self, database: sqlite3.Connection, outcome: GroupEnd) -> None:
        """Add the step and the reason to the samples of a prompt; delete a filtered group above the limit of a step."""
        key = (outcome.epoch, outcome.prompt)
        self._ends[key] = outcome
        self._ends.move_to_end(key)
        if len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)
        of_prompt = (*key, self._run_attempt)
        changed = database.execute(_ENDED, (outcome.step, bool(outcome.reason), outcome.reason, *of_prompt)).rowcount
        is_filtered = outcome.reason.startswith(_FILTERED_REASON)
        if changed and is_filtered and not _take(self._filtered, outcome.step, changed, self._per_step):
            database.execute(
                "DELETE FROM samples WHERE flow = 'train' AND epoch = ? AND prompt = ? AND run_attempt = ?", of_prompt
            )
            self._left_out[FILTERED] += changed

    # ---- size

    def _prune(self, database: sqlite3.Connection) -> None:
        """Delete samples if the file is over its limit, until it is at `PRUNE_TO` of the limit.

        First from every second step before the newest `RECENT_STEPS`, then from the oldest quarter of all steps; each
        time samples that are not flagged before flagged ones.
        """
        if _used(database) <= self._max_bytes:
            return
        least = int(PRUNE_TO * self._max_bytes)
        [(newest,)] = database.execute(
            "SELECT COALESCE(MAX(step), 0) FROM samples WHERE run_attempt = ? AND flow = 'train'", (self._run_attempt,)
        ).fetchall()
        for flagged in (0, 1):
            while _used(database) > least and (steps := _steps(database, flagged, newest - RECENT_STEPS)):
                self._delete(database, steps[1::2] or steps, flagged)
        for flagged in (0, 1):
            while _used(database) > least and (steps := _steps(database, flagged, None)):
                self._delete(database, steps[: max(len(steps) // 4, 1)], flagged)

    def _delete(self, database: sqlite3.Connection, steps: Sequence[int], flagged: int) -> None:
        for first in range(0, len(steps), DELETED_STEPS):
            some = steps[first : first + DELETED_STEPS]
            database.execute("BEGIN IMMEDIATE")
            self._left_out[DELETED] += database.executemany(
                "DELETE FROM samples WHERE flagged = ? AND step = ?", [(flagged, step) for step in some]
            ).rowcount
            database.execute("COMMIT")
            with closing(database.execute("PRAGMA incremental_vacuum")) as vacuum:
                vacuum.fetchall()


def _used(database: sqlite3.Connection) -> int:
    """Bytes of the file that are in use."""
    [(pages,)] = database.execute("PRAGMA page_count").fetchall()
    [(free,)] = database.execute("PRAGMA freelist_count").fetchall()
    [(size,)] = database.execute("PRAGMA page_size").fetchall()
    return int((pages - free) * size)


def _steps(database: sqlite3.Connection, flagged: int, before: int | None) -> list[int]:
    """The steps before ``before`` (None: all steps) that have samples with this flag, ascending."""
    rows = database.execute(
        "SELECT DISTINCT step FROM samples WHERE flagged = ? AND step < ? ORDER BY step",
        (flagged, 2**62 if before is None else before),
    )
    return [int(step) for (step,) in rows]


def _take(counts: OrderedDict[int, int], step: int, rows: int, most: int) -> bool:
    """Add rows to the count of a step; False, without a change, if there would be more than ``most``.

    Only `RECENT_STEPS` steps are kept.
    """
    if counts.get(step, 0) + rows > most:
        return False
    counts[step] = counts.get(step, 0) + rows
    if len(counts) > RECENT_STEPS:
        counts.popitem(last=False)
    return True
