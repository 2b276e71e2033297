"""The journal of a rollout worker: complete samples and the beginnings of others, written on a thread of its own.

- A sample is written in parts, each with the tokens since the part before, so every token is written once.
- A sample that is trained or dropped is not needed any more, unless the newest checkpoint still needs it: a run that
  goes back to that checkpoint trains the sample again. It stays until the next checkpoint.
- When more than half of the file, and `SLACK_BYTES`, are not needed any more, the file is rewritten.
- A disk that is full or fails ends the journal, and not the worker.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import torch

from flowrt.algorithms.support import Support
from flowrt.engines.base import NewTokens, Prefix
from flowrt.errors import FlowError
from flowrt.protocol.codec import from_blob, to_blob
from flowrt.protocol.journals import (
    KIND,
    PARTIAL,
    SUFFIX,
    SampleKey,
    SamplePart,
    WrittenSample,
    number_of,
    written_samples,
)
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.runtime.files import private_directory
from flowrt.runtime.record_file import RecordPlace, RecordWriter, read_body, read_headers
from flowrt.runtime.waits import BoundedElsewhere, wait_until

log = logging.getLogger("flowrt")
Argument = TypeVar("Argument")
SLACK_BYTES = 16 << 20
"""Bytes that are not needed any more from which a file is rewritten."""
MAX_PENDING_BYTES = 256 << 20
"""Bytes of parts that wait for the disk; further parts are left out until it has caught up."""
MAX_READ_PARTS = 200_000
"""Parts of samples in files of other processes whose places are remembered: in less than 200 MB."""
KEPT_FILES = 4
"""Files of earlier processes of a worker, in the same start of the run, that are kept."""
TYPES = {"response": "int32", "logprobs": "float32", "support": "int32", "support_counts": "int32"}
"""The dtypes of the columns of a part."""
DTYPES = {"int32": torch.int32, "float32": torch.float32}
DISK = BoundedElsewhere("the disk")


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """What a journal has of a sample: a prefix, or all of it."""

    prefix: Prefix
    is_complete: bool
    truncated: bool


@dataclass(frozen=True, slots=True)
class NewPart:
    """Tokens of a sample to be written, of a prompt of these tokens [L]."""

    slot: int
    key: SampleKey
    prompt: torch.Tensor
    tokens: NewTokens
    is_complete: bool = False
    truncated: bool = False

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """The columns of these tokens."""
        columns = {"response": self.tokens.tokens, "logprobs": self.tokens.logprobs}
        if (support := self.tokens.support) is not None:
            columns |= {"support": support.tokens_E, "support_counts": support.counts_T}
        return {name: values.to(DTYPES[TYPES[name]]) for name, values in columns.items()}

    @property
    def size(self) -> int:
        """Bytes of the columns."""
        return sum(values.nbytes for values in self.columns.values())


@dataclass(slots=True)
class _Written:
    """The records of one sample in the file."""

    newest: int
    places: list[RecordPlace] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(place.end - place.start for place in self.places)


class Journal:
    """The journal of one worker process. The methods return at once; a thread writes.

    Args:
        directory: of the worker's journal; created when the first part is written.
        newest_checkpoint: returns the step of the newest checkpoint; called on the thread.
    """

    def __init__(self, directory: Path, newest_checkpoint: Callable[[], int]) -> None:
        self._directory = directory
        self._newest_checkpoint = newest_checkpoint
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending_bytes = 0
        self._has_failed = False
        # The fields below belong to the thread.
        self._writer: RecordWriter | None = None
        self._live: dict[int, _Written] = {}  # by slot
        self._live_bytes = 0
        self._released: deque[tuple[int, _Written]] = deque()  # with the checkpoint that may need it

    @property
    def is_open(self) -> bool:
        """Whether parts can be added: the disk has not failed, and the journal is not closed."""
        return not self._has_failed

    def add(self, parts: Sequence[NewPart], *, is_last: bool = False) -> int:
        """Write parts of samples; returns how many of the first ones: if the disk lags behind, the others are left out.

        ``is_last``: nothing is added after these, so none is left out.
        """
        if self._has_failed:
            return 0
        size = count = 0
        for part in parts:
            pending = self._pending_bytes + size
            if pending and pending + part.size > MAX_PENDING_BYTES and not is_last:
                break
            size += part.size
            count += 1
        if not count:
            return 0
        self._pending_bytes += size
        done = self._thread.submit(self._run, self._write, parts[:count])
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._on_written, done, size))
        return count

    def release(self, slots: Sequence[int]) -> None:
        """Note that these samples are not needed any more, but by a run that goes back to the newest checkpoint."""
        if slots and not self._has_failed:
            self._thread.submit(self._run, self._release, tuple(slots))

    async def close(self) -> None:
        """Close the file; returns when all that was added is on disk. Nothing is added after that."""
        done: Future[None] = self._thread.submit(self._close)
        await wait_until(asyncio.wrap_future(done), DISK, "the journal to be on disk", "the disk")

    def _on_written(self, done: "Future[None]", size: int) -> None:
        self._pending_bytes -= size
        if (error := done.exception()) is not None:
            self._fail(error)

    # ---- on the thread

    def _run(self, work: Callable[[Argument], None], argument: Argument) -> None:
        if self._has_failed:
            return
        try:
            work(argument)
        except OSError as error:
            self._fail(error)

    def _write(self, parts: Sequence[NewPart]) -> None:
        writer = self._writer or self._open()
        for new in parts:
            self._append(writer, new)
        writer.flush()

    def _append(self, writer: RecordWriter, new: NewPart) -> None:
        columns = {name: values.numpy().tobytes() for name, values in new.columns.items()}
        part = SamplePart(
            *new.key,
            prompt_crc=prompt_checksum(new.prompt),
            start=new.tokens.start,
            count=len(new.tokens.tokens),
            spans=new.tokens.spans,
            is_complete=new.is_complete,
            truncated=new.truncated,
            columns=tuple([(name, TYPES[name], len(data)) for name, data in columns.items()]),
        )
        place = writer.append(to_blob(part), list(columns.values()))
        if part.start == 0:
            self._forget(new.slot)
        written = self._live.get(new.slot)
        if written is None:
            written = self._live[new.slot] = _Written(part.newest)
        written.newest = part.newest
        written.places.append(place)
        self._live_bytes += place.end - place.start

    def _open(self) -> RecordWriter:
        private_directory(self._directory)
        earlier = sorted(self._directory.glob(f"*{SUFFIX}"), key=number_of)
        for path in (*earlier[:-KEPT_FILES], *self._directory.glob(PARTIAL)):
            path.unlink(missing_ok=True)
        number = 1 + number_of(earlier[-1]) if earlier else 0
        self._writer = RecordWriter(self._directory / f"{number}{SUFFIX}", KIND)
        return self._writer

    def _forget(self, slot: int) -> None:
        if (written := self._live.pop(slot, None)) is not None:
            self._live_bytes -= written.size

    def _release(self, slots: tuple[int, ...]) -> None:
        if self._writer is None:
            return
        checkpoint = self._newest_checkpoint()
        for slot in slots:
            if (written := self._live.pop(slot, None)) is None:
                continue
            if written.newest <= checkpoint:
                self._released.append((checkpoint, written))
            else:
                self._live_bytes -= written.size
        while self._released and self._released[0][0] < checkpoint:  # they are in order of their checkpoints
            self._live_bytes -= self._released.popleft()[1].size
        if self._writer.size > 2 * self._live_bytes + SLACK_BYTES:
            self._rewrite(self._writer)

    def _rewrite(self, writer: RecordWriter) -> None:
        # Of two of a sample, the one that was written last is read.
        needed = [*(written for _, written in self._released), *self._live.values()]
        places = [place for written in needed for place in written.places]
        moved = dict(zip(places, writer.rewrite(places), strict=True))
        for written in needed:
            written.places = [moved[place] for place in written.places]

    def _close(self) -> None:
        if self._writer is None:
            return
        try:
            if not self._has_failed:
                self._writer.flush(sync=True)
            self._writer.close()
        except OSError as error:
            self._fail(error)
        self._has_failed = True  # what follows is left out

    def _fail(self, error: BaseException) -> None:
        self._has_failed = True
        log.warning(
            "the journal %s cannot be written, and what this worker generates from now on is lost with it: %s",
            self._directory,
            (error.strerror if isinstance(error, OSError) else None) or error,
        )


def prompt_checksum(tokens_L: torch.Tensor) -> int:
    """The checksum by which a prompt is recognised."""
    return crc32(tokens_L.to(torch.int32).numpy().tobytes())


def newest_checkpoint(run_dir: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    try:
        return max(checkpoint_steps(run_dir), default=0)
    except OSError:
        return 0


# ---- reading


@dataclass(slots=True)
class _File:
    """The samples of a file, and its size and time of change when it was read."""

    state: tuple[int, int]
    parts: int
    samples: Mapping[SampleKey, WrittenSample[RecordPlace]]


class KeptJournals:
    """Reads what journals of other processes have of samples. Used on one thread at a time.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, _File] = {}

    def read(self, journals: str, key: SampleKey, prompt_crc: int) -> KeptTokens | None:
        """What journals have of a sample: files, or the directories of workers, one a line.

        None if they have nothing, or only what is damaged or of another prompt.
        """
        files: list[Path] = []
        for path in map(self._run_dir.joinpath, journals.splitlines()):
            with _unreadable(path):
                files += sorted(path.glob(f"*{SUFFIX}"), key=number_of, reverse=True) if path.is_dir() else [path]
        matches: list[tuple[Path, WrittenSample[RecordPlace]]] = []
        for file in files:  # of equals, the one that was written last comes first
            with _unreadable(file):
                if (sample := self._samples(file).get(key)) is not None and sample.last.prompt_crc == prompt_crc:
                    matches.append((file, sample))
        for file, sample in sorted(matches, key=lambda match: match[1].last.rank, reverse=True):
            with _unreadable(file):
                if (tokens := read_sample(file, sample)) is not None:
                    return tokens
        return None

    def _samples(self, path: Path) -> Mapping[SampleKey, WrittenSample[RecordPlace]]:
        stat = os.stat(path)
        state = stat.st_size, stat.st_mtime_ns
        file = self._files.get(path)
        if file is None or file.state != state:
            parts: list[tuple[SamplePart, RecordPlace]] = []
            for header, place in read_headers(path, KIND).records:
                try:
                    parts.append((from_blob(SamplePart, header), place))
                except FlowError:
                    continue  # of a damaged file
            self._files.pop(path, None)
            known = len(parts) + sum(file.parts for file in self._files.values())
            while self._files and known > MAX_READ_PARTS:
                known -= self._files.pop(next(iter(self._files))).parts
            file = self._files[path] = _File(state, len(parts), written_samples(parts))
        return file.samples


@contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """Report a file that cannot be read, without which the caller goes on."""
    try:
        yield
    except OSError as error:
        log.warning("journal %s cannot be read, and its samples are generated again: %s", path, error.strerror)


def read_sample(path: Path, sample: WrittenSample[RecordPlace]) -> KeptTokens | None:
    """The tokens of a sample up to its first damaged part; None if that is its first."""
    columns: dict[str, list[torch.Tensor]] = {}
    last: SamplePart | None = None
    with path.open("rb") as file:
        for part, place in sample.parts:
            body = read_body(file, place)
            values = None if body is None else _unpack(part, body)
            if values is None or (last is not None and values.keys() != columns.keys()):
                log.warning("journal %s is damaged: a part of sample %s is generated again", path, part.key)
                break
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
            last = part
    if last is None:
        return None
    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    support = Support(joined["support"], joined["support_counts"]) if "support" in joined else None
    prefix = Prefix(tokens=joined["response"], logprobs=joined["logprobs"], spans=last.spans, support=support)
    if len(prefix.tokens) != last.tokens or sum(last.spans[1::2]) != last.tokens:
        return None
    return KeptTokens(prefix, last.is_complete, last.truncated)


def _unpack(part: SamplePart, body: bytes) -> dict[str, torch.Tensor] | None:
    """The columns of a part; None if they are not those of a part."""
    columns: dict[str, torch.Tensor] = {}
    at = 0
    for name, dtype, size in part.columns:
        if dtype not in DTYPES or size % DTYPES[dtype].itemsize or at + size > len(body):
            return None
        data = bytearray(body[at : at + size])
        columns[name] = torch.frombuffer(data, dtype=DTYPES[dtype]) if size else torch.empty(0, dtype=DTYPES[dtype])
        at += size
    is_whole = at == len(body) and {"response", "logprobs"} <= columns.keys()
    return columns if is_whole and len(columns["response"]) == len(columns["logprobs"]) == part.count else None
