"""Samples as a table of completions with the columns of TRL: JSON Lines and Parquet.

The columns are step, prompt, completion, one for each reward, and advantage. A reward that does not apply to a row, and
the advantage of a sample that was not trained, are null.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from flowrt.errors import ConfigError
from flowrt.observability.stored_samples import SampleRow
from flowrt.runtime.files import partial_path

REWARD = "reward"
"""Column of the reward of a run without named reward functions."""
STDOUT = Path("-")
"""Path that stands for standard output in `write_jsonl`."""
GROUP_ROWS = 1000
"""Number of rows in a row group of a Parquet file."""
FIXED = ("step", "prompt", "completion", "advantage")


def table_rows(rows: Iterable[SampleRow], rewards: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of the table, each with its values by column.

    Args:
        rows: the samples.
        rewards: names of the reward functions, which are columns; empty: one column `REWARD`.
    """
    names = [name for name in rewards if name not in FIXED] or [REWARD]
    for row in rows:
        values: Mapping[str, float | None] = row.parts or {REWARD: row.reward}
        yield {
            "step": row.step,
            "prompt": row.prompt_text,
            "completion": row.completion,
            **{name: values.get(name) for name in names},
            "advantage": row.advantage,
        }


def write_jsonl(rows: Iterable[SampleRow], rewards: Sequence[str], path: Path) -> int:
    """Write samples as JSON Lines in ASCII; returns the number of rows.

    Only the owner can read the file. Raises ConfigError if it cannot be written.
    """
    table = table_rows(rows, rewards)
    if path == STDOUT:
        return _write_lines(table, sys.stdout)
    partial = partial_path(path)
    try:
        with os.fdopen(_create(partial), "w", encoding="ascii") as file:
            count = _write_lines(table, file)
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _remove(partial)
    return count


def write_parquet(rows: Iterable[SampleRow], rewards: Sequence[str], path: Path) -> int:
    """Write samples as a Parquet file; returns the number of rows. Invalid Unicode becomes question marks.

    Only the owner can read the file. Raises ConfigError if it cannot be written, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("--parquet needs pyarrow: pip install 'flowrt[data]'; --jsonl does not") from error
    names = [name for name in rewards if name not in FIXED] or [REWARD]
    types = [("step", pa.int64()), ("prompt", pa.string()), ("completion", pa.string())]
    types += [(name, pa.float64()) for name in names] + [("advantage", pa.float64())]
    schema = pa.schema(types)
    table, partial, count = table_rows(rows, rewards), partial_path(path), 0
    try:
        with os.fdopen(_create(partial), "wb") as file, parquet.ParquetWriter(file, schema) as writer:
            while group := [_valid(row) for row in islice(table, GROUP_ROWS)]:
                writer.write_table(pa.Table.from_pylist(group, schema))
                count += len(group)
        partial.replace(path)
    except (OSError, pa.ArrowException) as error:
        raise _unwritable(path, error) from error
    finally:
        _remove(partial)
    return count


def _write_lines(table: Iterable[dict[str, Any]], file: TextIO) -> int:
    count = 0
    for row in table:
        file.write(json.dumps(row) + "\n")
        count += 1
    return count


def _valid(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: row[name].encode(errors="replace").decode() for name in ("prompt", "completion")}
    return {**row, **texts}


def _create(path: Path) -> int:
    """Create a file that only its owner can read, because samples may be confidential; returns its descriptor."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _unwritable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}")
