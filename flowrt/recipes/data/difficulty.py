"""Difficulty of rows, a column of numbers: which rows are used, and in what order."""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from flowrt.errors import ConfigError
from flowrt.recipes.data.base import Mistakes, Rows
from flowrt.recipes.data.columns import MISSING, as_columns, find
from flowrt.recipes.data.json_lines import JsonLines
from flowrt.recipes.data.prompt_scan import BATCH, column_fields, is_decodable, row_type
from flowrt.recipes.data_config import DataConfig


class Selection(Rows):
    """Some rows of a data set, in order."""

    def __init__(self, rows: Rows, places: Sequence[int]) -> None:
        """
        Args:
            rows: all rows.
            places: indices of those that are used, ascending.
        """
        self._rows = rows
        self._places = places

    @property
    def left_out(self) -> int:
        """Number of rows that are not used."""
        return len(self._rows) - len(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> object:
        return self._rows.row(self._places[index])

    def where(self, index: int) -> str:
        return self._rows.where(self._places[index])

    def scan(self) -> Iterator[object]:
        source, after = self._rows.scan(), 0
        for place in self._places:
            yield next(islice(source, place - after, None))
            after = place + 1


def within(numbers: Sequence[float], data: DataConfig) -> list[int]:
    """The indices of the rows whose difficulty is within both limits, inclusive."""
    least, most = data.difficulties
    return [at for at, number in enumerate(numbers) if least <= number <= most]


def difficulties(rows: Rows, key: str) -> "array[float]":
    """The difficulty of every row.

    Args:
        rows: all rows of the data set.
        key: the column; A.B is key B in column A.

    Raises ConfigError for the first ten rows whose difficulty is missing or not a finite number.
    """
    decode = _decoder(key)
    numbers, mistakes = array("d"), Mistakes()
    for part in rows.parts():
        for start in range(0, len(part), BATCH):
            count = min(BATCH, len(part) - start)
            block = decode(part.block(start, count), count) if isinstance(part, JsonLines) else None
            if block is None:
                block = []
                for at in range(start, start + count):
                    try:
                        block.append(_number(part, at, key))
                    except ConfigError as error:
                        mistakes.add(error)
                        block.append(math.nan)
            numbers.extend(block)
    mistakes.report()
    return numbers


def _number(part: Rows, index: int, key: str) -> float:
    """The difficulty of a row. Raises ConfigError if it has none."""
    row, where = part.row(index), part.where(index)
    value = find(as_columns(row, where), key)
    if value is MISSING:
        raise ConfigError(f"{where} has no field {key!r} (data.difficulty_key)")
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{where}: field {key!r} is {value!r:.40}, not a finite number (data.difficulty_key)")
    return number


def _decoder(key: str) -> Callable[[bytes, int], list[float] | None]:
    """A function that reads the difficulties of consecutive lines of JSON; it returns None if it cannot read one."""
    if not is_decodable(key):
        return lambda _block, _count: None
    fields, read = column_fields("difficulty", key, float)
    kind = msgspec.json.Decoder(row_type(fields))

    def decode(block: bytes, count: int) -> list[float] | None:
        try:
            numbers = list(map(read, kind.decode_lines(block)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        is_right = len(numbers) == count and msgspec.UNSET not in numbers and all(map(math.isfinite, numbers))
        return numbers if is_right else None

    return decode
