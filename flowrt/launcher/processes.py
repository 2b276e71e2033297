"""Processes of a run: each has a log and ends with its launcher."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import ConfigError, WaitExpired
from flowrt.launcher.fork_server.parent import ForkedProcess, ForkServer
from flowrt.runtime.parent_death import LAUNCHER, die_with_parent, this_launcher
from flowrt.runtime.standard_streams import error_message
from flowrt.runtime.waits import BoundedElsewhere, Deadline, cancel_and_wait, wait_all, wait_until

LOG_TAIL_LINES = 3
BLOCK_BYTES = 4096
"""With less free disk space, in bytes, nothing can be written to a log."""
TOGETHER = BoundedElsewhere("the common deadline of all processes")


@dataclass(frozen=True, slots=True)
class Child:
    """A started process and its log."""

    name: str
    process: asyncio.subprocess.Process | ForkedProcess
    log: Path

    def exit_description(self) -> str:
        """The name of the process, and how it ended."""
        code = self.process.returncode
        if code is None:
            return f"{self.name} is running"
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with exit code {code}"
        return f"{self.name} {ending}"

    async def wait_exit(self, deadline: Deadline) -> int:
        """Wait for the end of the process; returns its exit code, negative for a signal. Raises WaitExpired."""
        code: int = await wait_until(self.process.wait(), deadline, f"{self.name} to end", self.name)
        return code

    def log_tail(self) -> str:
        """How the process ended, and the last lines of its log, with a note if the disk is full: the log may be cut."""
        full = "; the disk is full" if shutil.disk_usage(self.log.parent).free < BLOCK_BYTES else ""
        return f"{self.exit_description()}; its log {self.log} ends: {self.log_end() or 'empty'}{full}"

    def log_end(self) -> str:
        """The last lines of the log; empty if there are none."""
        return " | ".join(self._log_lines()[-LOG_TAIL_LINES:])

    def last_error(self) -> str:
        """The last line of the log without time and level; `log_tail` if the log is empty."""
        lines = self._log_lines()
        return error_message(lines[-1]) if lines else self.log_tail()

    def warnings(self) -> list[str]:
        """The messages of the log that are warnings."""
        mark = f" {logging.getLevelName(logging.WARNING)} "
        return [line.partition(mark)[2] for line in self._log_lines() if mark in line]

    def _log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").strip().splitlines()


class Children:
    """All processes of a launcher; none outlives `end`, or the launcher itself."""

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str],
        environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Create without starting a process.

        Args:
            log_dir: an existing directory for the logs.
            environment: variables to add to the environment of every process.
            environments: variables to add to the environment of single processes, by name.
        """
        self._log_dir = log_dir
        self._environments = environments or {}
        self._environment = {**os.environ, **environment, LAUNCHER: this_launcher()}
        self._all: list[Child] = []
        self._fork_server: ForkServer | None = None

    async def start_fork_server(self) -> None:
        """Start a fork server for the workers of this host; on Linux only."""
        if sys.platform == "linux":
            self._fork_server = ForkServer(self._log_dir / "fork_server.log", self._environment)
            await self._fork_server.start()

    async def start(self, name: str, words: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        """Start a command with its output in ``logs/NAME.log``.

        ``pass_fds`` stay open in the process, with the same numbers. Raises ConfigError if there is no such program, or
        the system cannot start another process.
        """
        path = self._log_dir / f"{name}.log"
        environment = {**self._environment, **self._environments.get(name, {})}
        process: asyncio.subprocess.Process | ForkedProcess | None = None
        try:
            with path.open("ab") as log:
                if self._fork_server is not None and self._fork_server.can_fork(words):
                    process = await self._fork_server.fork(words, environment, log.fileno(), pass_fds)
                process = process or await self._execute(words, environment, log.fileno(), pass_fds)
        except OSError as error:
            raise ConfigError(f"{name} cannot be started with {words[0]}: {error.strerror}") from error
        child = Child(name, process, path)
        self._all.append(child)
        return child

    async def _execute(
        self, words: Sequence[str], environment: Mapping[str, str], output: int, pass_fds: Sequence[int]
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            # A session of its own: Ctrl-C reaches only the launcher, which ends the run in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
            pass_fds=tuple(pass_fds),
        )

    def running(self) -> list[Child]:
        """The processes that have not ended."""
        return [child for child in self._all if child.process.returncode is None]

    async def start_ready(self, name: str, words: Sequence[str], deadline_s: float) -> tuple[Child, str]:
        """Start ``WORDS --ready-fd FD``; returns the process and the line it wrote to FD, empty if it ended before.

        Raises WaitExpired if the process neither wrote nor ended within ``deadline_s`` seconds.
        """
        read_fd, write_fd = os.pipe()
        try:
            child = await self.start(name, [*words, "--ready-fd", str(write_fd)], pass_fds=[write_fd])
        finally:
            os.close(write_fd)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        try:
            line = await wait_until(reader.readline(), deadline_s, f"the {name} to listen", f"the {name}")
            return child, line.decode().strip()
        except WaitExpired:
            raise WaitExpired(f"waited {deadline_s:.0f} s for the {name} to listen: {child.log_tail()}") from None
        finally:
            transport.close()

    async def wait_all(self, deadline_s: float) -> bool:
        """Wait for the end of every process; returns False if some have not ended after ``deadline_s`` seconds."""
        ends = [asyncio.ensure_future(child.wait_exit(TOGETHER)) for child in self._all]
        try:
            await wait_all(ends, deadline_s, "all processes to end", "each of them")
        except WaitExpired:
            await cancel_and_wait(ends, 1.0)
            return False
        return True

    async def end(self, grace_s: float) -> None:
        """Wait ``grace_s`` seconds, then terminate, then kill; returns when all have ended, or 5 s after SIGKILL."""
        if await self.wait_all(grace_s):
            return
        self._signal_groups(signal.SIGTERM)
        if await self.wait_all(1.0):
            return
        self._signal_groups(signal.SIGKILL)
        await self.wait_all(5.0)

    async def close(self) -> None:
        """End all processes without grace, and the fork server."""
        await self.end(0.0)
        if self._fork_server is not None:
            await self._fork_server.close()

    def signal_group(self, child: Child, number: signal.Signals) -> None:
        """Signal a process and its descendants; only the process if it has no process group of its own yet."""
        try:
            os.killpg(child.process.pid, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _signal_groups(self, number: signal.Signals) -> None:
        for child in self.running():
            self.signal_group(child, number)
