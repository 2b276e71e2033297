"""Account of resources: what the workers of each role use, as a few numbers whatever the number of workers.

The numbers of a window of time are made of the last report of each worker. Windows are merged into the line of a step.
A figure has the least, the median and the largest value over the workers of a role, and the workers with its worst
values.
"""

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from flowrt.protocol.resources import ResourceUse

WINDOW_S = 5.0
"""Seconds after which the numbers are made again."""
HOLD_S = 15.0
"""Seconds for which a worker counts with its last report."""
MAX_WORST = 3
"""Maximum number of workers that are listed for a figure."""
WORST_IS_LEAST = {
    "tokens_per_s": True,
    "device_use": True,
    "device_allocated": False,
    "cache": False,
    "processors": False,
    "memory": False,
}
"""Figures by which workers are listed: whether the least value is the worst, or the largest."""
Line = dict[str, Any]
"""Numbers of a window: ``from_s``, ``to_s``, ``roles`` and ``worst``; see docs/reference/metrics.md."""


class _Report(NamedTuple):
    role: str
    at_s: float
    devices: int
    figures: Mapping[str, float]


def figures_of(use: ResourceUse) -> dict[str, float]:
    """The figures of one worker; without those that it does not know or have."""
    figures = {"processors": use.processors, "memory": use.memory}
    if use.tokens >= 0 and use.seconds > 0:
        figures["tokens_per_s"] = use.tokens / use.seconds
    if use.cache_size > 0:
        figures["cache"] = use.cache_tokens / use.cache_size
    if use.device_total > 0:
        figures |= {"device_allocated": use.device_allocated, "device_reserved": use.device_reserved}
        figures["device_total"] = use.device_total
    if use.device_use >= 0:
        figures["device_use"] = use.device_use
    return {name: value for name, value in figures.items() if math.isfinite(value) and value >= 0}


class ResourceAccount:
    """Adds up what workers report. Times are seconds on the controller's clock."""

    def __init__(self, start_s: float) -> None:
        """Begin at ``start_s``."""
        self.latest: Line | None = None
        """The numbers of the last window in which a worker has reported."""
        self._reports: dict[str, _Report] = {}
        self._from_s = self._now_s = start_s
        self._pending: Line | None = None  # windows since the last call of `take`, merged

    def add(self, worker: str, role: str, use: ResourceUse) -> None:
        """Add the report of a worker; ignored if it has no role, because it has left."""
        if role:
            self._reports[worker] = _Report(role, self._now_s, max(use.devices, 0), figures_of(use))

    def advance(self, now: float) -> None:
        """End the window if it is long enough."""
        self._now_s = max(now, self._now_s)
        if now - self._from_s >= WINDOW_S:
            self._end_window(now)

    def finish(self, now: float) -> None:
        """End the window, however long it is."""
        if now > self._from_s:
            self._end_window(now)

    def take(self, origin_s: float) -> Line | None:
        """The numbers since the last call, with times from ``origin_s`` on; None if no window has ended."""
        line, self._pending = self._pending, None
        if line is None:
            return None
        return {**line, "from_s": round(line["from_s"] - origin_s, 3), "to_s": round(line["to_s"] - origin_s, 3)}

    def _end_window(self, now: float) -> None:
        self._reports = {worker: report for worker, report in self._reports.items() if now - report.at_s <= HOLD_S}
        if self._reports:
            self.latest = _line(self._reports, self._from_s, now)
            self._pending = self.latest if self._pending is None else merged_use((self._pending, self.latest))
        self._from_s = now


def _line(reports: Mapping[str, _Report], from_s: float, to_s: float) -> Line:
    by_role: dict[str, list[_Report]] = {}
    for report in reports.values():
        by_role.setdefault(report.role, []).append(report)
    roles: dict[str, Line] = {}
    for role, of in sorted(by_role.items()):
        figures: dict[str, list[float]] = {}
        for report in of:
            for name, value in report.figures.items():
                figures.setdefault(name, []).append(value)
        roles[role] = {
            "workers": len(of),
            "devices": sum(report.devices for report in of),
            "figures": {name: [_short(min(v)), _short(median(v)), _short(max(v))] for name, v in figures.items()},
        }
        if "tokens_per_s" in figures:
            roles[role]["tokens_per_s"] = _short(sum(figures["tokens_per_s"]))
    worst = {
        name: _worst(name, ((w, report.figures[name]) for w, report in reports.items() if name in report.figures))
        for name in WORST_IS_LEAST
    }
    return {"from_s": from_s, "to_s": to_s, "roles": roles, "worst": {name: of for name, of in worst.items() if of}}


def _worst(name: str, values: Iterable[tuple[str, float]]) -> list[list[Any]]:
    sign = 1 if WORST_IS_LEAST[name] else -1
    first = sorted(values, key=lambda pair: (sign * pair[1], pair[0]))[:MAX_WORST]
    return [[worker, _short(value)] for worker, value in first]


def merged_use(lines: Iterable[Line]) -> Line:
    """The numbers of consecutive lines as one: least, largest and worst over all of them, medians and rates as means
    over time, counts as the largest."""
    all_lines = list(lines)
    roles: dict[str, Line] = {}
    for role in sorted({role for line in all_lines for role in line["roles"]}):
        of = [(line["to_s"] - line["from_s"], line["roles"][role]) for line in all_lines if role in line["roles"]]
        figures: dict[str, list[tuple[float, list[float]]]] = {}
        for seconds, use in of:
            for name, values in use["figures"].items():
                figures.setdefault(name, []).append((seconds, values))
        roles[role] = {
            "workers": max(use["workers"] for _, use in of),
            "devices": max(use["devices"] for _, use in of),
            "figures": {name: _merged_figure(values) for name, values in figures.items()},
        }
        if rates := [(seconds, use["tokens_per_s"]) for seconds, use in of if "tokens_per_s" in use]:
            roles[role]["tokens_per_s"] = _mean(rates)
    worst: dict[str, list[list[Any]]] = {}
    for name, is_least in WORST_IS_LEAST.items():
        extremes: dict[str, float] = {}
        for worker, value in (pair for line in all_lines for pair in line["worst"].get(name, ())):
            before = extremes.get(worker, value)
            extremes[worker] = min(before, value) if is_least else max(before, value)
        if extremes:
            worst[name] = _worst(name, extremes.items())
    return {"from_s": all_lines[0]["from_s"], "to_s": all_lines[-1]["to_s"], "roles": roles, "worst": worst}


def _merged_figure(values: list[tuple[float, list[float]]]) -> list[float]:
    least, largest = min(of[0] for _, of in values), max(of[2] for _, of in values)
    return [least, _mean([(seconds, of[1]) for seconds, of in values]), largest]


def _mean(values: list[tuple[float, float]]) -> float:
    """The mean over time of values and the seconds for which they hold."""
    total_s = sum(seconds for seconds, _ in values)
    if total_s <= 0:
        return values[-1][1]
    return _short(sum(seconds * value for seconds, value in values) / total_s)


def _short(value: float) -> float:
    """The value with four digits."""
    return float(f"{value:.4g}")
