"""Exporters of a run as processes: started with the run, restarted when they fail, ended after it.

A failed exporter affects no sample and no step; the failure is a line in the terminal and in events.jsonl.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrt.errors import EXIT_BAD_INPUT, EXIT_OK, ConfigError, WaitExpired
from flowrt.launcher.processes import Child, Children
from flowrt.launcher.supervision import RUN, RestartWindow
from flowrt.observability.exporters.sink import check_exporter, close_timeout_s, log_name, target_of
from flowrt.recipes.config import RunConfig
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import cancel_and_wait, pause, wait_all

MODULE = "flowrt.observability.exporters.process"
MAX_RESTARTS, WINDOW_S = 3, 3600.0
"""Restarts of an exporter within this window."""
BACKOFF_S, BACKOFF_FACTOR = 1.0, 4
MARGIN_S = 5.0
"""Time for an exporter to react to SIGTERM, in addition to the time that it may take to close."""
KILL_S = 5.0


def check_exporters(config: RunConfig) -> None:
    """Raises ConfigError for exporters of a run that cannot be started."""
    for name in config.exporters:
        check_exporter(name)
    names = [log_name(name) for name in config.exporters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"exporters has two that are named {twice[0].removeprefix('exporter-')!r}; leave out one")


class ExporterProcesses:
    """The exporters of one run."""

    def __init__(
        self,
        children: Children,
        run_dir: Path,
        names: Sequence[str],
        report: Callable[[str], None],
        log_event: Callable[[str], None],
    ) -> None:
        """Create without starting.

        Args:
            children: the processes of the launcher.
            run_dir: the run directory.
            names: of the exporters, as in the configuration.
            report: shows a sentence to the user.
            log_event: writes a sentence to events.jsonl; not called after `stop`.
        """
        self._children = children
        self._run_dir = run_dir
        self._names = names
        self._report = report
        self._log_event = log_event
        self._ending = asyncio.Event()
        self._running: dict[str, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all exporters, each with a task that restarts it."""
        self._watchers = [asyncio.create_task(self._watch(name)) for name in self._names]

    def stop(self) -> None:
        """Send SIGTERM to all: an exporter then writes what is left and ends."""
        self._ending.set()
        for child in self._running.values():
            if child.process.returncode is None:
                child.process.send_signal(signal.SIGTERM)

    async def finish(self) -> None:
        """Wait for the end of all exporters, after `stop`; kill those that exceed their time limits."""
        if not self._watchers:
            return
        end_s = max(map(close_timeout_s, self._names)) + MARGIN_S
        try:
            await wait_all(self._watchers, end_s, "the exporters to end", "each of them")
        except WaitExpired:
            for child in self._running.values():
                if child.process.returncode is None:
                    self._report(f"{child.name} did not end within {end_s:.0f} s and is killed; see {child.log}")
                    self._children.signal_group(child, signal.SIGKILL)
            await cancel_and_wait(self._watchers, KILL_S)

    async def _watch(self, name: str) -> None:
        """Start an exporter, and restart it after a failure, at most `MAX_RESTARTS` times within `WINDOW_S`."""
        restarts = RestartWindow(MAX_RESTARTS, WINDOW_S)
        while not self._ending.is_set():
            try:
                child = await self._children.start(log_name(name), self._words(name))
            except ConfigError as error:
                self._note(str(error))
                return
            self._running[name] = child
            if self._ending.is_set():
                child.process.send_signal(signal.SIGTERM)
            code = await child.wait_exit(RUN)
            if code == EXIT_OK:
                return
            delay_s = restarts.take(BACKOFF_S, BACKOFF_FACTOR)
            if code == EXIT_BAD_INPUT or delay_s is None:
                self._note(f"{child.log_tail()}; the run goes on without it")
                return
            if self._ending.is_set():
                self._note(child.log_tail())
                return
            self._note(f"{child.log_tail()}; it is started again")
            await pause(delay_s)

    def _words(self, name: str) -> list[str]:
        target = target_of(name, self._run_dir)
        run = ["--run", str(self._run_dir), "--to", name, "--target", str(target), "--follow"]
        return [sys.executable, RUN_MODULE, MODULE, *run]

    def _note(self, text: str) -> None:
        self._report(text)
        if not self._ending.is_set():
            self._log_event(text)
