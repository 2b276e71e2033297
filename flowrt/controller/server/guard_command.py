"""Command of the user that is run for each guard that fires (guards.command).

It gets the event as JSON on its standard input. It runs in a process of its own, for one event at a time, and is killed
after ten seconds; a failure is reported as an event.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from flowrt.errors import WaitExpired
from flowrt.runtime.waits import wait_until

TIMEOUT_S = 10.0
MAX_WAITING = 16
MAX_OUTPUT_CHARS = 200


class GuardCommand:
    """Runs the command, for one event at a time."""

    def __init__(
        self, command: str, run_dir: Path, on_failure: Callable[[str], None], timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create without running the command.

        Args:
            command: the program and its arguments, split as by a shell; empty: no command is run.
            run_dir: working directory of the command.
            on_failure: called with a sentence when the command cannot be started, fails or takes too long.
            timeout_s: seconds after which the command is killed, with its process group.
        """
        self._command = command
        self._run_dir = run_dir
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._waiting: deque[Mapping[str, object]] = deque()
        self._task: asyncio.Task[None] | None = None

    def send(self, event: Mapping[str, object]) -> None:
        """Run the command for this event, after earlier events; with `MAX_WAITING` events waiting, report a failure."""
        if not self._command:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._on_failure(f"guards.command was not run: {MAX_WAITING} events wait for it already")
            return
        self._waiting.append(event)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_all())

    async def finish(self) -> None:
        """Wait until the command has been run for all events, at most ``timeout_s`` seconds; then cancel the rest."""
        if self._task is not None and not self._task.done():
            with contextlib.suppress(WaitExpired):
                await wait_until(asyncio.shield(self._task), self._timeout_s, "guards.command", self._command)
            self._task.cancel()

    async def _run_all(self) -> None:
        while self._waiting:
            if problem := await self._run(self._waiting.popleft()):
                self._on_failure(f"guards.command {self._command} {problem}")

    async def _run(self, event: Mapping[str, object]) -> str:
        """Run the command for one event; returns why it failed, empty if it did not."""
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._run_dir,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        data = json.dumps({**event, "run_dir": str(self._run_dir)}).encode() + b"\n"
        try:
            outputs = await wait_until(process.communicate(data), self._timeout_s, "guards.command", self._command)
        except WaitExpired:
            return f"did not end within {self._timeout_s:.0f} s and was killed"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return ""
        output = outputs[1].decode(errors="replace").strip()[-MAX_OUTPUT_CHARS:]
        return f"ended with exit code {process.returncode}{f': {output}' if output else ''}"
