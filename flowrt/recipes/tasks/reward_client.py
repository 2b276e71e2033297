"""A user's reward function in a process of its own.

- Any mistake in the function is reported in one sentence with the line of the user's file, within a deadline.
- A call in which the process dies or hangs is repeated once; an exception or a wrong result is not.
- The function and the processes that it starts end with the worker.

`reward_server` has the protocol.
"""

import contextlib
import functools
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from flowrt.errors import ConfigError, FlowError
from flowrt.runtime.waits import blocking

log = logging.getLogger(__name__)
FUNCTION = "reward"
"""The function's name if FILE.py is given without one."""
PROGRESS_AFTER_S = 3.0
"""Time after which a wait is reported as progress."""
GRACE_S = 5.0
"""How long after its deadline a process that does not end itself is given up."""
POLL_S = 1.0
"""Longest single receive: a signal that arrives just before one does not interrupt it, and is handled after it."""
MAX_TEXT = 60
"""Maximum length of a response or an answer in an error message."""
RECV_BYTES = 1 << 16
FIX = "correct it, and start or resume the run"
LOADING = "while the file was loaded"
BLOCKED_ON = "the user's reward function"


class ProcessEnded(Exception):
    """The process died or hung, possibly by chance; the text describes how, and where in the user's file."""


class RewardProcess:
    """The process of one reward function. Calls are made by one thread at a time; the first one starts the process."""

    def __init__(self, name: str, timeout_s: float, output: int | None = None) -> None:
        """Raises ConfigError if there is no such Python file. The process starts with the first call.

        Args:
            name: FILE.py (its function `reward`) or FILE.py:FUNCTION.
            timeout_s: deadline for loading the file, and for each call.
            output: file descriptor for the function's output; None: that of this process.
        """
        file, _, function = name.partition(":")
        self._path = Path(file)
        self._function = function or FUNCTION
        if not self._path.is_file():
            raise ConfigError(f"data.reward is {name!r}, and there is no file {file!r}; give FILE.py:FUNCTION")
        if self._path.suffix != ".py":
            raise ConfigError(f"data.reward is {name!r}, and {file} is not a Python file; its name must end in .py")
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX / 2)
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._received = b""
        self._is_closed = False

    def __call__(self, response: str, answer: object, columns: Mapping[str, object] | None = None) -> float:
        """Score a response; if the process dies or hangs, once more in another process.

        Raises ConfigError for a mistake in the function, or if its process dies or hangs twice.
        """
        try:
            return self.call(response, answer, columns)
        except ProcessEnded as ended:
            if self._is_closed:
                raise FlowError("the reward function's process was closed during a call") from None
            log.warning("%s; the call is repeated once, in another process", ended)
        try:
            return self.call(response, answer, columns)
        except ProcessEnded as ended:
            raise ConfigError(f"{ended}, twice; {FIX}") from None

    def call(self, response: str, answer: object, columns: Mapping[str, object] | None = None) -> float:
        """Score a response.

        Args:
            response: decoded text.
            answer: the reference answer, any JSON value.
            columns: what the function may take by name.

        Raises ConfigError for a mistake in the function, ProcessEnded if its process ends.
        """
        connection = self._connection or self.load()
        with contextlib.suppress(OSError):  # the process has ended: the answer describes how
            connection.settimeout(self._timeout_s + GRACE_S)
            connection.sendall(json.dumps([response, answer, columns or {}]).encode() + b"\n")
        doing = f"on the response {_cut(response)} to the answer {_cut(as_text(answer))}"
        reward: float = self._answer(connection, doing, log.info)["reward"]
        return reward

    def load(self, progress: Callable[[str], None] = log.info) -> socket.socket:
        """Start the process and load the file; ``progress`` receives notes on long waits. Returns the connection.

        Raises ConfigError for a mistake in the file, ProcessEnded if the process ends while it loads.
        """
        ours, theirs = socket.socketpair()
        self._connection = ours
        self._received = b""
        with theirs:
            host = [sys.executable, "-m", "flowrt.recipes.tasks.reward_server", "--socket", str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*host, "--timeout-s", str(self._timeout_s), str(self._path), self._function],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._answer(ours, LOADING, progress)
        return ours

    def close(self) -> None:
        """End the process and all that it has started; a call in another thread ends, too."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        connection = self._connection
        process = self._process
        self._connection = None
        self._process = None
        if connection is None or process is None:
            return
        with contextlib.suppress(OSError):  # closed by the other end
            connection.shutdown(socket.SHUT_RDWR)
        try:
            wait = functools.partial(process.wait, GRACE_S)
            blocking(wait, GRACE_S, "the reward function's process to end what it has started", BLOCKED_ON)
        except subprocess.TimeoutExpired:
            process.kill()
        connection.close()

    def _answer(self, connection: socket.socket, doing: str, progress: Callable[[str], None]) -> dict[str, Any]:
        answer = self._read_answer(connection, doing, progress)
        if "refused" in answer:
            raise ConfigError(f"{self._at(answer['line'])}: {answer['refused']}; {FIX}")
        if "failed" in answer:
            raise ConfigError(f"{self._at(answer['line'])}: {answer['failed']}, {doing}; {FIX}")
        if "ended" in answer:
            self._end()
            what = f"it did not return in {self._timeout_s:g} s" if answer["hung"] else _ended(answer["ended"])
            raise ProcessEnded(f"{self._at(answer['line'])}: {what}, {doing}")
        return answer

    def _read_answer(self, connection: socket.socket, doing: str, progress: Callable[[str], None]) -> dict[str, Any]:
        """The next line of the process."""
        begin_s = monotonic()
        is_announced = False
        while b"\n" not in self._received:
            left_s = begin_s + self._timeout_s + GRACE_S - monotonic()
            if left_s <= 0:
                self._end()
                raise ProcessEnded(f"{self._at(0)}: it did not return in {self._timeout_s:g} s, {doing}")
            if not is_announced and monotonic() - begin_s >= PROGRESS_AFTER_S:
                progress(f"waiting for {self._at(0)}, {doing}: at most {self._timeout_s:g} s (data.reward_timeout_s)")
                is_announced = True
            try:
                connection.settimeout(min(left_s, POLL_S, PROGRESS_AFTER_S))
                data = blocking(functools.partial(connection.recv, RECV_BYTES), left_s, "a reward", BLOCKED_ON)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                self._end()
                raise ProcessEnded(
                    f"{self._at(0)}: it closed the file descriptors of its process, or killed it, {doing}"
                )
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _at(self, line: int) -> str:
        return f"reward function {self._function} ({self._path}{f':{line}' if line else ''})"


def as_text(answer: object) -> str:
    """A reference answer as text: itself, or its JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer)


def check_reward(
    name: str,
    timeout_s: float,
    answer: object,
    progress: Callable[[str], None],
    columns: Mapping[str, object] | None = None,
) -> None:
    """Load the function and call it once, with an answer as the response to itself.

    Raises ConfigError for whatever goes wrong. The function's output is discarded.
    """
    process = RewardProcess(name, timeout_s, subprocess.DEVNULL)
    try:
        process.load(progress)
        process.call(as_text(answer), answer, columns)
    except ProcessEnded as ended:
        raise ConfigError(f"{ended}; {FIX}") from None
    finally:
        process.close()


def _ended(code: int) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"it ended its process with exit code {code}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")
