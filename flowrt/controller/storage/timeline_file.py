"""Segments of the timeline: timeline/NNNN.jsonl.gz, spans of work and waits of all workers.

- A segment is a gzip file that is flushed at each tick; in a running or killed run it is readable up to the last flush.
- Above the bound the oldest segments are removed, except the first: users look at the beginning of a run as often as at
  its present.
- Every start of a controller begins a segment.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

SEGMENT_BYTES = 16 * 1024 * 1024
"""Size of a segment before compression."""
DEFAULT_MAX_BYTES = 512_000_000
DIRECTORY = "timeline"
_GZIP_BITS = 31
_CHUNK_BYTES = 1 << 18
_MODE = 0o600
_encode = msgspec.json.Encoder().encode


def segments(run_dir: Path) -> list[Path]:
    """The segments of a run, oldest first."""
    try:
        return sorted((run_dir / DIRECTORY).glob("[0-9]*.jsonl.gz"), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def read_segment(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a segment, up to its first damage or its last flush. Raises OSError if the file is unreadable."""
    unzip = zlib.decompressobj(_GZIP_BITS)
    rest = b""
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            try:
                rest += unzip.decompress(data)
            except zlib.error:
                break
            *lines, rest = rest.split(b"\n")
            for line in lines:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record


def read_timeline(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The spans and waits of a run, oldest segment first. Raises OSError for a segment that is unreadable."""
    for path in segments(run_dir):
        yield from read_segment(path)


class TimelineFile:
    """Writer of the segments. `flush` and `close` raise OSError if a write fails."""

    def __init__(self, run_dir: Path, max_bytes: int = DEFAULT_MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Write into ``run_dir``/timeline.

        Args:
            run_dir: the run directory.
            max_bytes: size of all segments on disk above which the oldest are removed; the first segment, the last
                complete one and the one in progress are always kept.
            segment_bytes: size of a segment before compression.
        """
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._file: BinaryIO | None = None
        self._zip = zlib.compressobj(level=1, wbits=_GZIP_BITS)
        self._lines: list[bytes] = []
        self._raw_bytes = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Buffer a line until `flush`."""
        self._lines.append(_encode(line))

    def flush(self) -> None:
        """Write the buffered lines, so that a reader finds them."""
        if not self._lines:
            return
        data = b"\n".join([*self._lines, b""])
        self._lines.clear()
        if self._file is None:
            self._file = self._begin()
        self._file.write(self._zip.compress(data) + self._zip.flush(zlib.Z_SYNC_FLUSH))
        self._raw_bytes += len(data)
        if self._raw_bytes >= self._segment_bytes:
            self._end()
            self._remove_oldest()

    def close(self) -> None:
        """Write the buffered lines and end the segment."""
        self.flush()
        self._end()

    def _begin(self) -> BinaryIO:
        directory = self._run_dir / DIRECTORY
        directory.mkdir(mode=0o700, exist_ok=True)
        earlier = segments(self._run_dir)
        number = 1 + (int(earlier[-1].name.partition(".")[0]) if earlier else 0)
        path = directory / f"{number:04}.jsonl.gz"
        self._zip = zlib.compressobj(level=1, wbits=_GZIP_BITS)
        self._raw_bytes = 0
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb", buffering=0)

    def _end(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.write(self._zip.flush(zlib.Z_FINISH))
        finally:
            file.close()

    def _remove_oldest(self) -> None:
        first, *others = segments(self._run_dir)
        left = first.stat().st_size + sum(path.stat().st_size for path in others)
        for path in others[:-1]:
            if left <= self._max_bytes:
                break
            left -= path.stat().st_size
            path.unlink()
