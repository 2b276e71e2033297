"""The process of a user's filter function: ``python -m flowrt.recipes.filter_server FILE.py FUNCTION [NAME ...]``.

`filter_client` starts it and ends it. One JSON object per line on the socket ``--socket FD``:

| request | answer |
|---|---|
| none: the file is loaded at once | ``{"ready": true}`` or ``{"failed": what, "line": number}`` |
| ``[rewards, {name: value}]`` | ``{"kept": bool}``, ``{"wrong": what, "line": number}`` for another result, or \
``{"failed": what, "line": number}`` |

A call that exceeds ``--timeout-s`` writes its stack to the file descriptor ``--stack`` and ends the process.
"""

import argparse
import faulthandler
import importlib.machinery
import importlib.util
import inspect
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from flowrt.runtime.parent_death import die_with_parent

MODULE = "flowrt_own_filter"
MAX_ERROR_CHARS = 160
"""Maximum length of a user's error message in a report."""
Report = dict[str, object]


class _UnusableFilter(Exception):
    """The function cannot be called; ``line`` is where it is defined."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


def load(path: Path, name: str, offered: Sequence[str]) -> Callable[..., object]:
    """Load the function. Raises _UnusableFilter if it takes something else than rewards and the ``offered`` names."""
    loader = importlib.machinery.SourceFileLoader(MODULE, str(path))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(MODULE, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[MODULE] = module  # as for every module: dataclasses and pickle look it up
    sys.dont_write_bytecode = True  # no __pycache__ next to the user's file
    loader.exec_module(module)
    function: Callable[..., object] | None = getattr(module, name, None)
    if not callable(function):
        raise _UnusableFilter(f"it has no function {name!r}; name the function as FILE.py:FUNCTION", 0)
    line = _defined_at(function)
    if inspect.iscoroutinefunction(function):
        raise _UnusableFilter(
            f"{name} is an async function; a filter must be a plain one (def) that returns a bool", line
        )
    try:
        signature = inspect.signature(function)
        signature.bind([], **dict.fromkeys(taken(function, offered)))
    except TypeError as error:
        names = ", ".join(offered)
        raise _UnusableFilter(
            f"{name}{signature} cannot be called as {name}(rewards) with what it takes of {names} by name: {error}",
            line,
        ) from None
    except ValueError:  # a function written in C without a signature
        pass
    return function


def taken(function: Callable[..., object], offered: Sequence[str]) -> list[str]:
    """Those of the ``offered`` names that the function takes besides the rewards."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function written in C without a signature
        return []
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return list(offered)
    named = [one.name for one in parameters[1:] if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [name for name in named if name in offered]


def call(function: Callable[..., object], rewards: list[float], facts: Mapping[str, object]) -> Report:
    """The report of one call."""
    result = function(rewards, **{name: facts[name] for name in taken(function, list(facts))})
    if type(result).__name__ not in ("bool", "bool_"):  # of Python, of NumPy
        what = f"{_cut(repr(result))} ({type(result).__name__}), not True or False"
        return {"wrong": f"it returned {what}", "line": _defined_at(function)}
    return {"kept": bool(result)}


def serve(
    connection: socket.socket, path: Path, name: str, offered: Sequence[str], *, timeout_s: float, stack: int
) -> None:
    """Load the function, then answer requests until the other side closes the connection."""
    functions: list[Callable[..., object]] = []

    def report(work: Callable[[], Report]) -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
        try:
            answer = work()
        except _UnusableFilter as unusable:
            answer = {"failed": str(unusable), "line": unusable.line}
        except BaseException as error:  # noqa: BLE001 (user code: any exception is reported)
            answer = {"failed": _described(error), "line": _line_of(error, path)}
        faulthandler.cancel_dump_traceback_later()
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    with connection.makefile("rw", encoding="utf-8") as lines:

        def first() -> Report:
            functions.append(load(path, name, offered))
            return {"ready": True}

        report(first)
        for line in lines:
            rewards, facts = json.loads(line)
            report(lambda: call(functions[0], rewards, facts))  # noqa: B023 (called at once)


def _defined_at(function: object) -> int:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return int(getattr(code, "co_firstlineno", 0))


def _described(error: BaseException) -> str:
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        return f"it ended the program with exit({_cut(repr(error.code))})"
    try:
        text = _cut(str(error.msg if isinstance(error, SyntaxError) else error))
    except Exception:  # noqa: BLE001 (a user's exception may fail to describe itself)
        text = ""
    return f"{kind}: {text}" if text else kind


def _cut(text: str) -> str:
    text = " ".join(text[: 4 * MAX_ERROR_CHARS].split())
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}…"


def _line_of(error: BaseException, path: Path) -> int:
    """The innermost line of this file in the error's traceback; 0 if there is none."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
    return (lines or [0])[-1] or 0


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="a process that runs a user's filter function")
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the socket for requests")
    parser.add_argument("--stack", type=int, required=True, help="file descriptor of the file for stacks")
    parser.add_argument("--timeout-s", type=float, required=True, help="deadline for loading, and for each call")
    parser.add_argument("path", type=Path, help="the user's Python file")
    parser.add_argument("function", help="the name of the function in it")
    parser.add_argument("offered", nargs="*", help="what it may take by name")
    arguments = parser.parse_args()
    die_with_parent()
    connection = socket.socket(fileno=arguments.socket)
    os.set_inheritable(arguments.socket, False)  # not for programs that the user's code starts
    sys.argv = [str(arguments.path)]
    faulthandler.enable(arguments.stack, all_threads=False)
    serve(
        connection,
        arguments.path,
        arguments.function,
        arguments.offered,
        timeout_s=arguments.timeout_s,
        stack=arguments.stack,
    )
    os._exit(0)


if __name__ == "__main__":
    main()
