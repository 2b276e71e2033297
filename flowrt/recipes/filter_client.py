"""A user's filter function (``algorithm.filter.function``) in a process of its own.

- A mistake that shows when the file is loaded, or in a first call with rewards of 0 and 1, is reported in one sentence
  before a run starts.
- During a run a call that raises, does not return in time, ends its process or returns something else than True or
  False costs its group: `FilterFunction.decide` says so, and the next call finds a working process.

`filter_server` has the protocol.
"""

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import monotonic
from typing import IO

from flowrt.controller.policies.group_filter import KEPT
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.runtime.waits import blocking

log = logging.getLogger(__name__)
FUNCTION = "keep"
"""The function's name if FILE.py is given without one."""
REFUSED, RAISED, HUNG, ENDED, WRONG = 0.0, -1.0, -2.0, -3.0, -4.0
"""Decisions other than `KEPT`; `flowrt.controller.policies.group_filter.REFUSALS` has the reasons."""
PROGRESS_AFTER_S = 3.0
"""Time after which a wait is reported as progress."""
GRACE_S = 5.0
"""How long after its deadline a process that does not end itself is given up."""
POLL_S = 1.0
"""Longest single receive: a signal that arrives just before one does not interrupt it, and is handled after it."""
MAX_STACK_BYTES = 1 << 16
TIMEOUT = b"Timeout ("
"""Beginning of a stack that faulthandler wrote because a call exceeded its deadline."""
RECV_BYTES = 1 << 16
FIX = "correct it"
LOADING = "while the file was loaded"
BLOCKED_ON = "the user's filter function"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a filter function may take by name, besides the rewards."""

    prompt: int
    """The number of the prompt."""
    epoch: int
    """The pass over the prompts, from 0."""
    lengths: list[int]
    """Response tokens of each sample."""
    version: int
    """The oldest policy version that generated a token of the group: the number of steps trained before."""


OFFERED = [one.name for one in fields(GroupFacts)]


class FunctionFailed(Exception):
    """A call failed; ``decision`` is how."""

    def __init__(self, decision: float, what: str) -> None:
        super().__init__(what)
        self.decision = decision


class FilterFunction:
    """The process of one filter function. Calls are made by one thread at a time; the first one starts the process."""

    def __init__(self, name: str, timeout_s: float, output: int | None = None) -> None:
        """Raises ConfigError if there is no such Python file.

        Args:
            name: FILE.py (its function `keep`) or FILE.py:FUNCTION.
            timeout_s: deadline for loading the file, and for each call.
            output: file descriptor for the function's output; None: that of this process.
        """
        file, _, function = name.partition(":")
        self._path = Path(file)
        self._function = function or FUNCTION
        option = f"algorithm.filter.function is {name!r}"
        if not self._path.is_file():
            raise ConfigError(f"{option}, and there is no file {file!r}; give FILE.py:FUNCTION")
        if self._path.suffix != ".py":
            raise ConfigError(f"{option}, and {file} is not a Python file; its name must end in .py")
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX / 2)
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._stack: IO[bytes] | None = None
        self._received = b""
        self._failures = 0

    def decide(self, rewards: list[float], facts: GroupFacts) -> float:
        """The decision on a group: `KEPT`, `REFUSED`, or how the call failed, which is logged."""
        try:
            return KEPT if self.call(rewards, facts) else REFUSED
        except FunctionFailed as failed:
            self._failures += 1
            if not self._failures & (self._failures - 1):  # the first, the second, the fourth, …
                log.warning("%s; the group is filtered (failure %d of the function)", failed, self._failures)
            return failed.decision

    def call(self, rewards: list[float], facts: GroupFacts) -> bool:
        """Whether to keep a group. Raises FunctionFailed."""
        connection = self._connection or self.load()
        with contextlib.suppress(OSError):  # the process has ended: the answer describes how
            connection.settimeout(self._timeout_s + GRACE_S)
            connection.sendall(json.dumps([rewards, asdict(facts)]).encode() + b"\n")
        answer = self._answer(connection, f"on the rewards {_cut(str(rewards))} of prompt {facts.prompt}", log.info)
        if "wrong" in answer:
            raise FunctionFailed(WRONG, f"{self._at(answer)}: {answer['wrong']}")
        return answer["kept"] is True

    def load(self, progress: Callable[[str], None] = log.info) -> socket.socket:
        """Start the process and load the file; ``progress`` receives notes on long waits. Returns the connection.

        Raises FunctionFailed.
        """
        ours, theirs = socket.socketpair()
        self._connection, self._received = ours, b""
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 (open until the process ends)
        numbers = [str(theirs.fileno()), str(self._stack.fileno())]
        with theirs:
            server = [sys.executable, "-m", "flowrt.recipes.filter_server", "--socket", numbers[0], "--stack"]
            self._process = subprocess.Popen(
                [*server, numbers[1], "--timeout-s", str(self._timeout_s), str(self._path), self._function, *OFFERED],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(), self._stack.fileno()),
                start_new_session=True,
            )
        try:
            self._answer(ours, LOADING, progress)
        except FunctionFailed:
            self.close()
            raise
        return ours

    def close(self) -> None:
        """End the process and its process group; a call in another thread ends, too."""
        connection, process, stack = self._connection, self._process, self._stack
        self._connection = self._process = self._stack = None
        if connection is None or process is None or stack is None:
            return
        with contextlib.suppress(OSError):  # closed by the other end
            connection.shutdown(socket.SHUT_RDWR)
        _kill(process)
        connection.close()
        stack.close()

    def _answer(self, connection: socket.socket, doing: str, progress: Callable[[str], None]) -> dict[str, object]:
        line = self._read_line(connection, doing, progress)
        if line is None:
            raise self._ended(doing)
        answer: dict[str, object] = json.loads(line)
        if "failed" in answer:
            raise FunctionFailed(RAISED, f"{self._at(answer)}: {answer['failed']}, {doing}")
        return answer

    def _read_line(self, connection: socket.socket, doing: str, progress: Callable[[str], None]) -> bytes | None:
        """The next line of the process; None if it has ended or is too late."""
        begin_s = monotonic()
        is_announced = False
        while b"\n" not in self._received:
            left_s = begin_s + self._timeout_s + GRACE_S - monotonic()
            if left_s <= 0:
                return None
            if not is_announced and monotonic() - begin_s >= PROGRESS_AFTER_S:
                limit = f"at most {self._timeout_s:g} s (algorithm.filter.function_timeout_s)"
                progress(f"waiting for {self._at({})}, {doing}: {limit}")
                is_announced = True
            try:
                connection.settimeout(min(left_s, POLL_S, PROGRESS_AFTER_S))
                data = blocking(functools.partial(connection.recv, RECV_BYTES), left_s, "a decision", BLOCKED_ON)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ended(self, doing: str) -> FunctionFailed:
        """How the process ended, which is killed if it has not."""
        process, stack = self._process, self._stack
        if process is None or stack is None:
            return FunctionFailed(ENDED, f"{self._at({})}: its process was closed, {doing}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            blocking(functools.partial(process.wait, GRACE_S), GRACE_S, "the process to end", BLOCKED_ON)
        code = process.returncode
        stack.seek(0)
        text = stack.read(MAX_STACK_BYTES)
        at = self._at({"line": _line_in(text.decode(errors="replace"), self._path)})
        self.close()
        if code is None or text.startswith(TIMEOUT):
            return FunctionFailed(HUNG, f"{at}: it did not return in {self._timeout_s:g} s, {doing}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return FunctionFailed(ENDED, f"{at}: its process {how}, {doing}")

    def _at(self, answer: dict[str, object]) -> str:
        line = answer.get("line")
        return f"filter function {self._function} ({self._path}{f':{line}' if line else ''})"


def check_filter_function(config: RunConfig, progress: Callable[[str], None]) -> None:
    """Load the filter function of a run and call it once, with rewards of 0 and 1. Its output is discarded.

    Raises ConfigError for whatever goes wrong, in one sentence.
    """
    options = config.algorithm.filter
    if not options.function:
        return
    function = FilterFunction(options.function, options.function_timeout_s, subprocess.DEVNULL)
    rewards = [float(member % 2) for member in range(config.group_size)]
    try:
        function.load(progress)
        function.call(rewards, GroupFacts(prompt=0, epoch=0, lengths=[1] * len(rewards), version=0))
    except FunctionFailed as failed:
        raise ConfigError(f"{failed}; {FIX}") from None
    finally:
        function.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        blocking(functools.partial(process.wait, GRACE_S), GRACE_S, "the killed process to end", BLOCKED_ON)


def _line_in(stack: str, path: Path) -> int:
    """The innermost line of this file in a stack of faulthandler; 0 if there is none."""
    found = re.search(rf'File "{re.escape(str(path))}", line (\d+)', stack)
    return int(found[1]) if found else 0


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
