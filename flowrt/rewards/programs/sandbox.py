"""The process that runs programs and their tests, in bubblewrap or under limits alone: its start, calls and end.

Programs and tests are sent over a socket: an argument has at most 128 KiB, and every process can read it.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic

from flowrt.rewards.programs.descendants import children, end_descendants
from flowrt.rewards.programs.proxies import LENGTH_BYTES, READY
from flowrt.runtime.parent_death import adopt_orphans
from flowrt.runtime.waits import blocking

PLACE = "/flowrt"
"""Directory of this package in bubblewrap."""
START = (
    "import sys; sys.path.append(sys.argv[2]); import programs.process as process; "
    "sys.path.pop(); process.main(int(sys.argv[1]))"
)
END_S = 2.0
"""Seconds that the process may take to end what a program has left; then it is replaced."""
MAX_REASON_BYTES = 1 << 12


class NotStarted(Exception):
    """The process for programs has not started; the text says why."""


class Ended(Exception):
    """The process for programs has ended before its answer, or has not answered by the deadline."""


def words(kind: str, memory_bytes: int) -> list[str]:
    """The command that runs Python in a sandbox; the arguments of Python are to be appended.

    Args:
        kind: bwrap or limits.
        memory_bytes: size of the only file system of bubblewrap that can be written; it is in memory.
    """
    if kind != "bwrap":
        return [sys.executable, "-I"]
    bwrap = shutil.which("bwrap") or "bwrap"
    command = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for place in dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix]):
        command += ["--ro-bind-try", place, place]
    command += ["--ro-bind", str(Path(__file__).parent), f"{PLACE}/programs", "--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(memory_bytes), "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]  # noqa: S108
    command += ["--chdir", "/tmp", "--setenv", "PATH", "/usr/bin:/bin"]  # noqa: S108 (its own)
    return [*command, str(Path(sys.executable).resolve()), "-I"]


class Sandbox:
    """Runs programs, one call after the other, each in forks of one process."""

    def __init__(self, kind: str, memory_bytes: int) -> None:
        """Set up the sandbox; the first call starts its process.

        Args:
            kind: bwrap or limits.
            memory_bytes: memory that a process of a program may take, and its files in bubblewrap.
        """
        self.kind = kind
        self.memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._connection = socket.socket()
        self._end_s = 0.0

    @contextlib.contextmanager
    def call(self, kind: str, program: str, end_s: float) -> Iterator[None]:
        """A call of a program. After it, all that the program has started has ended.

        Args:
            kind: statements or inputs.
            program: the program.
            end_s: when the call must have ended (monotonic, in seconds).

        Raises NotStarted, Ended, and OSError if no process can be started.
        """
        with contextlib.ExitStack() as stack:
            place = ""
            if self.kind != "bwrap":
                place = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            settings = {"kind": kind, "memory_bytes": self.memory_bytes, "place": place}
            spared = {*children(os.getpid())}
            adopt_orphans()
            stack.callback(adopt_orphans, False)
            self._end_s = end_s
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            spared -= {self._process.pid}
            is_complete = False
            try:
                self._open(json.dumps(settings).encode())
                self.send(encoded(program))
                yield
                self._end_s = monotonic() + END_S
                with contextlib.suppress(Ended):
                    self._frame()  # all processes of the call have ended
                    is_complete = True
            finally:
                if not is_complete:
                    self._stop(spared)

    def send(self, data: bytes) -> None:
        """Send a frame. Raises Ended."""
        try:
            self._connection.settimeout(self._left_s())
            sending = partial(self._connection.sendall, len(data).to_bytes(LENGTH_BYTES, "little") + data)
            blocking(sending, self._left_s(), "a program or its tests to be read", "the process of the program")
        except OSError as error:
            raise Ended from error

    def receive(self) -> bytes:
        """Receive a frame of a call. Raises Ended, also if the call has ended without it."""
        if (data := self._frame()) == READY:
            raise Ended
        return data

    def _frame(self) -> bytes:
        return self._receive(int.from_bytes(self._receive(LENGTH_BYTES), "little"))

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                self._connection.settimeout(self._left_s())
                receiving = partial(self._connection.recv, min(length - len(data), 1 << 20))
                part = blocking(receiving, self._left_s(), "the verdict on a program", "the process of the program")
            except OSError as error:
                raise Ended from error
            if not part:
                raise Ended
            data += part
        return bytes(data)

    def _left_s(self) -> float:
        return max(self._end_s - monotonic(), 0.01)

    def _open(self, settings: bytes) -> None:
        """Begin a call. Raises NotStarted."""
        try:
            self.send(settings)
            self._frame()
        except Ended:
            raise NotStarted("no process for the program could be started") from None

    def _start(self) -> None:
        """Start the process. Raises NotStarted."""
        self._connection.close()
        self._connection, of_process = socket.socketpair()
        with of_process, tempfile.TemporaryFile() as output:
            fd = of_process.fileno()
            self._process = subprocess.Popen(
                [
                    *words(self.kind, self.memory_bytes),
                    *("-c", START, str(fd), PLACE if self.kind == "bwrap" else str(Path(__file__).parents[1])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=(fd,),
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )
            of_process.close()
            try:
                self._frame()
            except Ended:
                status = self._process.poll()
                self._stop({*children(os.getpid())} - {self._process.pid})
                output.seek(0)
                lines = output.read(MAX_REASON_BYTES).decode(errors="replace").strip().splitlines()
                what = lines[-1] if lines else f"exit code {status}" if status is not None else "it took too long"
                raise NotStarted(f"no process for programs could be started: {what}") from None

    def _stop(self, spared: set[int]) -> None:
        """End the process, and all others that this one has, except ``spared``."""
        end_descendants(spared)
        if self._process is not None:
            self._process.poll()
        self._process = None


def encoded(text: str) -> bytes:
    """Text as bytes, whatever characters it has."""
    return text.encode(errors="surrogatepass")
