"""A Python file of the user's: how it is executed as a module, and how its mistakes are told, with their line."""

import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

from flowrt.errors import ConfigError

Result = TypeVar("Result")
MAX_ERROR = 160
"""Maximum number of characters of a user's error message in a report."""
FIX = "correct it"


class Unusable(Exception):
    """A mistake in the user's function or in its result; ``line`` is that of the file, 0 if unknown."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.line = line


class _Uncached(importlib.machinery.SourceFileLoader):
    """A loader that writes no ``__pycache__`` next to the user's file."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        pass


def load_module(path: str, name: str) -> ModuleType:
    """Execute a user's file as the module of this name. Raises any exception that the file raises.

    The file may import modules of its and of the current directory, after those that are installed.
    """
    for folder in (str(Path(path).absolute().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)
    loader = _Uncached(name, path)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=path))
    module.__file__ = path
    sys.modules[name] = module  # dataclasses look up their module there
    loader.exec_module(module)
    return module


def called(what: str, path: str, doing: str, call: Callable[[], Result]) -> Result:
    """The result of a call of the user's code.

    Args:
        what: kind of the file, in messages.
        path: the file.
        doing: the purpose of the call, for the message.
        call: the call.

    Raises ConfigError for every exception of the call, with the line of the file.
    """
    try:
        return call()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        line = line_of(error, path)
        at = f"{path}:{line}" if line else path
        raise ConfigError(f"{what} {at}: {described(error)}, {doing}; {FIX}") from error


def described(error: BaseException) -> str:
    """A user's exception, as the end of a sentence."""
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        return f"it ended the program with exit({cut(repr(error.code))})"
    try:
        text = cut(str(error.msg if isinstance(error, SyntaxError) else error))
    except Exception:  # noqa: BLE001 (a user's exception may fail to describe itself)
        text = ""
    return f"{kind}: {text}" if text else kind


def line_of(error: BaseException, path: str) -> int:
    """The innermost line of this file in the traceback of an error; 0 if unknown."""
    if isinstance(error, Unusable):
        return error.line
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno or 0
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def cut(text: str) -> str:
    """The text on one line, cut at `MAX_ERROR` characters."""
    text = " ".join(text[: 4 * MAX_ERROR].split())
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"


def defined_at(function: object) -> int:
    """The line where a function is defined; 0 if it is unknown (a callable object, a function of a library)."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return code.co_firstlineno if isinstance(code, CodeType) else 0
