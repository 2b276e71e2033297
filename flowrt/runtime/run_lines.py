"""Files of JSON lines in a run directory: metrics.jsonl, evaluations.jsonl, events.jsonl and attribution.jsonl."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrt.runtime.files import atomic_write

NONFINITE = "nonfinite"
"""Field of a line of metrics.jsonl with the names of the metrics that are NaN or infinite in that step."""
MAX_INTEGER_BITS = 64
"""A larger integer in a file of JSON lines is not a measurement, and cannot be converted to float."""
_TAIL_BYTES = 1 << 16


class LineWriter:
    """Writer of one file, each line at once: a line that was added is not lost when the process is killed.

    Nothing is written after the first failure, which may have left a part of a line.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, for its owner alone, and remove the part of a line that a killed process has left.

        Raises OSError if it cannot be opened.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.error: OSError | None = None
        """The first failure."""
        os.ftruncate(self._fd, self._end())

    def add(self, line: Mapping[str, Any]) -> str:
        """Append an object, whose numbers are finite; returns its text, also if it was not written."""
        text = json.dumps(line, allow_nan=False)
        if self.error is None and self._fd >= 0:
            try:
                self._write(text.encode() + b"\n")
            except OSError as error:
                self.error = error
        return text

    def lines(self) -> list[bytes]:
        """The lines of the file. Raises OSError if it cannot be read."""
        return self.path.read_bytes().splitlines()

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines; a failure leaves the file as it was."""
        try:
            atomic_write(self.path, b"".join([line + b"\n" for line in lines]).decode(errors="replace"))
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self.error = self.error or error
            return
        os.close(self._fd)
        self._fd = fd

    def sync(self) -> None:
        """Sync the file to disk, so that a power failure cannot undo its lines. Raises OSError if that fails."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; further lines are not written."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write(self, data: bytes) -> None:
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _end(self) -> int:
        """The end of the last whole line."""
        end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(end - _TAIL_BYTES, 0)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


def read_lines(path: Path, is_whole: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], int]:
    """Read the objects of a file of JSON lines.

    Returns the objects that ``is_whole`` accepts, and the number of all other lines, which are damaged. A last line
    without its end is not damaged: it is being written, or its writer was killed. Raises OSError if the file cannot be
    read.
    """
    lines: list[dict[str, Any]] = []
    damaged = 0
    with path.open("rb") as file:
        for data in file:
            try:
                line = json.loads(data)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and is_whole(line):
                lines.append(line)
            elif data.endswith(b"\n"):
                damaged += 1
    return lines, damaged


def is_step(line: dict[str, Any]) -> bool:
    """Whether this is a line of metrics.jsonl: finite numbers, with those that the summary uses, and `NONFINITE`."""
    counts = ("step", "samples", "tokens", "staleness_max")
    rates = ("wall_s", "samples_per_s", "staleness_mean")
    names = line.get(NONFINITE, [])
    numbers = (value for name, value in line.items() if name != NONFINITE)
    return (
        all(type(line.get(name)) is int for name in counts)
        and all(_is_number(value) for value in (*(line.get(name) for name in rates), *numbers))
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
    )


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= MAX_INTEGER_BITS
    return isinstance(value, float) and math.isfinite(value)
