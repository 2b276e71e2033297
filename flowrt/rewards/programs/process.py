"""The process that `sandbox` starts for programs: ``main(fd)``.

It forks for each call, and ends what the fork has left. The fork reads the settings of the call (JSON), the program,
and then either

- tests: Python statements. The program runs in a second fork, which has neither the tests nor the socket. The tests use
  its names through `proxies`. The answer is a verdict, with the secret that came with the tests; or
- inputs, each answered with the exit code and the output of a run of the program in a second fork.

Tests for which proxies are no substitute (`needs_same_process`) are sent to the second fork, and run after the program.
"""

import ast
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from .descendants import end_descendants
from .proxies import READY, Names, Peer, ProgramExit, ProxyType, read_frame, write_frame
from .values import ATOMS

MODULE = "program"
"""Name of the module of a program, whose block ``if __name__ == "__main__"`` does not run before tests."""
CHUNK_CHARS = 1 << 18
"""Length from which tests are compiled in several parts, which takes less memory."""
CALLS_PER_REQUEST = 1000
COROUTINE = 0x380
"""Flags of the code of coroutines and their generators."""
POLL_MS = 20
BYTES_OF_TESTS, BYTES_PER_CHAR = 1 << 30, 256
"""Memory that tests may take, and for each character of them, in bytes."""
PROGRAM_FD = 3
PRELOADED = (
    *("bisect", "collections", "copy", "datetime", "decimal", "enum", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "string", "typing", "unittest"),
)
"""Modules of programs and tests that are imported once for all calls."""
MAX_FRAME_BYTES = 1 << 31
EXTRA_FRAMES = 50
"""Depth of recursion that the callers of a program take up."""
REACHING = frozenset(
    ("inspect", "gc", "doctest", "ctypes", "__main__", "__dict__", "vars", "asdict", "astuple", "globals", "pickle")
)
CHANGING = frozenset(
    ("append", "add", "update", "pop", "remove", "extend", "clear", "insert", "setdefault", "sort", "reverse")
)
SAME_PROCESS = re.compile(
    rf"\b({'|'.join(sorted(REACHING))})\b|\.\w+(\[[^\]\n]*\])*\.({'|'.join(sorted(CHANGING))})\("
    r"|\.\w+(\[[^\]\n]*\])+\s*([-+*/|&]?=)[^=]|\bdel\b|patch\.object|^\s*class\s+\w+\s*\(",
    re.MULTILINE,
)
"""Finds tests that may reach into the program further than proxies do; `needs_same_process` looks at them closely."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38


class WrongTests(Exception):
    """The tests cannot be run."""


def main(fd: int) -> NoReturn:
    """Serve the socket."""
    sys.set_int_max_str_digits(0)
    _prctl(_DUMPABLE, 0)  # other processes of the user cannot read the memory and the descriptors of this one
    _prctl(_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for standard in (0, 1, 2):
            os.dup2(nothing.fileno(), standard)
    sys.argv = [f"{MODULE}.py"]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    while True:
        write_frame(fd, READY)
        try:
            settings = json.loads(read_frame(fd, MAX_FRAME_BYTES))
        except EOFError:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            _call(fd, settings)
        os.waitpid(pid, 0)
        end_descendants()
        if not settings["place"]:
            _clear(os.getcwd())


def _call(fd: int, settings: Mapping[str, Any]) -> NoReturn:
    _prctl(_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    write_frame(fd, READY)
    if settings["place"]:
        os.chdir(settings["place"])
    program = read_frame(fd, MAX_FRAME_BYTES).decode(errors="surrogatepass")
    if settings["kind"] == "inputs":
        _serve_inputs(fd, program, settings["memory_bytes"])
    verdict = _tested(fd, program, settings["memory_bytes"])
    write_frame(fd, json.dumps(verdict).encode())
    os._exit(0)


def _clear(directory: str) -> None:
    """Remove what programs have left in a directory; ends this process if that is impossible."""
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            for place, names, _ in os.walk(entry.path):  # before the names are listed
                for name in (".", *names):
                    with contextlib.suppress(OSError):
                        os.chmod(
                            os.path.join(place, name),
                            0o700,
                            follow_symlinks=os.chmod not in os.supports_follow_symlinks,
                        )
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
    if os.listdir(directory):
        os._exit(1)


# ---- statements


def _tested(fd: int, program: str, memory_bytes: int) -> Mapping[str, object]:
    """The verdict on a program: whether it passed, what is wrong with the tests, and their number."""
    to_program, from_tests = os.pipe()
    to_tests, from_program = os.pipe()
    if os.fork() == 0:
        os.close(fd)
        for mine, place in ((to_program, PROGRAM_FD), (from_program, PROGRAM_FD + 1)):
            os.dup2(mine, place)
            os.set_inheritable(place, False)  # by what the program starts
        os.closerange(PROGRAM_FD + 2, 1 << 20)
        _host(program, memory_bytes)
    os.close(to_program)
    os.close(from_program)
    secret = read_frame(fd, MAX_FRAME_BYTES)
    tests = read_frame(fd, MAX_FRAME_BYTES).decode(errors="surrogatepass")
    sys.setrecursionlimit(10_000)
    _limit_memory(BYTES_OF_TESTS + 8 * memory_bytes + BYTES_PER_CHAR * len(tests))
    peer = Peer((to_tests, from_tests), trusts=False, max_bytes=max(memory_bytes, 1 << 24))
    peer.verbs |= {
        "input": lambda text: input(text),
        "read": lambda size: sys.stdin.read(size),
        "readline": lambda size: sys.stdin.readline(size),
    }
    sys.stdin = io.StringIO()
    passed, wrong = False, ""
    try:
        shared = peer.request("ready")
        if needs_same_process(tests):
            list(compiled(tests))
            passed = peer.request("test", tests, secret) == secret
        else:
            passed = _pass(tests, peer, shared)
    except WrongTests as error:
        wrong = str(error)
    except BaseException:  # noqa: BLE001, S110 (of the program or the tests: they have not passed)
        pass
    return {"passed": passed and not peer.is_lost, "wrong": wrong, "secret": secret.decode()}


def _pass(tests: str, peer: Peer, shared: tuple[str, ...]) -> bool:
    """Whether tests pass. Raises WrongTests if they cannot be compiled, and any exception that they raise.

    ``shared``: names that are both built in and of the program.
    """
    module = types.ModuleType("__main__")
    names = Names(peer)
    module.__dict__["__builtins__"] = names
    if shared and not _has_free_names(tests):
        names.update({name: peer.request("name", name)[0] for name in shared})
    sys.modules["__main__"] = module
    runs = _recorded_runs()
    try:
        for part in compiled(tests):
            if not isinstance(part, Calls):
                exec(part, module.__dict__)  # noqa: S102
            elif not _pass_calls(part, peer, module.__dict__):
                exec(compile(part.source, "<tests>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        return _pass_uncalled(tests, module.__dict__, runs)
    except ProgramExit:
        return False
    except SystemExit as end:  # of unittest.main, for example
        return not end.code and all(run.wasSuccessful() for run in runs)


def _recorded_runs() -> list[unittest.TestResult]:
    """The results of all runs of unittest from now on."""
    runs: list[unittest.TestResult] = []
    run = unittest.TextTestRunner.run

    def recorded(self: Any, test: Any) -> Any:
        runs.append(run(self, test))
        return runs[-1]

    unittest.TextTestRunner.run = recorded  # type: ignore[method-assign]
    return runs


def _pass_uncalled(tests: str, names: dict[str, Any], runs: list[unittest.TestResult]) -> bool:
    """Whether unittest has succeeded, and what the tests define and do not run passes: as pytest would run it."""
    cases = [value for value in names.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    cases = [case for case in cases if case.__module__ == "__main__"]
    if cases and not runs:
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        unittest.TextTestRunner().run(unittest.TestSuite(map(load, cases)))
    for name, test in list(names.items()):
        if name.startswith("test") and isinstance(test, types.FunctionType) and test.__module__ == "__main__":
            code = test.__code__
            takes = code.co_argcount + code.co_kwonlyargcount
            if not takes and not code.co_flags & COROUTINE and len(re.findall(rf"\b{name}\b", tests)) == 1:
                test()
    return all(run.wasSuccessful() for run in runs)


class Calls(NamedTuple):
    """Statements ``assert name(arguments) == expected`` with literals alone."""

    name: str
    arguments: list[tuple[Any, ...]]
    expected: list[Any]
    source: str


def _pass_calls(calls: Calls, peer: Peer, names: Mapping[str, Any]) -> bool:
    """Make many calls in a request; returns False if they must be made one by one, before any has been made.

    Raises AssertionError if a result is wrong, and the error of a call.
    """
    try:
        function = names[calls.name] if calls.name in names else names["__builtins__"][calls.name]
    except KeyError:
        return False
    if not isinstance(type(function), ProxyType):
        return False
    done = 0
    while done < len(calls.expected):
        arguments = calls.arguments[done : done + CALLS_PER_REQUEST]
        results, error = peer.request("call all", function, arguments)
        for result, expected in zip(results, calls.expected[done:], strict=False):
            assert result == expected
        done += len(results)
        if error is not None:
            raise ProgramExit from error
        if len(results) < len(arguments):  # the results are lists, for example, which later calls may change
            for given, expected in zip(calls.arguments[done:], calls.expected[done:], strict=True):
                assert function(*given) == expected
            return True
    return True


def call_all(
    function: Callable[..., object], calls: list[tuple[Any, ...]]
) -> tuple[list[object], BaseException | None]:
    """The results of calls, up to one that raises an error or returns no plain value."""
    results: list[object] = []
    for call in calls:
        try:
            results.append(function(*call))
        except BaseException as error:  # noqa: BLE001 (of the program)
            return results, error
        if type(results[-1]) not in ATOMS:
            break
    return results, None


def _calls(part: str) -> Calls | None:
    """The calls of a part of tests that has nothing else."""
    calls = _CALL.findall(part)
    if not calls or len(calls) != part.count("\n") or len({name for name, _, _ in calls}) > 1 or _WORD.search(part):
        return None
    try:
        arguments = _literal("[" + "".join(f"({given},)," if given.strip() else "()," for _, given, _ in calls) + "]")
        expected = _literal("[" + ",".join(value for _, _, value in calls) + "]")
    except (SyntaxError, ValueError, ArithmeticError, TypeError):
        return None
    return Calls(calls[0][0], arguments, expected, part) if len(arguments) == len(expected) == len(calls) else None


def _literal(text: str) -> list[Any]:
    code = compile(text, "<tests>", "eval", dont_inherit=True)
    if code.co_names or any(isinstance(const, types.CodeType) for const in code.co_consts):
        raise ValueError(text)
    value: list[Any] = eval(code, {"__builtins__": {}})  # noqa: S307 (literals)
    return value


_CALL = re.compile(r"^assert ([A-Za-z_]\w*)\(([^()\n=<>!#;\\]*)\) == ([^()\n=<>!#;\\]*)\n", re.MULTILINE)
_WORD = re.compile(r"\b(and|or|not|in|is|if|else|for|lambda|await|yield)\b")


def compiled(tests: str) -> Iterator[types.CodeType | Calls]:
    """The code of tests, in parts, each of which ends at the end of a statement. Raises WrongTests."""
    flags, begin, end = 0, 0, 0
    while begin < len(tests):
        end = _statement_end(tests, max(end, begin + CHUNK_CHARS))
        if end - begin >= CHUNK_CHARS and (calls := _calls(tests[begin:end])):
            begin = end
            yield calls
            continue
        try:
            code = compile(tests[begin:end], "<tests>", "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            if end == len(tests):
                line = (getattr(error, "lineno", None) or 1) + tests.count("\n", 0, begin)
                raise WrongTests(f"the tests are no Python in line {line}: {error}") from None
            end += max(end - begin, CHUNK_CHARS)  # within a statement
            continue
        flags |= code.co_flags & ~0xFFFF  # of __future__
        begin = end
        yield code


def _statement_end(tests: str, at: int) -> int:
    """The first position from here at which a statement may begin in the first column."""
    match = _STATEMENT.search(tests, at)
    return match.start() if match else len(tests)


_STATEMENT = re.compile(r"^(?!else\b|elif\b|except\b|finally\b)[A-Za-z_@]", re.MULTILINE)


def needs_same_process(tests: str) -> bool:
    """Whether tests use objects of the program in ways for which proxies are no substitute."""
    if not SAME_PROCESS.search(tests):
        return False
    with contextlib.suppress(SyntaxError, MemoryError, RecursionError):
        tree = ast.parse(tests)
        bound = {*vars(builtins), *_bound(tree)}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        modules = {"self", *(name for statement in imports for name in _bound(statement))}
        return any(_reaches(node, bound, modules) for node in ast.walk(tree))
    return False


def _reaches(node: ast.AST, bound: set[str], modules: set[str]) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in REACHING:
            return True
        case ast.Constant(value=str(text)) if text.startswith("__main__."):
            return True
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id not in bound for base in bases)
        case ast.Call(func=ast.Attribute(value=place, attr=name)) if name in CHANGING:
            return _is_attribute(place, modules)
        case ast.Subscript(value=place, ctx=ast.Store() | ast.Del()):
            return _is_attribute(place, modules)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="patch") | ast.Attribute(attr="patch"), attr="object")):
            return True
    return False


def _is_attribute(place: ast.expr, modules: set[str]) -> bool:
    """Whether this is an attribute, or an item of one, of something else than ``modules``."""
    while isinstance(place, ast.Subscript):
        place = place.value
    return isinstance(place, ast.Attribute) and not (isinstance(place.value, ast.Name) and place.value.id in modules)


def _bound(tree: ast.AST) -> Iterator[str]:
    """Names that tests define themselves."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                yield name


def _has_free_names(tests: str) -> bool:
    """Whether tests use a name that is neither their own nor built in: then built-in names are not the program's."""
    tree = ast.parse(tests)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return bool(used - {*vars(builtins), *_bound(tree)})


# ---- the process of a program that is tested by statements


def _host(program: str, memory_bytes: int) -> NoReturn:
    """Run a program, and answer the requests of its tests."""
    _confine(memory_bytes)
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace", write_through=True)
    module = types.ModuleType(MODULE)
    names = module.__dict__
    before = dict(vars(builtins))
    peer = Peer((PROGRAM_FD, PROGRAM_FD + 1), trusts=True, max_bytes=MAX_FRAME_BYTES)
    failed = [True]

    def ready() -> tuple[str, ...]:
        if failed[0]:
            os._exit(1)
        return tuple(identifier for identifier in names if identifier in before and not identifier.startswith("__"))

    def name(text: str) -> object:
        return (names[text],) if text in names else ()

    def output() -> str:
        stream: Any = printed.buffer
        if not stream.tell():
            return ""
        text: str = stream.getvalue().decode(errors="replace")
        stream.seek(0)
        stream.truncate()
        return text

    def test(tests: str, secret: bytes) -> bytes:
        return secret if _pass_here(tests, names, before) else b""

    def read_line(text: object = "") -> object:
        return peer.request("input", str(text))

    peer.verbs |= {"ready": ready, "name": name, "test": test, "call all": call_all}
    sys.modules[MODULE] = module
    sys.stdout = printed
    sys.stdin = _Input(peer)
    builtins.input = read_line  # type: ignore[assignment]
    try:
        exec(compile(program, f"<{MODULE}>", "exec", dont_inherit=True), names)  # noqa: S102
        failed[0] = False
    except SystemExit as end:
        failed[0] = bool(end.code)
    except BaseException:  # noqa: BLE001, S110 (of the program)
        pass
    output()
    peer.output = output
    peer.serve()
    os._exit(1)


class _Input(io.TextIOBase):
    """The standard input of a program, which is that of its tests."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def read(self, size: int | None = -1) -> str:
        return str(self._peer.request("read", size))

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return str(self._peer.request("readline", size))

    def readable(self) -> bool:
        return True


def _pass_here(tests: str, names: dict[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether tests pass that run after the program, in its process."""
    vars(builtins).update(before)
    names |= {"__name__": "__main__"}
    sys.modules["__main__"] = sys.modules.get(MODULE) or types.ModuleType("__main__")
    runs = _recorded_runs()
    try:
        exec(compile(tests, "<tests>", "exec", dont_inherit=True), names)  # noqa: S102
        return _pass_uncalled(tests, names, runs)
    except SystemExit as end:
        trace, files = end.__traceback__, set()
        while trace is not None:
            files.add(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        return not end.code and f"<{MODULE}>" not in files and all(run.wasSuccessful() for run in runs)


# ---- inputs


def _serve_inputs(fd: int, program: str, memory_bytes: int) -> NoReturn:
    try:
        code = compile(program, f"<{MODULE}>", "exec", dont_inherit=True)
    except Exception:  # noqa: BLE001 (no program)
        code = compile("raise SyntaxError", f"<{MODULE}>", "exec")
    while True:
        max_output = int(read_frame(fd, MAX_FRAME_BYTES))
        if not max_output:
            os._exit(0)
        given = read_frame(fd, MAX_FRAME_BYTES)
        place = os.memfd_create("input") if hasattr(os, "memfd_create") else os.open(".", os.O_TMPFILE | os.O_RDWR)
        with open(place, "wb", closefd=False) as file:
            file.write(given)
        os.lseek(place, 0, os.SEEK_SET)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(place, 0)
            os.dup2(write, 1)
            os.closerange(3, 1 << 20)
            _confine(memory_bytes)
            _run_script(code)
        os.close(write)
        os.close(place)
        output, is_complete = _output_of(pid, read, max_output)
        os.close(read)
        exit_code = -1 if not is_complete else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        end_descendants()
        write_frame(fd, json.dumps(exit_code).encode())
        write_frame(fd, output)


def _run_script(code: types.CodeType) -> NoReturn:
    """Run a program, and end this process as Python does, without the cost of unloading all modules."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exit_code = 0
    try:
        try:
            exec(code, module.__dict__)  # noqa: S102
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        module.__dict__.clear()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 (of the program)
        exit_code = 1
    os._exit(exit_code & 255)


def _output_of(pid: int, pipe: int, max_bytes: int) -> tuple[bytes, bool]:
    """What a process writes until it ends, and whether it has ended before it wrote more than ``max_bytes``."""
    os.set_blocking(pipe, False)
    output, is_open = bytearray(), True
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    while True:
        has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        while is_open:
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:
                break
            output += data
            is_open = bool(data)
            if len(output) > max_bytes:
                return b"", False
        if has_ended:
            return bytes(output), True
        if is_open:
            poller.poll(POLL_MS)
        else:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# ---- limits


def _confine(memory_bytes: int) -> None:
    """Give up what a program must not have: memory, capabilities, the group of its caller."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _prctl(_SUBREAPER, 0)
    _prctl(_NO_NEW_PRIVS, 1)
    if _LIBC is not None and hasattr(_LIBC, "capset"):
        _LIBC.capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))
    _prctl(_DUMPABLE, 1)
    _limit_memory(memory_bytes)
    sys.setrecursionlimit(sys.getrecursionlimit() + EXTRA_FRAMES)


def _limit_memory(more_bytes: int) -> None:
    """Limit the address space of this process to ``more_bytes`` above what it has."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _prctl(option: int, value: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(option, value, 0, 0, 0)
