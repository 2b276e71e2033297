"""Output of commands.

- Text from outside (names, paths, errors) is never read as markup; its control characters are printed as escapes.
- A terminal or pipe may be closed at any time: later output is discarded, and the command continues.
"""

import contextlib
import errno
import io
import os
import re
import sys
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.style import Style
from rich.text import Text

CLOSED = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a write to a closed pipe or terminal."""
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that a terminal interprets or does not show: controls, text directions, zero width, surrogates."""
_TAB_OR_LINE_END = str.maketrans("\t\n", "  ")


def printable(text: str, *, one_line: bool = False) -> str:
    r"""The text with its control characters and undecodable bytes as escapes: ``\x1b``.

    Args:
        text: any text.
        one_line: replace tabs and line ends by spaces.
    """
    return _CONTROL.sub(_escape, text.translate(_TAB_OR_LINE_END) if one_line else text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # an undecodable byte of a file name (PEP 383)
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable_tree(value: Any) -> Any:
    """A copy of a JSON value in which every string, also of keys, is printable and on one line."""
    match value:
        case str():
            return printable(value, one_line=True)
        case dict():
            return {printable_tree(key): printable_tree(item) for key, item in value.items()}
        case list() | tuple():
            return [printable_tree(item) for item in value]
    return value


class PlainConsole(Console):
    """A console that prints text as it is: no markup, no emoji codes, no highlighting, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, *, style: str | Style = "", **options: Any) -> Text:
        return super().render_str(printable(text), style=style, **options)


def console(*, stderr: bool = False) -> Console:
    """The console of a command, on standard output or standard error."""
    return PlainConsole(stderr=stderr)


class _Output(io.RawIOBase):
    """A file descriptor whose reader may close its end: later writes are discarded."""

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
            return os.write(self._fd, data)
        except OSError as error:
            if error.errno not in CLOSED:
                raise
            _discard(self._fd, os.O_WRONLY)  # also of child processes
            return len(data)


def _discard(fd: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable; called once, before anything is printed or opened.

    Closed ones are opened at /dev/null. Output after the reader has closed its end is discarded.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:  # closed: the next file that is opened would get this descriptor
            _discard(fd, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def _stream(fd: int, before: TextIO | None) -> TextIO:
    encoding = "utf-8" if before is None else before.encoding
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    raw = _Output(fd)
    line_buffering = fd == 2 or raw.isatty()
    buffered: Any = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding=encoding, errors="replace", line_buffering=line_buffering)
