"""The process of a user's reward function: ``python -m flowrt.recipes.tasks.reward_server FILE.py:FUNCTION``.

`reward_client` starts it. It forks: the child loads the user's file and answers requests, one JSON object per line on
the socket ``--socket FD``; the parent runs no user code, reports how the child ended, and at the end kills it with
all processes that it has started.

| request | answer |
|---|---|
| none: the file is loaded at once | ``{"ready": true}``, or ``{"failed": what, "line": number}``, or, for a function \
that cannot be called, ``{"refused": what, "line": number}`` |
| ``[response, answer, {column: value}]`` | ``{"reward": number}``, or \
``{"failed": what, "line": number}``, or ``{"refused": …}`` for a parameter that is no column |
| any, and the child has ended | ``{"ended": exit code, "hung": bool, "line": number}`` from the parent |

``line`` is the innermost line of the user's file, 0 if it is unknown.
"""

import argparse
import contextlib
import faulthandler
import functools
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from select import POLLIN, poll
from types import CodeType
from typing import IO, Any, NoReturn

from flowrt.runtime.parent_death import adopt_orphans, die_with_parent
from flowrt.runtime.waits import BoundedElsewhere, blocking

MODULE = "flowrt_own_reward"
CALLED_AS = "reward(response, answer)"
MAX_ERROR = 160
"""Maximum length of a user's error message in a report."""
MAX_STACK_BYTES = 1 << 16
TIMEOUT = "Timeout ("
"""Beginning of a stack that faulthandler wrote because a call exceeded its deadline."""
KILLED = BoundedElsewhere("SIGKILL")
CALLER = BoundedElsewhere("the end of the calling process, which closes the socket")


class _Unusable(Exception):
    """A mistake in the user's function or its result, with the line."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


class _Uncached(importlib.machinery.SourceFileLoader):
    """A loader that writes no ``__pycache__`` next to the user's file."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        pass


def serve(connection: socket.socket, path: Path, function: str, timeout_s: float, stack: IO[bytes]) -> None:
    """Load the function, then answer requests until the other side closes the connection."""
    with connection.makefile("rw", encoding="utf-8") as lines:

        def answer(work: Callable[[], dict[str, Any]]) -> None:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack.fileno())
            try:
                report = work()
            except _Unusable as unusable:
                report = {"failed" if loaded else "refused": str(unusable), "line": unusable.line}
            except BaseException as error:  # noqa: BLE001 (user code: any exception is reported)
                report = {"failed": _described(error), "line": _line_of(error, path)}
            faulthandler.cancel_dump_traceback_later()
            lines.write(json.dumps(report) + "\n")
            lines.flush()

        loaded: list[Callable[..., object]] = []

        def load() -> dict[str, Any]:
            loaded.append(_load(path, function))
            return {"ready": True}

        answer(load)
        for line in lines:
            response, wanted, columns = json.loads(line)
            answer(lambda: {"reward": _number(loaded[0], response, wanted, columns)})  # noqa: B023 (called at once)


def _load(path: Path, function: str) -> Callable[..., object]:
    loader = _Uncached(MODULE, str(path))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(MODULE, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[MODULE] = module  # as for every module: dataclasses and pickle look it up
    loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise _Unusable(f"it has no function {function!r}; name the function as FILE.py:FUNCTION", 0)
    line = _defined_at(found)
    if inspect.iscoroutinefunction(found):
        raise _Unusable(
            f"{function} is an async function; {CALLED_AS} must be a plain one (def) that returns a number", line
        )
    try:
        signature = inspect.signature(found)
        signature.bind("response", "answer", **dict.fromkeys(_by_name(found)[0]))
    except TypeError as error:
        raise _Unusable(f"{function}{signature} cannot be called as {CALLED_AS}: {error}", line) from None
    except ValueError:  # a function written in C without a signature
        pass
    reward: Callable[..., object] = found
    return reward


def _by_name(function: Callable[..., object]) -> tuple[list[str], list[str], bool]:
    """Parameters that are passed by name: those that must be given, those with a default, whether it takes any name.

    The first two positional parameters are the response and the answer, whatever their names are.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function written in C without a signature
        return [], [], False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    further = [one for one in positional[2:] if one.kind is not one.POSITIONAL_ONLY]
    further += [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    required = [one.name for one in further if one.default is one.empty]
    optional = [one.name for one in further if one.default is not one.empty]
    return required, optional, any(one.kind is one.VAR_KEYWORD for one in parameters)


def _further(function: Callable[..., object], columns: dict[str, Any]) -> dict[str, Any]:
    """The columns that the function takes by name."""
    required, optional, takes_any = _by_name(function)
    missing = [name for name in required if name not in columns]
    if missing:
        raise _Unusable(
            f"it takes {missing[0]!r}, and the row has no such column; it has {_cut(', '.join(columns))}",
            _defined_at(function),
        )
    return columns if takes_any else {name: columns[name] for name in [*required, *optional] if name in columns}


def _number(function: Callable[..., object], response: str, answer: object, columns: dict[str, Any]) -> float:
    value = function(response, answer, **_further(function, columns))
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
        raise _Unusable(
            f"it returned {_cut(repr(value))} ({type(value).__name__}), not a number", _defined_at(function)
        )
    number = float(value)
    if not math.isfinite(number):
        raise _Unusable(f"it returned {number}, not a finite number", _defined_at(function))
    return number


def _defined_at(function: object) -> int:
    """The line where a function is defined; 0 if it is unknown (a callable object, a function of a library)."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return code.co_firstlineno if isinstance(code, CodeType) else 0


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
    text = " ".join(text[: 4 * MAX_ERROR].split())
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"


def _line_of(error: BaseException, path: Path) -> int:
    """The innermost line of this file in the error's traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _line_in(stack: str, path: Path) -> int:
    """The innermost line of this file in a stack of faulthandler: of the main thread, or of the one that crashed."""
    main = stack.find(f"hread 0x{threading.get_ident():016x}")
    pattern = re.compile(rf'File "{re.escape(str(path))}", line (\d+)')
    found = pattern.search(stack, max(main, 0)) or pattern.search(stack)
    return int(found[1]) if found else 0


def guard(connection: socket.socket, child: int, path: Path, stack: IO[bytes], wakeup: int) -> NoReturn:
    """Wait until the child or the connection ends, report the child's end, and kill what the child has started."""
    poller = poll()
    poller.register(connection, 0)  # only its end; the child reads the requests
    poller.register(wakeup, POLLIN)
    status: int | None = None
    while status is None:
        if any(
            fd == connection.fileno()
            for fd, _ in blocking(poller.poll, CALLER, "the end of the reward function's process", "it")
        ):
            break
        os.read(wakeup, 1 << 12)
        status = _reaped(child)
    if status is not None:
        stack.seek(0)
        text = stack.read(MAX_STACK_BYTES).decode(errors="replace")
        report = {
            "ended": os.waitstatus_to_exitcode(status),
            "hung": text.startswith(TIMEOUT),
            "line": _line_in(text, path),
        }
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(report).encode() + b"\n")
    _kill_all(child)
    os._exit(0)


def _reaped(child: int) -> int | None:
    """The exit status of the child if it has ended; other ended processes that were adopted are reaped."""
    found: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def _kill_all(child: int) -> None:
    """Kill the process group of the child and, on Linux, all of its descendants (this process adopts orphans)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while mine := list(_children()):
        for pid in mine:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in mine:
            with contextlib.suppress(ChildProcessError):
                blocking(functools.partial(os.waitpid, pid, 0), KILLED, "the end of the killed processes", "the system")


def _children() -> Iterator[int]:
    """The child processes of this one, from /proc."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((directory / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                yield int(directory.name)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="a process that runs a user's reward function")
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the socket for requests")
    parser.add_argument("--timeout-s", type=float, required=True, help="deadline for loading, and for each call")
    parser.add_argument("path", type=Path, help="the user's Python file")
    parser.add_argument("function", help="the name of the function in it")
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.socket)
    os.set_inheritable(arguments.socket, False)  # not for programs that the user's code starts
    stack = tempfile.TemporaryFile()  # noqa: SIM115 (open until the process ends)
    adopt_orphans()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getpid()
    child = os.fork()
    if child:
        guard(connection, child, arguments.path, stack, read)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(read)
    os.close(write)
    os.setpgid(0, 0)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    sys.argv = [str(arguments.path)]
    faulthandler.enable(stack.fileno(), all_threads=False)
    serve(connection, arguments.path, arguments.function, arguments.timeout_s, stack)
    os._exit(0)


if __name__ == "__main__":
    main()
