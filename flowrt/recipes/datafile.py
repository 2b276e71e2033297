"""Rows of a data file, checked: every mistake is named with its line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError


def read_rows(path: Path, fields: Sequence[str]) -> list[tuple[str, ...]]:
    """The named text fields of every row of a JSON Lines or parquet file.

    Raises ConfigError when the file is missing or empty, a line is no JSON object, or a row lacks a field.
    """
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist; give one with --data.path")
    rows = [
        _pick(row, fields, f"data file {path}, {where}")
        for where, row in (_parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path))
    ]
    if not rows:
        raise ConfigError(f"data file {path} is empty; it needs at least one row")
    return rows


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"data file {path}, line {number} is no JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is no UTF-8 text: {error.reason} at byte {error.start}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"data file {path} is parquet, which needs pyarrow: pip install 'flowrt[parquet]'") from error
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"data file {path} is no parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"row {number}", row


def _pick(row: Any, fields: Sequence[str], where: str) -> tuple[str, ...]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {type(row).__name__}, not an object with fields")
    for field in fields:
        if field not in row:
            raise ConfigError(f"{where} has no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}")
        if not isinstance(row[field], str):
            raise ConfigError(f"{where}: field {field!r} is {type(row[field]).__name__}, not text")
    return tuple(row[field] for field in fields)
