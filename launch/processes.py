"""Processes that live no longer than their run."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.launch.nursery import Nursery, Nursling

from flowrt.errors import ConfigError, WaitExpired
from flowrt.lifeline import LAUNCHER, die_with_parent, this_launcher
from flowrt.waiting import Deadline, Guard, all_of, cancelled, until

LAST_WORDS_LINES = 3
TOGETHER = Guard("the deadline for all of them")


@dataclass(frozen=True, slots=True)
class Child:
    """A started process and its log."""

    name: str
    process: asyncio.subprocess.Process | Nursling
    log: Path

    def how(self) -> str:
        """Its name, and how it ended."""
        code = self.process.returncode
        if code is None:
            return f"{self.name} is running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return f"{self.name} {how}"

    async def ended(self, deadline: Deadline) -> int:
        """Its exit code. Raises WaitExpired."""
        code: int = await until(self.process.wait(), deadline, f"{self.name} to leave", self.name)
        return code

    def last_words(self) -> str:
        """How it ended and the end of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS_LINES:]
        return f"{self.how()}; its log {self.log} ends: {' | '.join(lines) or 'empty'}"


class Children:
    """Everything a launcher has started; none of it outlives `end`, or the launcher itself."""

    def __init__(
        self, log_dir: Path, environment: Mapping[str, str], own: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """``own`` is what is added to the environment of some, by their names."""
        self._log_dir = log_dir
        self._own = own or {}
        self._environment = {**os.environ, **environment, LAUNCHER: this_launcher()}
        self._all: list[Child] = []
        self._nursery: Nursery | None = None

    async def begin_nursery(self) -> None:
        """From now on fork what can be forked: workers of this host."""
        if sys.platform == "linux":
            self._nursery = await Nursery.begin(self._log_dir / "nursery.log", self._environment)

    async def start(self, name: str, words: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        """Start a command with its output in ``logs/NAME.log``.

        Raises ConfigError when that cannot be: there is no such program, the system has no room for another process.
        """
        path = self._log_dir / f"{name}.log"
        environment = {**self._environment, **self._own.get(name, {})}
        process: asyncio.subprocess.Process | Nursling | None = None
        try:
            with path.open("ab") as log:
                if self._nursery is not None and self._nursery.suits(words):
                    process = await self._nursery.fork(words, environment, log.fileno(), pass_fds)
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
            # A session of its own: Ctrl-C reaches the launcher alone, which ends the run in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
            pass_fds=tuple(pass_fds),
        )

    def running(self) -> list[Child]:
        return [child for child in self._all if child.process.returncode is None]

    async def start_ready(self, name: str, words: Sequence[str], deadline_s: float) -> tuple[Child, str]:
        """Start ``WORDS --ready-fd FD`` and wait for the line that it writes there; empty when it left without one.

        Raises WaitExpired when neither has happened by the deadline.
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
            line = await until(reader.readline(), deadline_s, f"the {name} to listen", f"the {name}")
            return child, line.decode().strip()
        except WaitExpired:
            raise WaitExpired(f"waited {deadline_s:.0f} s for the {name} to listen: {child.last_words()}") from None
        finally:
            transport.close()

    async def wait_all(self, deadline_s: float) -> bool:
        """Wait for every process to leave; False when some had not by the deadline."""
        ends = [asyncio.ensure_future(child.ended(TOGETHER)) for child in self._all]
        try:
            await all_of(ends, deadline_s, "all processes to leave", "each of them")
        except WaitExpired:
            await cancelled(ends, 1.0)
            return False
        return True

    async def end(self, grace_s: float) -> None:
        """Wait a little, then terminate, then kill; returns when nothing is left."""
        if await self.wait_all(grace_s):
            return
        self._signal_groups(signal.SIGTERM)
        if await self.wait_all(1.0):
            return
        self._signal_groups(signal.SIGKILL)
        await self.wait_all(5.0)

    async def close(self) -> None:
        """`end`, at once, and with the nursery."""
        await self.end(0.0)
        if self._nursery is not None:
            await self._nursery.close()

    def signal_group(self, child: Child, number: signal.Signals) -> None:
        """To it and all that it started; to it alone where it was stopped before it had a group of its own."""
        try:
            os.killpg(child.process.pid, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _signal_groups(self, number: signal.Signals) -> None:
        for child in self.running():
            self.signal_group(child, number)
