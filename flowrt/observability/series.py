"""Series: the numbers of metrics.jsonl by column, in arrays of 8 bytes for each number."""

import math
from array import array
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

MAX_POINTS = 10_000
"""Maximum number of steps in an answer; more are decimated."""
MAX_VALUES = 150_000
"""Maximum number of values in an answer, about 0.5 MB compressed; more are decimated."""
KEPT_POINTS = 2_000
"""Minimum number of steps in a decimated answer of `Series.since`."""
MIN_POINTS = 16
MAX_COLUMNS = 512
NAN = float("nan")
EXACT = float(1 << 53)
Axis = Literal["step", "wall_s"]
Values = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


class Series:
    """The steps of a run and their numbers; NaN where a step has no number."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl, which replaces its step and all later ones.

        At most `MAX_COLUMNS` columns are kept; values other than numbers are ignored.
        """
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

    def last(self) -> dict[str, float]:
        """The finite numbers of the last step; empty before the first step."""
        if not self.steps:
            return {}
        return {name: column[-1] for name, column in self._columns.items() if math.isfinite(column[-1])}

    def first_difference(self, other: "Series") -> int | None:
        """The first step that ``other`` does not have at the same ``wall_s``; None if it has all steps."""
        mine, its = self._columns.get("wall_s", array("d")), other._columns.get("wall_s", array("d"))
        for at, step in enumerate(self.steps):
            if at >= len(other.steps) or step != other.steps[at] or mine[at] != its[at]:
                return step
        return None

    def since(self, step: int, most: int = MAX_POINTS, most_values: int = MAX_VALUES) -> dict[str, Any]:
        """The answer with all steps from ``step`` on; see `window`.

        More than ``most`` steps or ``most_values`` numbers are decimated.
        """
        chosen = self._between("step", step, math.inf)
        if len(chosen) > most or len(chosen) * len(self._columns) > most_values:
            kept = KEPT_POINTS if len(chosen) > most else max(most_values // len(self._columns), KEPT_POINTS)
            return self._answer(chosen, kept)
        return self._answer(chosen, len(chosen))

    def window(self, axis: Axis, low: float, high: float, points: int) -> dict[str, Any]:
        """The answer of ``api/series`` with a number of points: the steps between two places on an axis.

        Args:
            axis: "step", or "wall_s" in seconds of the run clock.
            low: the first place.
            high: the last place, inclusive.
            points: maximum number of steps in the answer, from 16 to 10,000; other numbers are clipped.

        Returns:
            ``steps``, and ``columns`` by name, with None where a step has no number. The columns include those that are
                drawn and computed from others.

            A decimated answer has the first and the last step of each bucket of steps, and for each column the smallest
                and the largest value of the bucket in order of steps; a single value of a bucket is in the first place.
                ``decimated`` is then the number of steps of the window, and the last point is that of the last step
                alone.
        """
        return self._answer(self._between(axis, low, high), max(min(points, MAX_POINTS), MIN_POINTS))

    def _between(self, axis: Axis, low: float, high: float) -> Indices:
        """Indices of the steps of a window, both bounds inclusive."""
        if not self.steps:
            return np.zeros(0, np.int64)
        wall_s = self._columns.get("wall_s") if axis == "wall_s" else None
        along = np.frombuffer(self.steps, np.int64) if wall_s is None else np.frombuffer(wall_s)
        return np.flatnonzero((along >= low) & (along <= high))

    def _answer(self, chosen: Indices, kept: int) -> dict[str, Any]:
        columns = {name: np.frombuffer(column)[chosen] for name, column in self._columns.items()}
        columns |= _derived(columns)
        steps = np.frombuffer(self.steps, np.int64)[chosen] if self.steps else chosen
        if len(chosen) <= kept:
            return {"steps": steps.tolist(), "columns": {name: _numbers(values) for name, values in columns.items()}}
        # The last step is not decimated: the page shows its numbers.
        size = -(-2 * (len(chosen) - 1) // (kept - 1))
        count = -(-(len(chosen) - 1) // size)
        places = np.minimum(np.arange(count * size), len(chosen) - 2).reshape(count, size)
        return {
            "steps": [*steps[places[:, [0, -1]]].ravel().tolist(), int(steps[-1])],
            "columns": {name: _numbers(_extremes(values, places)) for name, values in columns.items()},
            "decimated": len(chosen),
        }


def _extremes(values: Values, places: Indices) -> Values:
    """The smallest and the largest value of each bucket in order of steps, then the last value."""
    buckets = values[places]
    is_missing = np.isnan(buckets)
    low = np.where(is_missing, np.inf, buckets).argmin(axis=1)
    high = np.where(is_missing, -np.inf, buckets).argmax(axis=1)
    both = np.take_along_axis(buckets, np.sort(np.stack([low, high], axis=1), axis=1), axis=1)
    both[(~is_missing).sum(axis=1) == 1, 1] = NAN
    return np.append(both.ravel(), values[-1])


def _derived(columns: Mapping[str, Values]) -> dict[str, Values]:
    """Columns that are drawn and not in metrics.jsonl; each is computed from other columns."""
    derived: dict[str, Values] = {}
    if all(name in columns for name in ("tokens", "samples", "samples_per_s")):
        samples = np.where(columns["samples"] > 0, columns["samples"], NAN)
        derived["tokens_per_s"] = columns["tokens"] * columns["samples_per_s"] / samples
    if "reward" in columns and "reward_std" in columns:
        derived["reward - std"] = columns["reward"] - columns["reward_std"]
        derived["reward + std"] = columns["reward"] + columns["reward_std"]
    return derived


def _numbers(values: Values) -> list[float | None]:
    """The values for JSON: no NaN, no infinity, whole numbers without a fraction."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < EXACT else value
        for value in values.tolist()
    ]
