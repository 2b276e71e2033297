"""The interface of a data set: rows that are read on demand, and the report of several errors in them at once."""

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from flowrt.errors import ConfigError

MOST = 10
_PLACE = re.compile(
    r"""(?P<file>.*?),\ (?P<kind>line|row)\ (?P<number>\d+)  # of a row
    | prompt\ (?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")  # of a task in a file of the user's""",
    re.DOTALL | re.VERBOSE,
)
"""The place of a row or a prompt, at the beginning of an error (`Rows.where`, `PromptBlock.where`)."""
_NUMBER = re.compile(r"\d+")


class Mistakes:
    """The first errors in the rows of a data set, reported together, and those that are alike as one."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, error: ConfigError) -> None:
        """Add an error. Raises ConfigError with all errors when there are `MOST`."""
        self._found.append(str(error))
        if len(self._found) == MOST:
            self.report()

    def report(self) -> None:
        """Raise ConfigError with all errors, if there are any."""
        if len(self._found) == 1:
            raise ConfigError(self._found[0])
        if self._found:
            least = "at least " if len(self._found) == MOST else ""
            raise ConfigError(f"{least}{len(self._found)} mistakes in the data: {'; '.join(_grouped(self._found))}")


def _grouped(errors: Sequence[str]) -> list[str]:
    """The first of each group of errors that differ in the place and in numbers alone, with the others."""
    groups: dict[tuple[str, str], list[str]] = {}
    for error in errors:
        place = _PLACE.match(error)
        mistake = error if place is None else error[place.end() :]
        groups.setdefault((place["file"] or "" if place else "", _NUMBER.sub("0", mistake)), []).append(error)
    return [f"{same[0]}{_others(same)}" for same in groups.values()]


def _others(errors: Sequence[str]) -> str:
    """The rows of all errors but the first; their number if they are not of rows."""
    if len(errors) == 1:
        return ""
    rows = [match for error in errors[1:] if (match := _PLACE.match(error)) is not None and match["number"]]
    if not rows:
        return f" (and {len(errors) - 1} more like it)"
    return f" (also {rows[0]['kind']}{'s' * (len(rows) > 1)} {', '.join(row['number'] for row in rows)})"


class Rows(ABC):
    """The rows of a data set, with indices from 0. A row is a JSON value: a dict of columns, unless it is malformed."""

    has_null_keys = False
    """Whether nested objects have a null for every key that they lack and others have, as in Arrow."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def row(self, index: int) -> object:
        """Read a row. Raises ConfigError if it cannot be parsed."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Text with the file and line of a row, the beginning of an error message."""

    def parts(self) -> Sequence["Rows"]:
        """The rows of each file, in order."""
        return (self,)

    def scan(self) -> Iterator[object]:
        """All rows in order; in place of a row that cannot be parsed, its ConfigError."""
        for index in range(len(self)):
            try:
                yield self.row(index)
            except ConfigError as error:
                yield error


class Shards(Rows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]
        self.has_null_keys = any(part.has_null_keys for part in parts)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> object:
        part, place = self._find(index)
        return part.row(place)

    def where(self, index: int) -> str:
        part, place = self._find(index)
        return part.where(place)

    def parts(self) -> Sequence[Rows]:
        return self._parts

    def scan(self) -> Iterator[object]:
        for part in self._parts:
            yield from part.scan()

    def _find(self, index: int) -> tuple[Rows, int]:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]
