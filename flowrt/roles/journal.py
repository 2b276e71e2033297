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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import torch

from flowrt.algorithms.support import Support
from flowrt.engines.base import Prefix
from flowrt.errors import FlowError
from flowrt.protocol.codec import from_blob, to_blob
from flowrt.protocol.journals import KIND, SUFFIX, SampleKey, SamplePart, WrittenSample, written_samples
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.runtime.files import private_directory
from flowrt.runtime.record_file import RecordPlace, RecordWriter, read_body, read_headers
from flowrt.runtime.waits import BoundedElsewhere, wait_until

log = logging.getLogger("flowrt")
SLACK_BYTES = 16 << 20
"""Bytes that are not needed any more from which a file is rewritten."""
MAX_PENDING_BYTES = 256 << 20
"""Bytes of parts that wait for the disk; further parts are left out until it has caught up."""
MAX_READ_FILES = 64
"""Files of other processes whose contents are remembered."""
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


@dataclass(slots=True)
class NewPart:
    """Tokens of a sample to be written: those from token ``start`` on, of a prompt of these tokens [L]."""

    slot: int
    key: SampleKey
    prompt: torch.Tensor
    start: int
    tokens: KeptTokens

    @property
    def size(self) -> int:
        """Bytes of the tokens, without their supports."""
        return 8 * (len(self.tokens.prefix.tokens) - self.start)


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

    def add(self, parts: Sequence["NewPart"]) -> bool:
        """Write parts of samples; False if the disk lags behind and they are left out."""
        size = sum(part.size for part in parts)
        if self._has_failed or self._pending_bytes + size > MAX_PENDING_BYTES:
            return False
        self._pending_bytes += size
        done = self._thread.submit(self._write, parts)
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._on_written, size))
        return True

    def release(self, slots: Sequence[int]) -> None:
        """Note that these samples are not needed any more, but by a run that goes back to the newest checkpoint."""
        if slots and not self._has_failed:
            self._thread.submit(self._release, tuple(slots))

    async def close(self) -> None:
        """Close the file; returns when all that was added is on disk. Nothing is added after that."""
        done: Future[None] = self._thread.submit(self._close)
        await wait_until(asyncio.wrap_future(done), DISK, "the journal to be on disk", "the disk")

    def _on_written(self, size: int) -> None:
        self._pending_bytes -= size

    # ---- on the thread

    def _write(self, parts: Sequence["NewPart"]) -> None:
        if self._has_failed:
            return
        try:
            writer = self._writer or self._open()
            for new in parts:
                self._append(writer, new)
            writer.flush()
        except OSError as error:
            self._fail(error)

    def _append(self, writer: RecordWriter, new: "NewPart") -> None:
        prefix = new.tokens.prefix
        columns = _columns(prefix, new.start)
        part = SamplePart(
            *new.key,
            prompt_crc=prompt_checksum(new.prompt),
            start=new.start,
            count=len(prefix.tokens) - new.start,
            spans=prefix.spans,
            is_complete=new.tokens.is_complete,
            truncated=new.tokens.truncated,
            columns=tuple([(name, TYPES[name], len(data)) for name, data in columns.items()]),
        )
        place = writer.append(to_blob(part), list(columns.values()))
        if new.start == 0:
            self._forget(new.slot)
        written = self._live.get(new.slot)
        if written is None:
            written = self._live[new.slot] = _Written(part.newest)
        written.newest = part.newest
        written.places.append(place)
        self._live_bytes += place.end - place.start

    def _open(self) -> RecordWriter:
        private_directory(self._directory)
        earlier = sorted(self._directory.glob(f"*{SUFFIX}"), key=_number)
        for path in earlier[:-KEPT_FILES]:
            path.unlink(missing_ok=True)
        number = 1 + _number(earlier[-1]) if earlier else 0
        self._writer = RecordWriter(self._directory / f"{number}{SUFFIX}", KIND)
        return self._writer

    def _forget(self, slot: int) -> None:
        if (written := self._live.pop(slot, None)) is not None:
            self._live_bytes -= written.size

    def _release(self, slots: tuple[int, ...]) -> None:
        if self._writer is None or self._has_failed:
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
        needed = [*self._live.values(), *(written for _, written in self._released)]
        places = [place for written in needed for place in written.places]
        try:
            moved = dict(zip(places, writer.rewrite(places), strict=True))
        except OSError as error:
            self._fail(error)
            return
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

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        log.warning(
            "the journal %s cannot be written, and what this worker generates from now on is lost with it: %s",
            self._directory,
            error.strerror or error,
        )


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


def _columns(prefix: Prefix, start: int) -> dict[str, bytes]:
    """The columns of a prefix from token ``start`` on."""
    columns = {"response": prefix.tokens[start:], "logprobs": prefix.logprobs[start:]}
    if prefix.support is not None:
        support = prefix.support.suffix(start)
        columns |= {"support": support.tokens_E, "support_counts": support.counts_T}
    return {name: values.to(DTYPES[TYPES[name]]).numpy().tobytes() for name, values in columns.items()}


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
    samples: Mapping[SampleKey, WrittenSample[RecordPlace]]


class KeptJournals:
    """Reads what journals of other processes have of samples. Used on one thread at a time.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, _File] = {}

    def read(self, journal: str, key: SampleKey, prompt_crc: int) -> KeptTokens | None:
        """What a journal, a file or the directory of a worker, has of a sample.

        None if it has nothing, or only what is damaged or of another prompt.
        """
        path = self._run_dir / journal
        try:
            paths = sorted(path.glob(f"*{SUFFIX}"), key=_number) if path.is_dir() else [path]
            found = [(file, sample) for file in paths if (sample := self._samples(file).get(key)) is not None]
            found = [one for one in found if one[1].last.prompt_crc == prompt_crc]
            found.reverse()  # of equals, the one that was written last comes first
            for file, sample in sorted(found, key=lambda one: one[1].rank, reverse=True):
                if (tokens := read_sample(file, sample)) is not None:
                    return tokens
        except OSError as error:
            log.warning("journal %s cannot be read, and its samples are generated again: %s", path, error.strerror)
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
            if len(self._files) >= MAX_READ_FILES:
                del self._files[next(iter(self._files))]
            file = self._files[path] = _File(state, written_samples(parts))
        return file.samples


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
            for name, one in values.items():
                columns.setdefault(name, []).append(one)
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
