"""Series: the numbers of metrics.jsonl by column, in little memory, whatever the length of the run."""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_POINTS = 10_000
"""Steps of an answer; more are decimated."""
KEPT_POINTS = 2_000
"""Steps of a decimated answer, at most, for each of the columns that are followed."""
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

    def since(self, step: int, most: int = MAX_POINTS, kept: int = KEPT_POINTS) -> dict[str, Any]:
        """The answer of ``api/series``: steps from this one on.

        Args:
            step: the first.
            most: steps up to which all are given.
            kept: of more, at most so many; smallest and largest of each bucket of reward, and one step of each bucket.

        Returns:
            ``steps``, and ``columns`` by name, with None for what a step does not have.
        """
        numbers = np.frombuffer(self.steps, np.int64) if self.steps else np.zeros(0, np.int64)
        chosen = np.arange(int(np.searchsorted(numbers, step)), len(numbers))
        if len(chosen) > most:
            return self._decimated(chosen, kept)
        columns = {name: _numbers(np.frombuffer(column)[chosen]) for name, column in self._columns.items()}
        return {"steps": numbers[chosen].tolist(), "columns": columns}

    def _decimated(self, chosen: "np.ndarray[Any, np.dtype[np.int64]]", kept: int) -> dict[str, Any]:
        """Two points of each bucket of steps: of each column its smallest and its largest value, in their order."""
        buckets = np.array_split(chosen, max(kept // 2, 1))
        numbers = np.frombuffer(self.steps, np.int64)
        steps: list[int] = []
        for bucket in buckets:
            steps += [int(numbers[bucket[0]]), int(numbers[bucket[-1]])]
        columns: dict[str, list[float | None]] = {}
        for name, column in self._columns.items():
            values = np.frombuffer(column)
            found: list[float] = []
            for bucket in buckets:
                of_bucket = values[bucket]
                if np.isnan(of_bucket).all():
                    found += [NAN, NAN]
                    continue
                low, high = int(np.nanargmin(of_bucket)), int(np.nanargmax(of_bucket))
                found += [float(of_bucket[min(low, high)]), float(of_bucket[max(low, high)])]
            columns[name] = _numbers(np.array(found))
        return {"steps": steps, "columns": columns, "decimated": len(chosen)}


def _numbers(values: "np.ndarray[Any, np.dtype[np.float64]]") -> list[float | None]:
    """The values for JSON: no NaN, no infinity, whole numbers without a fraction."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < EXACT else value
        for value in values.tolist()
    ]
