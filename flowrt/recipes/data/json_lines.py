"""JSON Lines, also gzipped: an index of offsets (16 bytes a row), and rows that are parsed when they are accessed.

A gzipped file is unpacked once into a temporary file without a name ($TMPDIR), for random access.
"""

import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import IO

from flowrt.errors import ConfigError
from flowrt.recipes.data.base import Rows
from flowrt.recipes.data.file_kinds import BOM

BLOCK_BYTES = 1 << 20
"""Approximate number of bytes that are read at once for the index."""
GZIP_MAGIC = b"\x1f\x8b"


class JsonLines(Rows):
    """The lines of a file that are not blank; one JSON value in each."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if a gzipped file cannot be unpacked, OSError if the file cannot be read."""
        self._path = path
        self._file = unpacked(path)
        weakref.finalize(self, self._file.close)
        self._starts = array("q")
        self._numbers = array("q")
        offset, number = len(BOM) if self._file.read(len(BOM)) == BOM else 0, 1
        self._file.seek(offset)
        while lines := self._file.readlines(BLOCK_BYTES):
            offsets = list(accumulate(map(len, lines), initial=offset))
            offset = offsets.pop()
            if any(map(bytes.isspace, lines)):
                kept = [at for at, line in enumerate(lines) if not line.isspace()]
                self._starts.extend([offsets[at] for at in kept])
                self._numbers.extend([number + at for at in kept])
            else:
                self._starts.extend(offsets)
                self._numbers.extend(range(number, number + len(lines)))
            number += len(lines)
        self._starts.append(offset)

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> object:
        return self._parse(index, self.line(index))

    def line(self, index: int) -> bytes:
        """The line of a row, and blank lines after it."""
        return self.block(index, 1)

    def block(self, index: int, count: int) -> bytes:
        """The lines of ``count`` rows from this one, and blank lines between and after them."""
        start, end = self._starts[index], self._starts[index + count]
        return os.pread(self._file.fileno(), end - start, start)

    def where(self, index: int) -> str:
        return f"data file {self._path}, line {self._numbers[index]}"

    def scan(self) -> Iterator[object]:
        self._file.seek(self._starts[0])
        index = 0
        for line in self._file:
            if line.isspace():
                continue
            try:
                yield self._parse(index, line)
            except ConfigError as error:
                yield error
            index += 1

    def _parse(self, index: int, line: bytes) -> object:
        try:
            row: object = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.where(index)} is not UTF-8 text: {error.reason}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{self.where(index)} is not JSON: {error.msg} at column {error.colno}") from error
        except RecursionError:
            raise ConfigError(f"{self.where(index)} is nested too deeply to be read") from None
        except ValueError as error:  # a number with thousands of digits
            raise ConfigError(f"{self.where(index)} cannot be read: {error}") from error
        return row


def unpacked(path: Path) -> IO[bytes]:
    """A file, or what it unpacks to if it is gzipped. Raises ConfigError if that fails."""
    file = path.open("rb")
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    if magic != GZIP_MAGIC:
        return file
    plain = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        with file, gzip.GzipFile(fileobj=file) as packed:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        plain.close()
        raise ConfigError(f"data file {path} cannot be unpacked: {error}; is the download complete?") from error
    plain.seek(0)
    return plain
