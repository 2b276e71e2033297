"""Files of checksummed records that are appended, and read after the process that wrote them was killed.

::

    file     KIND, then records
    record   MARK, lengths of header and body (uint32 each, little endian), CRC-32 of lengths and header, CRC-32 of the
             body, header, body

The headers of a file are read without its bodies. A record that is not complete counts as not written; after a damaged
one, reading goes on at the next mark.
"""

import mmap
import os
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
    size: int
    """Bytes of the file when it was read."""


def read_headers(path: Path, kind: bytes) -> RecordHeaders:
    """Read the headers of a file; no records for a file of another kind. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < len(kind):
            return RecordHeaders((), 0, size)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            if data[: len(kind)] != kind:
                return RecordHeaders((), 1, size)
            records: list[tuple[bytes, RecordPlace]] = []
            damaged = 0
            for one in _records(data, len(kind), size):
                if one is None:
                    damaged += 1
                else:
                    records.append(one)
            return RecordHeaders(records, damaged, size)


def _records(data: mmap.mmap, at: int, size: int) -> Iterator[tuple[bytes, RecordPlace] | None]:
    """The records from ``at`` on; None for damage that is followed by a record."""
    is_damaged = False
    while at < size:
        record = _record_at(data, at, size)
        if record is None:
            is_damaged = True
            at = data.find(MARK, at + 1)
            if at < 0:
                return  # the last record is not complete
            continue
        if is_damaged:
            is_damaged = False
            yield None
        yield record
        at = record[1].end


def _record_at(data: mmap.mmap, at: int, size: int) -> tuple[bytes, RecordPlace] | None:
    head = at + len(MARK)
    if data[at:head] != MARK or head + _HEAD.size > size:
        return None
    header_bytes, body_bytes, header_crc, body_crc = _HEAD.unpack(data[head : head + _HEAD.size])
    body = head + _HEAD.size + header_bytes
    if body + body_bytes > size:
        return None
    header = data[body - header_bytes : body]
    if zlib.crc32(header, zlib.crc32(_LENGTHS.pack(header_bytes, body_bytes))) != header_crc:
        return None
    return header, RecordPlace(start=at, body=body, end=body + body_bytes, body_crc=body_crc)


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
            new.close()
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
