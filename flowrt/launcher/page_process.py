"""The page of a local run: a process of `flowrt watch`, and run.html at its end. The run depends on neither."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from flowrt.errors import ConfigError, WaitExpired
from flowrt.observability.page.listeners import who_listens
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.parent_death import LAUNCHER, this_launcher
from flowrt.runtime.waits import BoundedElsewhere, cancel_and_wait, wait_until

LOOPBACK = "127.0.0.1"
PAGE_TIMEOUT_S = 120.0
STOP_S = 5.0
CLOSING_GRACE_S = 2.0
"""How long the page is served after the end of the run, so that an open page shows the end."""
_UNTIL_CLOSED = BoundedElsewhere("the end of the run")


def check_page_port(port: int | None) -> None:
    """Raises ConfigError, naming the process that listens there, if the port of the page is taken."""
    if not port:
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"the page of the run cannot have port {port}: {error.strerror}{who_listens(port)}; name another with "
                "--watch PORT"
            ) from error


class WatchProcess:
    """`flowrt watch` as a child process; its address and its end are reported, other output goes to logs/watch.log."""

    def __init__(self, run_dir: Path, port: int | None) -> None:
        """``port``: of the page; None: `start` starts nothing."""
        self._run_dir = run_dir
        self._port = port
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, report: Callable[[str], None]) -> None:
        """Start the process; ``report`` prints a line."""
        if self._port is None:
            return
        words = (RUN_MODULE, "flowrt.cli", "watch", str(self._run_dir), "--port", str(self._port), "--with-parent")
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, LAUNCHER: this_launcher()},
            start_new_session=True,  # Ctrl-C ends the run, which ends this process
        )
        self._reading = asyncio.create_task(self._read(self._child, report))

    async def close(self) -> None:
        """Terminate the process after `CLOSING_GRACE_S`; kill it if it does not end."""
        if self._child is None or self._reading is None:
            return
        if self._child.returncode is None:
            with contextlib.suppress(WaitExpired):
                await wait_until(
                    asyncio.shield(self._reading), CLOSING_GRACE_S, "open pages to see the end", "browsers"
                )
        reading, self._reading = self._reading, None
        await cancel_and_wait({reading}, STOP_S)
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            await wait_until(self._child.wait(), STOP_S, "flowrt watch to end", "flowrt watch")
        except WaitExpired:
            self._child.kill()
        self._child = None

    async def _read(self, child: asyncio.subprocess.Process, report: Callable[[str], None]) -> None:
        """Report the first line of output, which has the address; write the others to logs/watch.log."""
        assert child.stdout is not None
        is_first = True
        with (self._run_dir / "logs" / "watch.log").open("ab", buffering=0) as log:
            while line := await wait_until(child.stdout.readline(), _UNTIL_CLOSED, "a line", "flowrt watch"):
                if is_first:  # it has the token, and the page and run.html show the log
                    report(line.decode(errors="replace").rstrip())
                else:
                    with contextlib.suppress(OSError):  # a full disk
                        log.write(line)
                is_first = False
            code = await wait_until(child.wait(), STOP_S, "flowrt watch to end", "flowrt watch")
        report(f"flowrt watch has ended with exit code {code}; the run goes on: see {self._run_dir / 'logs/watch.log'}")


async def write_page(run_dir: Path) -> str:
    """Write run.html in a separate process; returns a line with its path, or the reason why it was not written."""
    words = (RUN_MODULE, "flowrt.observability.page.single_file", str(run_dir))
    child = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, output = await wait_until(child.communicate(), PAGE_TIMEOUT_S, "run.html", "its process")
    except WaitExpired:
        child.kill()
        return f"run.html was not written within {PAGE_TIMEOUT_S:.0f} s; write it with flowrt export {run_dir} --html"
    if child.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines()
        return f"run.html was not written: {lines[-1] if lines else f'exit code {child.returncode}'}"
    return f"page {run_dir / 'run.html'}"
