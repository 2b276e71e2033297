"""Incremental readers of files of a run: what was appended since the last call, while another process writes.

A file may be missing, be replaced by another one, grow by any number of bytes, or end within a line at any time.
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 4 << 20
"""Limit of an incomplete line: `LineTail` discards what it has read of a longer line, `GzipTail` stops reading."""
READ_BYTES = 1 << 20
UNLIMITED = 1 << 62
MARK_BYTES = 64
"""Bytes before the read position that are compared at each call, to detect that the content was replaced."""


@dataclass(slots=True)
class Appended:
    """What was appended to a file since the last call."""

    lines: list[bytes]
    """Complete lines, without their ends."""
    is_replaced: bool = False
    """Whether the file was replaced since the last call; then the lines are those from its start."""


class LineTail:
    """Reads the complete lines that were appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Why the file cannot be read, or which part was skipped; empty if there is no problem."""
        self.is_present = False
        self.is_behind = False
        """Whether the last call left lines for the next one, because of its limit."""
        self._file: tuple[int, int] | None = None
        self._reached = 0
        self._mark = b""
        self._is_skipping = False  # the rest of a line that is too long

    def read_new(self, most_bytes: int = UNLIMITED) -> Appended:
        """The lines since the last call; none if the file is missing or, with ``problem`` set, unreadable.

        ``most_bytes``: read no further once this many bytes are read, rounded up to blocks of `READ_BYTES`.
        """
        self.is_behind = False
        try:
            return self._poll(most_bytes)
        except FileNotFoundError:
            self.is_present = False
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
        return Appended([])

    def _poll(self, most_bytes: int) -> Appended:
        with self.path.open("rb") as file:
            self.is_present = True
            identity = _identity(file.fileno())
            start = max(self._reached - len(self._mark), 0)
            file.seek(start)
            is_replaced = self._file is not None and (
                identity != self._file or file.read(len(self._mark)) != self._mark
            )
            if is_replaced:
                self._reached, self._mark, self.problem, self._is_skipping = 0, b"", "", False
            self._file = identity
            file.seek(self._reached)
            lines: list[bytes] = []
            rest = b""
            while data := file.read(READ_BYTES):
                if self._is_skipping:
                    _, end, data = data.partition(b"\n")
                    self._is_skipping = not end
                *whole, rest = (rest + data).split(b"\n")
                lines += whole
                if len(rest) > MAX_LINE_BYTES:
                    self.problem = f"{self.path.name} has a line of more than {MAX_LINE_BYTES >> 20} MB, left out"
                    rest, self._is_skipping = b"", True
                if lines and file.tell() - self._reached >= most_bytes:
                    self.is_behind = file.tell() < os.fstat(file.fileno()).st_size
                    break
            self._reached = file.tell() - len(rest)
            start = max(self._reached - MARK_BYTES, 0)
            file.seek(start)
            self._mark = file.read(self._reached - start)
        return Appended(lines, is_replaced)


class JsonTail:
    """Reads the objects that were appended to a file of JSON lines since the last call, and counts damaged lines."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._damaged = 0

    @property
    def is_behind(self) -> bool:
        """Whether the last call left lines for the next one, because of its limit."""
        return self._tail.is_behind

    @property
    def state(self) -> str:
        """Either "present" or "missing", or a description of what is damaged."""
        if self._tail.problem:
            return self._tail.problem
        if self._damaged:
            lines = "line" if self._damaged == 1 else "lines"
            return f"{self._tail.path.name} has {self._damaged} damaged {lines}, left out"
        return "present" if self._tail.is_present else "missing"

    def read_new(self, most_bytes: int = UNLIMITED) -> tuple[list[dict[str, Any]], bool]:
        """The objects since the last call, and whether the file was replaced (then: since its start).

        ``most_bytes``: as for `LineTail.read_new`.
        """
        new = self._tail.read_new(most_bytes)
        if new.is_replaced:
            self._damaged = 0
        lines = []
        for text in new.lines:
            line = parse_line(text)
            if line is not None:
                lines.append(line)
            elif text.strip():
                self._damaged += 1
        return lines, new.is_replaced


class GzipTail:
    """Reads the complete lines that were appended to a gzip file since the last call.

    The file may consist of several gzip members, be flushed at any position, and lack its trailer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._file: tuple[int, int] | None = None
        self._reached = 0
        self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._rest = b""

    def read_new(self) -> Appended:
        """The lines since the last call; after damage none, until the file is replaced."""
        try:
            return self._poll()
        except FileNotFoundError:
            return Appended([])
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return Appended([])

    def _poll(self) -> Appended:
        with self.path.open("rb") as file:
            identity = _identity(file.fileno())
            size = file.seek(0, 2)
            is_replaced = self._file is not None and (identity != self._file or size < self._reached)
            if is_replaced:
                self._reached, self._rest, self.problem = 0, b"", ""
                self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
            self._file = identity
            lines: list[bytes] = []
            file.seek(self._reached)
            while not self.problem and (data := file.read(READ_BYTES)):
                self._reached += len(data)
                *whole, self._rest = (self._rest + self._unpack(data)).split(b"\n")
                lines += whole
                if len(self._rest) > MAX_LINE_BYTES:
                    self.problem = f"{self.path.name} has a line of more than {MAX_LINE_BYTES >> 20} MB"
        return Appended(lines, is_replaced)

    def _unpack(self, data: bytes) -> bytes:
        """The decompressed content of these bytes, up to the first damaged one."""
        unpacked = b""
        while data:
            try:
                unpacked += self._unpacker.decompress(data)
            except zlib.error:
                self.problem = (
                    f"{self.path.name} is damaged within its first {self._reached} bytes; the rest is left out"
                )
                break
            data = self._unpacker.unused_data
            if self._unpacker.eof:
                self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        return unpacked


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if there is none."""
    try:
        line = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        try:
            line = json.loads(text)  # accepts NaN and lone surrogates, and is slower
        except (ValueError, RecursionError):
            return None
    return line if isinstance(line, dict) else None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def file_version(path: Path) -> object:
    """A value that changes when a file does; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
