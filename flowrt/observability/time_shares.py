"""Attribution of a live run: attribution.jsonl, read as it grows, in memory that does not grow with the steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrt.controller.attribution.account import Sums
from flowrt.controller.attribution.causes import KINDS
from flowrt.controller.storage.time_files import is_attribution
from flowrt.observability.attribution import drop_repeated, merged
from flowrt.observability.tails import UNLIMITED, JsonTail

MAX_LINES = 500
"""Maximum number of lines of an answer, and number of the last steps whose lines are kept."""


class TimeShares:
    """The lines of the last steps, sums of the steps before them, and the seconds of the whole run.

    A rollback by more steps than are kept drops whole sums: it may leave out the steps of one sum before it.
    """

    def __init__(self, path: Path) -> None:
        """Set up for this file; nothing is read yet."""
        self._tail = JsonTail(path)
        self.clear()

    def clear(self) -> None:
        """Forget all lines."""
        self.seconds: dict[str, Sums[str]] = {}
        """Seconds by role and kind, also of steps that were rolled back later: they never decrease."""
        self._lines: list[dict[str, Any]] = []
        self._sums: list[dict[str, Any]] = []
        self._steps_per_sum = 1

    @property
    def state(self) -> str:
        """See `JsonTail.state`."""
        return self._tail.state

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The line of the last step; None before there is one."""
        return self._lines[-1] if self._lines else None

    def read_new(self, most_bytes: int = UNLIMITED) -> bool:
        """Read lines that were appended, about ``most_bytes`` of them; returns whether more are left."""
        lines, is_replaced = self._tail.read_new(most_bytes)
        if is_replaced:
            self.clear()
        for line in lines:
            if is_attribution(line):
                self._add(line)
        return self._tail.is_behind

    def lines(self, from_step: int = 0) -> list[dict[str, Any]]:
        """The lines of the steps from this one on; more than `MAX_LINES` are merged into sums of consecutive steps."""
        if not self._sums or from_step > self._sums[-1]["step"]:
            return merged([line for line in self._lines if line["step"] >= from_step], MAX_LINES)
        size = self._steps_per_sum
        recent = [merged(self._lines[at : at + size], 1)[0] for at in range(0, len(self._lines), size)]
        lines = [*(line for line in self._sums if line["step"] >= from_step), *recent]
        while len(lines) > MAX_LINES:
            lines = _pairs(lines)
        return lines

    def _add(self, line: dict[str, Any]) -> None:
        for role, of in line["roles"].items():
            self.seconds.setdefault(role, Sums()).add({kind: of[kind] for kind in KINDS})
        drop_repeated(self._lines, line["step"])
        if not self._lines:
            drop_repeated(self._sums, line["step"])
        self._lines.append(line)
        if len(self._lines) > MAX_LINES + self._steps_per_sum:
            self._sums += merged(self._lines[: self._steps_per_sum], 1)
            del self._lines[: self._steps_per_sum]
        if len(self._sums) >= MAX_LINES:
            self._sums = _pairs(self._sums)
            self._steps_per_sum *= 2


def _pairs(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sum of each pair of consecutive lines, and an odd last line."""
    return [merged(lines[at : at + 2], 1)[0] for at in range(0, len(lines), 2)]
