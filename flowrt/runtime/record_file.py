"""Files of checksummed records that are appended, and read after the process that wrote them was killed.

::

    file     KIND, then records
    record   MARK, lengths of header and body (uint32 each, little endian), CRC-32 of lengths and header, CRC-32 of the
             body, header, body

The headers of a file are read without its bodies. A record that is not complete counts as not written; after a damaged
one, reading goes on at the next mark. Files are not mapped into memory: where a disk fails, or another host replaces
the file, a read raises an error, but access to a mapped page kills the process.
"""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flowrt.runtime.files import partial_path

MARK = b"\xf7\x0drec\x1a\r\n"
_HEAD = struct.Struct("<IIII")
_LENGTHS = struct.Struct("<II")
COPY_BYTES = 1 << 22
"""Bytes that are copied at a time when a file is rewritten."""
SEARCH_BYTES = 1 << 20
"""Bytes that are searched at a time for the mark after a damaged record."""
MAX_HEADER_BYTES = 1 << 24
"""A longer header is damage."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record is in its file, in bytes from the beginning of the file."""

    start: int
    body: int
    end: int
    body_crc: int


@dataclass(frozen=True, slots=True)
class RecordHeaders:
    """The headers of a file with the places of their records, in order, and the number of damaged parts."""

    records: Sequence[tuple[bytes, RecordPlace]]
    damaged: int


def read_headers(path: Path, kind: bytes) -> RecordHeaders:
    """Read the headers of a file; no records for a file of another kind. Raises OSError if it cannot be read."""
    headers = list(iterate_headers(path, kind))
    records = [header for header in headers if header is not None]
    return RecordHeaders(records, len(headers) - len(records))


def iterate_headers(path: Path, kind: bytes) -> Iterator[tuple[bytes, RecordPlace] | None]:
    """The headers of a file with the places of their records, in order; None for a damaged part.

    A file of another kind is damaged. Raises OSError if the file cannot be read.
    """
    with _open_regular(path) as file:
        actual = file.read(len(kind))
        if actual == kind:
            yield from _records(file, len(kind), os.fstat(file.fileno()).st_size)
        elif len(actual) == len(kind):
            yield None


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read. Raises OSError for anything else: the open of a pipe waits for its writer."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _records(file: BinaryIO, at: int, size: int) -> Iterator[tuple[bytes, RecordPlace] | None]:
    """The records from ``at`` on; None for damage that is followed by a record."""
    is_damaged = False
    while at < size:
        record = _record_at(file, at, size)
        if record is None:
            is_damaged = True
            at = _next_mark(file, at + 1)
            if at < 0:
                return  # the last record is not complete
            continue
        if is_damaged:
            is_damaged = False
            yield None
        yield record
        at = record[1].end


def _record_at(file: BinaryIO, at: int, size: int) -> tuple[bytes, RecordPlace] | None:
    file.seek(at)
    head = file.read(len(MARK) + _HEAD.size)
    if len(head) < len(MARK) + _HEAD.size or not head.startswith(MARK):
        return None
    header_bytes, body_bytes, header_crc, body_crc = _HEAD.unpack(head[len(MARK) :])
    body = at + len(head) + header_bytes
    if body + body_bytes > size or header_bytes > MAX_HEADER_BYTES:
        return None
    header = file.read(header_bytes)
    if zlib.crc32(header, zlib.crc32(_LENGTHS.pack(header_bytes, body_bytes))) != header_crc:
        return None
    return header, RecordPlace(start=at, body=body, end=body + body_bytes, body_crc=body_crc)


def _next_mark(file: BinaryIO, at: int) -> int:
    """The place of the first mark from ``at`` on; -1 if there is none."""
    file.seek(at)
    block = b""
    while more := file.read(SEARCH_BYTES):
        offset = (block := block + more).find(MARK)
        if offset >= 0:
            return at + offset
        rest = block[1 - len(MARK) :]  # a mark may begin in it
        at += len(block) - len(rest)
        block = rest
    return -1


def read_body(file: BinaryIO, place: RecordPlace) -> bytes | None:
    """The body of a record; None if it is damaged."""
    file.seek(place.body)
    body = file.read(place.end - place.body)
    return body if len(body) == place.end - place.body and zlib.crc32(body) == place.body_crc else None


class RecordWriter:
    """Appends records to a new file."""

    def __init__(self, path: Path, kind: bytes) -> None:
        """Create the file, accessible to its owner only. Raises OSError if that fails, or it exists."""
        self.path = path
        self._kind = kind
        self._file = _create(path)
        self._file.write(kind)
        self.size = len(kind)
        """Bytes of the file."""

    def append(self, header: bytes, body: Sequence[bytes]) -> RecordPlace:
        """Append a record, whose body is the concatenation of ``body``; returns its place. Raises OSError."""
        body_bytes, body_crc = 0, 0
        for part in body:
            body_bytes += len(part)
            body_crc = zlib.crc32(part, body_crc)
        lengths = _LENGTHS.pack(len(header), body_bytes)
        header_crc = zlib.crc32(header, zlib.crc32(lengths))
        start = self.size
        self._file.write(b"".join((MARK, _HEAD.pack(len(header), body_bytes, header_crc, body_crc), header)))
        for part in body:
            self._file.write(part)
        body_at = start + len(MARK) + _HEAD.size + len(header)
        self.size = body_at + body_bytes
        return RecordPlace(start=start, body=body_at, end=self.size, body_crc=body_crc)

    def flush(self, *, sync: bool = False) -> None:
        """Pass all records to the operating system, and with ``sync`` to the disk. Raises OSError."""
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())

    def rewrite(self, places: Sequence[RecordPlace]) -> list[RecordPlace]:
        """Replace the file by one with these records only; returns their new places. Raises OSError.

        Until the new file is complete, the old one is in its place.
        """
        self._file.flush()
        partial = partial_path(self.path)
        partial.unlink(missing_ok=True)
        new = _create(partial)
        moved: list[RecordPlace] = []
        try:
            new.write(self._kind)
            size = len(self._kind)
            with self.path.open("rb") as old:
                for place in places:
                    _copy(old, new, place.start, place.end)
                    shift = size - place.start
                    moved.append(
                        RecordPlace(start=size, body=place.body + shift, end=place.end + shift, body_crc=place.body_crc)
                    )
                    size = place.end + shift
            new.flush()
            partial.rename(self.path)
        except OSError:
            with suppress(OSError):  # of what it has buffered
                new.close()
            with suppress(OSError):
                partial.unlink()
            raise
        with suppress(OSError):  # of the old file, which is gone
            self._file.close()
        self._file, self.size = new, size
        return moved

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=1 << 16)


def _copy(source: BinaryIO, target: BinaryIO, start: int, end: int) -> None:
    source.seek(start)
    while start < end:
        block = source.read(min(COPY_BYTES, end - start))
        if not block:
            raise OSError("the file is shorter than its records")
        target.write(block)
        start += len(block)
