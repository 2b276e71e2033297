"""Tables of text (CSV, TSV) and JSON arrays: converted once to JSON Lines in a temporary file without a name ($TMPDIR),
for random access.

The values of a table are text: it has no types. Also gzipped.
"""

import csv
import io
import json
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from flowrt.errors import ConfigError
from flowrt.recipes.data.json_lines import JsonLines, unpacked

MAX_FIELD_CHARS = 1 << 30
"""Maximum length of a field of a table, in characters."""
Converted = Iterable[tuple[int, bytes | str]]
"""The number of each row in its file, and its JSON text, or what is wrong with it."""


class ConvertedRows(JsonLines):
    """Rows of a file that is not JSON Lines, by their places in it."""

    def __init__(self, path: Path, rows: Converted, kind: str) -> None:
        """
        Args:
            path: the file.
            rows: its rows.
            kind: what numbers of rows count in messages, "line" or "row".
        """
        self._path = path
        self._kind = kind
        self._wrong: dict[int, str] = {}
        self._starts = array("q", [0])
        self._numbers = array("q")
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as its rows are read)
        weakref.finalize(self, self._file.close)
        end = 0
        for number, row in rows:
            if isinstance(row, str):
                self._wrong[len(self._numbers)] = row
            line = b"null\n" if isinstance(row, str) else row + b"\n"
            self._file.write(line)
            end += len(line)
            self._starts.append(end)
            self._numbers.append(number)
        self._file.flush()

    def where(self, index: int) -> str:
        return f"data file {self._path}, {self._kind} {self._numbers[index]}"

    def _parse(self, index: int, line: bytes) -> object:
        if wrong := self._wrong.get(index):
            raise ConfigError(f"{self.where(index)} {wrong}")
        return super()._parse(index, line)


def table_rows(path: Path, delimiter: str) -> ConvertedRows:
    """The rows of a table, whose first line has the names of the columns.

    Args:
        path: file.
        delimiter: between fields; a file for "," whose first line has one name with it is read with ";" or a tab if it
            has several names with that.

    Raises ConfigError if the file is no table, or has no names of columns.
    """
    with unpacked(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        return ConvertedRows(path, _records(path, text, delimiter), "line")


def _records(path: Path, text: io.TextIOWrapper, delimiter: str) -> Iterator[tuple[int, bytes | str]]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    line = 1
    try:
        if delimiter == ",":
            delimiter = next((mark for mark in ",;\t" if _has_several_names(text, mark)), delimiter)
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        names = _names(reader)
        _check_names(path, names)
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) == len(names):
                yield line, json.dumps(dict(zip(names, fields, strict=True))).encode()
            elif fields:  # not a blank line
                yield line, f"has {len(fields)} of the {len(names)} fields that the first line names"
            line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data file {path} is not UTF-8 text after line {line}: {error.reason}; convert it, for example with iconv"
        ) from None
    except csv.Error as error:
        raise ConfigError(f"data file {path}, line {line} cannot be read: {error}; check its quotes") from None


def _names(reader: Iterator[list[str]]) -> list[str]:
    """The first line that is not blank; empty without one."""
    return next((fields for fields in reader if any(map(str.strip, fields))), [])


def _has_several_names(text: io.TextIOWrapper, delimiter: str) -> bool:
    """Whether the first line has several fields with this delimiter."""
    try:
        return len(_names(csv.reader(text, delimiter=delimiter, strict=True))) > 1
    except csv.Error:
        return False
    finally:
        text.seek(0)


def _check_names(path: Path, names: list[str]) -> None:
    if not names:
        raise ConfigError(f"data file {path} is empty; its first line has the names of the columns")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"data file {path} has two columns {twice[0]!r:.80} in its first line; rename one")


def array_rows(path: Path) -> ConvertedRows:
    """The elements of a JSON array. Raises ConfigError if the file is no JSON."""
    with unpacked(path) as file:
        text = file.read().removeprefix(b"\xef\xbb\xbf")
    try:
        elements = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        elements = _slowly(path, text)
    # A line end in JSON is between values: in text it is written \n.
    rows = ((number, bytes(element).replace(b"\n", b" ")) for number, element in enumerate(elements, 1))
    return ConvertedRows(path, rows, "row")


def _slowly(path: Path, text: bytes) -> list[msgspec.Raw]:
    """The elements of an array that msgspec does not decode. Raises ConfigError if Python does not, either."""
    try:
        rows = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not UTF-8 text: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"data file {path} begins as a JSON array, and is not JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}"
        ) from None
    except RecursionError:
        raise ConfigError(f"data file {path} is nested too deeply to be read") from None
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"data file {path} cannot be read: {error}") from None
    return [msgspec.Raw(json.dumps(row).encode()) for row in rows]
