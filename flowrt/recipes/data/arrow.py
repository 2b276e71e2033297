"""Parquet and Arrow files, through pyarrow: mapped into memory, rows converted when they are read.

A Parquet file is unpacked once, batch by batch, into a temporary Arrow file without a name ($TMPDIR): its row groups
can only be decompressed whole, which is too slow for rows in random order.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError, first_line
from flowrt.recipes.data.base import Rows
from flowrt.recipes.data.file_kinds import ARROW_FILE

BATCH_ROWS = 1024
NOT_CONVERTED = (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError)
"""Raised for a value that Python cannot hold: a date after the year 9999, nanoseconds without pandas, text that is not
UTF-8, an unknown time zone."""


class ArrowRows(Rows):
    """The rows of record batches."""

    has_null_keys = True

    def __init__(self, path: Path, batches: list[Any]) -> None:
        """
        Args:
            path: the file, for messages.
            batches: pyarrow.RecordBatch objects.
        """
        self._path = path
        self._batches = batches
        self._starts = [0, *accumulate(batch.num_rows for batch in batches)]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> object:
        batch = bisect_right(self._starts, index) - 1
        place = index - self._starts[batch]
        try:
            return self._batches[batch].slice(place, 1).to_pylist()[0]
        except NOT_CONVERTED as error:
            raise self._mistake(index, self._batches[batch], place) from error

    def where(self, index: int) -> str:
        return f"data file {self._path}, row {index + 1}"

    def scan(self) -> Iterator[object]:
        for first, batch in zip(self._starts, self._batches, strict=False):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                rows = batch.slice(start, BATCH_ROWS)
                try:
                    yield from rows.to_pylist()
                except NOT_CONVERTED:
                    yield from self._one_by_one(first + start, rows.num_rows)

    def _one_by_one(self, first: int, count: int) -> Iterator[object]:
        """Rows of which some cannot be converted; in place of these their ConfigError."""
        for index in range(first, first + count):
            try:
                yield self.row(index)
            except ConfigError as error:
                yield error

    def _mistake(self, index: int, batch: Any, place: int) -> ConfigError:
        """The error of a row that cannot be converted: its first column that cannot be."""
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values[place].as_py()
            except NOT_CONVERTED as error:
                return ConfigError(
                    f"{self.where(index)}: column {name!r:.80} of type {values.type} has a value that Python cannot "
                    f"hold: {first_line(error).rstrip('.')}; convert the column, or leave it out of the file"
                )
        return ConfigError(f"{self.where(index)} cannot be read")


def parquet_rows(path: Path) -> ArrowRows:
    """The rows of a Parquet file. Raises ConfigError if it is not a Parquet file, or pyarrow is not installed."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"data file {path} is parquet, which needs pyarrow: pip install 'flowrt[data]'") from error
    try:
        with parquet.ParquetFile(path) as file, tempfile.NamedTemporaryFile(suffix=".arrow") as unpacked:
            with pa.OSFile(unpacked.name, "wb") as sink, pa.ipc.new_stream(sink, file.schema_arrow) as writer:
                for batch in file.iter_batches(BATCH_ROWS):
                    writer.write_batch(batch)
            return ArrowRows(path, _batches(unpacked.name))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data file {path} is not a Parquet file: {first_line(error)}") from error


def arrow_rows(path: Path) -> ArrowRows:
    """The rows of an Arrow file: of the stream format, as `datasets` writes it, or of the file format (Feather).

    Raises ConfigError if it cannot be read, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ConfigError(f"data file {path} is Arrow, which needs pyarrow: pip install 'flowrt[data]'") from error
    try:
        return ArrowRows(path, _batches(str(path)))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data file {path} is not an Arrow stream: {first_line(error)}") from error


def _batches(name: str) -> list[Any]:
    """The record batches of an Arrow file, whose data stays in the file until it is read."""
    import pyarrow as pa

    with pa.memory_map(name) as source:
        if source.read(len(ARROW_FILE)) == ARROW_FILE:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(number) for number in range(reader.num_record_batches)]
        source.seek(0)
        return list(pa.ipc.open_stream(source))
