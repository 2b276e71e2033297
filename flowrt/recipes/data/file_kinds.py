"""What a file is that is not rows: by its first bytes, for one sentence in place of an error for each line."""

import json
from pathlib import Path

from flowrt.errors import ConfigError

HEAD_BYTES = 4096
MAX_NAMES = 8
PARQUET, ARROW_FILE = b"PAR1", b"ARROW1"
BOM = b"\xef\xbb\xbf"
_MAGIC = (
    (b"version https://git-lfs", "a pointer of Git LFS in place of the data; fetch it: git lfs pull"),
    (b"PK\x03\x04", "a ZIP archive or an Excel sheet; unpack it, or save it as CSV"),
    (b"\xd0\xcf\x11\xe0", "an Excel sheet; save it as CSV"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard; unpack it: zstd -d"),
    (b"BZh", "compressed with bzip2; unpack it: bunzip2"),
    (b"\xfd7zXZ", "compressed with xz; unpack it: unxz"),
    (b"7z\xbc\xaf", "a 7-Zip archive; unpack it"),
    (b"SQLite format 3", "an SQLite database; export its table as CSV"),
    (b"%PDF", "a PDF document"),
    (b"\x93NUMPY", "an array of NumPy"),
    (b"\x89HDF", "an HDF5 file"),
    (b"ORC", "an ORC file; convert it to Parquet"),
    (b"Obj\x01", "an Avro file; convert it to Parquet"),
    (b"\x80", "a pickle, which is not loaded"),
    (b"\xff\xfe", "UTF-16 text; convert it to UTF-8, for example with iconv"),
    (b"\xfe\xff", "UTF-16 text; convert it to UTF-8, for example with iconv"),
)
_MARKUP = (b"<!doctype html", b"<html", b"<?xml", b"<")


def check_text(path: Path, head: bytes) -> None:
    """Raise ConfigError, with what the file is, for one that is no text of rows.

    Args:
        path: the file.
        head: its first `HEAD_BYTES` bytes, unpacked.
    """
    what = next((text for magic, text in _MAGIC if head.startswith(magic)), "")
    start = head.removeprefix(BOM).lstrip()
    if not what and head[257:262] == b"ustar":
        what = "a tar archive; unpack it"
    if not what and start.lower().startswith(_MARKUP):
        what = "a web page or XML, maybe an error page in place of the data"
    if not what and b"\0" in head:
        what = "binary data"
    if what:
        raise ConfigError(
            f"data file {path} is {what}; it cannot be read as rows (JSON Lines, JSON, CSV, Parquet, Arrow)"
        )


def check_json(path: Path, head: bytes) -> None:
    """Raise ConfigError, with what the file is, for text that cannot be rows in JSON; arguments as of `check_text`."""
    start, is_whole = head.removeprefix(BOM).lstrip(), len(head) < HEAD_BYTES
    if start[:1] == b"{":
        _check_one_row_a_line(path, start, is_whole=is_whole)
    elif start and start[:1] not in b'["':
        _check_json_line(path, start, is_whole=is_whole)


def _check_json_line(path: Path, start: bytes, *, is_whole: bool) -> None:
    """Raise ConfigError for a file whose first line is no JSON, and does not begin as JSON does."""
    line, line_end, _ = start.partition(b"\n")
    try:
        if line_end or is_whole:
            json.loads(line)
    except (ValueError, RecursionError):
        text = line.decode(errors="replace").strip()
        table = "; if it is a table, name it *.csv or *.tsv" if any(mark in text for mark in ",;\t") else ""
        raise ConfigError(f"data file {path} is not JSON Lines: it begins with {text!r:.60}{table}") from None


def _check_one_row_a_line(path: Path, start: bytes, *, is_whole: bool) -> None:
    """Raise ConfigError for a file that begins with a JSON object over several lines."""
    first, line_end, _ = start.partition(b"\n")
    if not (line_end or is_whole):
        return  # a long line
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        if not _ends_open(first):
            return  # a damaged line, which is reported as such
        text = path.read_bytes() if path.stat().st_size < 1 << 30 else b""
        raise ConfigError(
            f"data file {path} {_described(text)}; write each row as one line, or all in a JSON array"
        ) from None


def _ends_open(line: bytes) -> bool:
    """Whether a line of JSON goes on in the next one."""
    return line.rstrip().endswith((b"{", b"[", b","))


def _described(text: bytes) -> str:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return "has JSON objects over several lines"
    names = [name for name, value in fields.items() if isinstance(value, list)]
    shown = ", ".join(map(repr, names[:MAX_NAMES]))
    return "is one JSON object over several lines" + (f", with lists in {shown}" if names else "")
