"""``flowrt watch``: serve the page of a run, or of a folder of runs, over HTTP, from a process that only reads.

The status of a run is that of ``flowrt status``, from the controller; without a controller the page shows the files of
the run.
"""

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from flowrt.errors import EXIT_OK, ConfigError, FlowError
from flowrt.launcher.observer import address_of, connected, find_keys, statuses
from flowrt.launcher.terminal import printable
from flowrt.net.curve_keys import WorkerKeys
from flowrt.observability.compared_runs import ComparedRuns
from flowrt.observability.page.access import Access
from flowrt.observability.page.runs_server import RunsServer
from flowrt.observability.page.server import PageServer
from flowrt.observability.run_reader import RunReader, is_run_dir
from flowrt.observability.runs_folder import RunsFolder
from flowrt.runtime.addresses import Endpoint, is_loopback
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.termination import termination_signals
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, LivenessTimeout, pause, wait_any, wait_until

LOOPBACK = "127.0.0.1"
KEPT = ".watch_token"
"""File of the token in the run directory: an open page stays signed in when ``flowrt watch`` is started again."""
CONNECT_S = 5.0
RETRY_S = 1.0
SILENCE_S = 10.0
"""After this time without a status, connect to the controller again."""
ENDED_STATUS_S = 2.0


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The arguments of ``flowrt watch``."""

    run_dir: Path
    """Directory of a run, or a folder that holds runs."""
    host: str
    port: int
    keys: str = ""
    compare: tuple[Path, ...] = ()
    """Directories of other runs, whose curves are drawn too."""
    with_parent: bool = False
    """End when the process that started this one ends."""


def watch(options: WatchOptions, console: Console) -> int:
    """Serve the page until a signal ends it; returns the exit code.

    Raises ConfigError for a directory without a run or runs that cannot be compared, FlowError for a port that is
    taken.
    """
    if options.with_parent:
        die_with_parent()
    return asyncio.run(_watch(options, console))


async def _watch(options: WatchOptions, console: Console) -> int:
    ended = asyncio.Event()
    for number in (*termination_signals(), signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    report = partial(_print, console)
    is_folder = options.run_dir.is_dir() and not is_run_dir(options.run_dir)
    make_server = _runs_server(options, report) if is_folder else _page_server(options, report)
    token = run_token(options.run_dir)
    server, following = make_server(Access(token, _names(options.host)))
    port = await server.start(options.host, options.port)
    _print(console, f"watching {options.run_dir} at {page_url(options.host, port, token)}")
    if not is_loopback(options.host):
        _print(
            console,
            "this page has no TLS: on the way to another host its token and the run's texts can be read; "
            f"prefer --host {LOOPBACK} and ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
        )
    tasks: set[asyncio.Future[Any]] = {
        *(asyncio.create_task(follow()) for follow in following),
        asyncio.create_task(wait_until(ended.wait(), _UNTIL_SIGNAL, "a signal", "the user")),
    }
    done = await wait_any(tasks, _UNTIL_SIGNAL, "a signal", "the user")
    for task in tasks:
        task.cancel()
    await server.close()
    for task in done:
        task.result()  # raises the exception that ended the task
    return EXIT_OK


Served = tuple[PageServer | RunsServer, Sequence[Callable[[], Coroutine[Any, Any, None]]]]
"""A server, and what keeps its pages up to date."""


def _page_server(options: WatchOptions, report: Callable[[str], None]) -> Callable[[Access], Served]:
    """Makes the server of a run. Raises ConfigError for a directory without a run or runs that cannot be compared."""
    reader, compared = RunReader(options.run_dir), ComparedRuns(options.run_dir, options.compare)
    keys = find_keys(options.keys, options.run_dir)

    def make(access: Access) -> Served:
        server = PageServer(reader, access, compared)
        return server, (server.follow, partial(_follow_controller, options.run_dir, keys, server.show, report))

    return make


def _runs_server(options: WatchOptions, report: Callable[[str], None]) -> Callable[[Access], Served]:
    """Makes the server of a folder of runs. Raises ConfigError if it holds none, and for runs to compare with."""
    if options.compare:
        raise ConfigError(f"--compare goes with the directory of one run, and {options.run_dir} is not one")
    folder = RunsFolder(options.run_dir)

    async def follow_run(run_dir: Path, show: Callable[[dict[str, Any] | None], None]) -> None:
        def report_run(text: str) -> None:
            report(f"{run_dir.name}: {text}")

        try:
            keys = find_keys(options.keys, run_dir)
        except ConfigError as error:
            report_run(str(error))
        else:
            await _follow_controller(run_dir, keys, show, report_run)

    def make(access: Access) -> Served:
        server = RunsServer(folder, access, follow_run)
        return server, (server.follow,)

    return make


_UNTIL_SIGNAL = BoundedElsewhere("a signal")


async def _follow_controller(
    run_dir: Path,
    keys: WorkerKeys | None,
    show: Callable[[dict[str, Any] | None], None],
    report: Callable[[str], None],
) -> None:
    """Pass every status of the run's controller to ``show``; after a lost connection, connect again."""
    shown = ""
    while True:
        try:
            async with connected(address_of(run_dir), keys, CONNECT_S, str(run_dir)) as connection:
                shown = ""
                received = statuses(connection)
                while True:
                    status = await wait_until(anext(received), LivenessTimeout(SILENCE_S), "a status", CONTROLLER)
                    show(status)
        except (FlowError, StopAsyncIteration) as error:
            # The page keeps the last status for ENDED_STATUS_S, then shows only the files.
            await pause(RETRY_S if shown else ENDED_STATUS_S)
            if str(error) != shown:
                show(None)
                shown = str(error) or type(error).__name__
                report(f"no status from the controller: {shown}")


def run_token(run_dir: Path) -> str:
    """The token of a run's page: the one in the run directory, created if possible.

    If that file cannot be used, or other users can read it, the token is new and not kept.
    """
    path = run_dir / KEPT
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        token = path.read_text("ascii")
        if status.st_uid == os.getuid() and not status.st_mode & 0o077 and len(token) == 32 and token.isprintable():
            return token
    return secrets.token_urlsafe(24)


def _names(host: str) -> frozenset[str]:
    """Names of this machine that the Host header of a request may have, besides localhost and the host name."""
    if is_loopback(host):
        return frozenset()
    return frozenset({host, socket.getfqdn()})


def _is_every_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return not host


def page_url(host: str, port: int, token: str) -> str:
    """The address of the page that listens on ``host`` and ``port``, with its token."""
    shown = socket.gethostname() if _is_every_address(host) else host
    return f"http://{Endpoint(shown, port)}/?token={token}"


def _print(console: Console, text: str) -> None:
    console.print(printable(text, one_line=True), highlight=False, markup=False, soft_wrap=True)
