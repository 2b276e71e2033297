"""Standard streams that never fail: output that cannot be written is dropped, and the process goes on.

- A terminal or pipe may be closed at any time: later output is discarded. One that is full is waited for, also if it
  is non-blocking.
- Log lines of the processes of a run go to the standard error, which the launcher redirects to a file.
- The disk of a log may be full: output is dropped while it is, the other stream says so once, and when there is space
  again a line in the log says how much is missing.
"""

import contextlib
import errno
import io
import logging
import os
import select
import sys
from typing import Any, Literal, TextIO

CLOSED = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a write to a closed pipe or terminal, or to a broken disk."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to a full disk, or beyond a quota."""
NAMES = {1: "standard output", 2: "standard error"}
FORMAT = "%(asctime)s %(levelname)s %(message)s"
"""Of log lines."""


class _Output(io.RawIOBase):
    """A file descriptor to which writing never fails."""

    lost_bytes = 0
    """Output that was dropped since the last write that succeeded."""
    has_lost = False
    """Whether any output was dropped because of a full disk."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> Literal[True]:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any, /) -> int:
        try:
            if self.lost_bytes:
                self._write(f"\nflowrt: {self.lost_bytes} bytes are missing here: the disk was full\n".encode())
                self.lost_bytes = 0
            return self._write(data)
        except OSError as error:
            if error.errno in FULL:
                self._drop(len(data), error)
            elif error.errno in CLOSED:
                _discard(self._fd, os.O_WRONLY)  # also of child processes
            else:
                raise
            return len(data)

    def _write(self, data: Any) -> int:
        """Write as to a blocking descriptor: another process may have made that of a pipe or terminal non-blocking."""
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.write(self._fd, data)
            select.select([], [self._fd], [])

    def _drop(self, size: int, error: OSError) -> None:
        if not self.has_lost:
            text = f"flowrt: {NAMES.get(self._fd, 'output')} cannot be written and is dropped: {error.strerror}\n"
            with contextlib.suppress(OSError):
                os.write(3 - self._fd, text.encode())
        self.has_lost = True
        self.lost_bytes += size


def has_lost_output() -> bool:
    """Whether a full disk has taken some of this process's standard output, since `prepare_streams`."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Output) and raw.has_lost


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable; called once, before anything is printed or opened.

    Closed ones are opened at /dev/null. Output that cannot be written is dropped.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:  # closed: the next file that is opened would get this descriptor
            _discard(fd, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def _discard(fd: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)


def _stream(fd: int, before: TextIO | None) -> TextIO:
    encoding = "utf-8" if before is None else before.encoding
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    raw = _Output(fd)
    line_buffering = fd == 2 or raw.isatty()
    buffered: Any = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding=encoding, errors="replace", line_buffering=line_buffering)


def log_to_stderr() -> None:
    """Log everything from INFO on to stderr, which the launcher redirects to the log of the process.

    Called once, before anything is printed.
    """
    prepare_streams()
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr)


def error_message(line: str) -> str:
    """The message of a line that was logged as an error; any other line is returned unchanged."""
    return line.rpartition(f" {logging.getLevelName(logging.ERROR)} ")[2]
