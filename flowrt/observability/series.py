"""Series: the numbers of metrics.jsonl by column, in little memory, whatever the length of the run."""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_POINTS = 10_000
"""Steps of an answer; more are decimated."""
MAX_VALUES = 150_000
"""Numbers of an answer, about half a megabyte compressed; more are decimated."""
KEPT_POINTS = 2_000
"""Steps of a decimated answer, at least."""
MAX_COLUMNS = 512
NAN = float("nan")
EXACT = float(1 << 53)


class Series:
    """The steps of a run and their numbers; what a step does not have is NaN."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl; a step that is there already, and all later ones, are replaced."""
        step = line["step"]
        while self.steps and self.steps[-1] >= step:
            self._pop()
        for name, value in line.items():
            if name == "step" or not isinstance(value, int | float) or isinstance(value, bool):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_COLUMNS:
                    continue
                column = self._columns[name] = array("d", [NAN] * len(self.steps))
            try:
                column.append(float(value))
            except OverflowError:
                column.append(NAN)
        self.steps.append(step)
        for column in self._columns.values():
            if len(column) < len(self.steps):
                column.append(NAN)

    def _pop(self) -> None:
        self.steps.pop()
        for column in self._columns.values():
            column.pop()

    def first_difference(self, other: "Series") -> int | None:
        """The first step of this one that the other lacks, or has at another time; None if it has all of them."""
        mine, its = self._columns.get("wall_s", array("d")), other._columns.get("wall_s", array("d"))
        for at, step in enumerate(self.steps):
            if at >= len(other.steps) or step != other.steps[at] or mine[at] != its[at]:
                return step
        return None

    def since(self, step: int, most: int = MAX_POINTS, most_values: int = MAX_VALUES) -> dict[str, Any]:
        """The answer of ``api/series``: steps from this one on.

        Args:
            step: the first.
            most: steps up to which all are given.
            most_values: numbers of all columns up to which all are given.

        Returns:
            ``steps``, and ``columns`` by name, with None for what a step does not have. Of a decimated answer these
            are the first and the last step of each bucket, and the smallest and the largest value of each column in
            it, in the order in which they came; ``decimated`` is the number of steps.
        """
        numbers = np.frombuffer(self.steps, np.int64) if self.steps else np.zeros(0, np.int64)
        chosen = np.arange(int(np.searchsorted(numbers, step)), len(numbers))
        if len(chosen) > most or len(chosen) * len(self._columns) > most_values:
            kept = KEPT_POINTS if len(chosen) > most else max(most_values // len(self._columns), KEPT_POINTS)
            if len(chosen) > kept:
                return self._decimated(chosen, kept)
        columns = {name: _numbers(np.frombuffer(column)[chosen]) for name, column in self._columns.items()}
        return {"steps": numbers[chosen].tolist(), "columns": columns}

    def _decimated(self, chosen: "np.ndarray[Any, np.dtype[np.int64]]", kept: int) -> dict[str, Any]:
        """Two points of each bucket of steps."""
        size = -(-2 * len(chosen) // kept)
        count = -(-len(chosen) // size)
        places = np.minimum(np.arange(count * size), len(chosen) - 1).reshape(count, size)
        numbers = np.frombuffer(self.steps, np.int64)[chosen]
        columns: dict[str, list[float | None]] = {}
        for name, column in self._columns.items():
            values = np.frombuffer(column)[chosen][places]
            is_missing = np.isnan(values)
            low = np.where(is_missing, np.inf, values).argmin(axis=1)
            high = np.where(is_missing, -np.inf, values).argmax(axis=1)
            both = np.sort(np.stack([low, high], axis=1), axis=1)
            columns[name] = _numbers(np.take_along_axis(values, both, axis=1).ravel())
        steps = numbers[places[:, [0, -1]]].ravel().tolist()
        return {"steps": steps, "columns": columns, "decimated": len(chosen)}


def _numbers(values: "np.ndarray[Any, np.dtype[np.float64]]") -> list[float | None]:
    """The values for JSON: no NaN, no infinity, whole numbers without a fraction."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < EXACT else value
        for value in values.tolist()
    ]
