"""Rows of a data file (JSON Lines or Parquet), checked: an error message names the line."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig

MAX_NAMES = 200
"""Maximum length of the list of fields in an error message."""


@dataclass(frozen=True, slots=True)
class Row:
    """The text of the named fields of a row, and its file and line, with which an error message begins."""

    where: str
    values: tuple[str, ...]


def data_path(config: RunConfig) -> Path:
    """The data file of a recipe that reads one. Raises ConfigError if none is given."""
    if not config.data.path:
        raise ConfigError(
            f"recipe {config.recipe} reads its problems from a file; give one with --data.path FILE.jsonl"
        )
    return Path(config.data.path)


def split_rows(path: Path, fields: Sequence[str], held_out: int) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and the last ``held_out`` rows, for evaluation. Raises ConfigError, see `read_rows`."""
    rows = read_rows(path, fields)
    if len(rows) <= held_out:
        raise ConfigError(f"data file {path} has {len(rows)} rows, no more than data.eval_prompts={held_out}")
    split = len(rows) - held_out
    return rows[:split], rows[split:]


def read_rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """The named text fields of every row of a JSON Lines or Parquet file; the first of them is the prompt.

    Raises ConfigError if the file cannot be read or is empty, a line is not a JSON object, a row lacks a field, or its
    prompt is empty.
    """
    try:
        if not path.exists():
            raise ConfigError(f"data file {path} does not exist; give one with --data.path")
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise ConfigError(f"data file {path} is {kind}; each worker reads it, so it must be a file of rows")
        rows = [
            _pick(row, fields, f"data file {path}, {where}")
            for where, row in (_parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path))
        ]
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be read: {error.strerror or error}") from error
    if not rows:
        raise ConfigError(f"data file {path} is empty; it needs at least one row")
    return rows


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield where, json.loads(text)
            except UnicodeDecodeError as error:
                raise ConfigError(f"data file {path}, {where} is not UTF-8 text: {error.reason}") from error
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"data file {path}, {where} is not JSON: {error.msg} at column {error.colno}"
                ) from error
            except RecursionError:
                raise ConfigError(f"data file {path}, {where} is nested too deeply to be read") from None
            except ValueError as error:  # a number of thousands of digits
                raise ConfigError(f"data file {path}, {where} cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"data file {path} is parquet, which needs pyarrow: pip install 'flowrt[parquet]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data file {path} is not a Parquet file: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def _pick(row: Any, fields: Sequence[str], where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {type(row).__name__}, not an object with fields")
    for field in fields:
        if field not in row:
            raise ConfigError(f"{where} has no field {field!r}; it has {_names(row)}")
        if not isinstance(row[field], str):
            raise ConfigError(f"{where}: field {field!r} is {type(row[field]).__name__}, not text")
        try:
            row[field].encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(row[field][error.start]):04x}"
            raise ConfigError(
                f"{where}: field {field!r} has half a character ({half}, a lone surrogate) at place {error.start}; "
                "write the whole one, or leave it out"
            ) from None
    if not row[fields[0]].strip():
        raise ConfigError(f"{where}: field {fields[0]!r}, the prompt, is empty; leave the row out")
    return Row(where, tuple(row[field] for field in fields))


def _names(row: dict[str, Any]) -> str:
    text = ", ".join(map(repr, row)) or "none"
    return text if len(text) <= MAX_NAMES else f"{text[:MAX_NAMES]}…"
