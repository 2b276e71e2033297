"""Output of commands: text from outside (names, paths, errors) is never read as markup; controls are escaped."""

import re
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

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


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
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
