"""HTTP server of a folder of runs: a page that lists them, and below ``/run/NAME/`` the page of each.

The page of a run is opened by the first request for it, and closed when it was not used for a while, so that memory
follows what is looked at. No part of a request is used as a file name: the name of a run is one that a scan has found.
"""

import asyncio
import dataclasses
import time
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import web

from flowrt.errors import FlowError
from flowrt.observability.json_text import to_json
from flowrt.observability.page.access import Access, Handler
from flowrt.observability.page.server import (
    READ_TIMEOUT_S,
    STATIC,
    PageServer,
    compressed,
    listen,
    send_file,
)
from flowrt.observability.page.stream import Status
from flowrt.observability.run_reader import RunReader
from flowrt.observability.runs_folder import RunLine, RunsFolder
from flowrt.runtime.waits import cancel_and_wait, locked, pause, wait_until

FILES = {
    "/": ("runs.html", "text/html"),
    "/elements.js": STATIC["/elements.js"],
    "/runs.js": ("runs.js", "text/javascript"),
    "/page.css": STATIC["/page.css"],
}
RUN = "/run/{run:[^/]+}"
MAX_LISTED = 1000
"""Maximum number of runs in the list, the newest; the others are counted."""
MIN_SCAN_S = 2.0
SCAN_SHARE = 0.05
"""Maximum share of time in which the folder is scanned; scans of a slow file system come less often."""
MAX_OPEN = 32
"""Maximum number of runs whose pages are open; each has its files' numbers in memory."""
UNUSED_S = 120.0
"""Time after which a run's page without a stream is closed."""
CLOSE_S = 5.0
FollowRun = Callable[[Path, Callable[[Status | None], None]], Coroutine[Any, Any, None]]
"""Passes each status of a run's controller on, until it is cancelled."""


class _OpenRun:
    """The page of one run, kept up to date."""

    def __init__(
        self, page: PageServer, tasks: set[asyncio.Future[Any]], run_dir: Path, inode: tuple[int, int] | None
    ) -> None:
        self.page = page
        self._run_dir = run_dir
        self._inode = inode
        self.handlers = page.handlers()
        self.used_s = monotonic()
        self._tasks = tasks

    def touch(self) -> None:
        """Note that the page is used."""
        self.used_s = monotonic()

    @property
    def is_in_use(self) -> bool:
        """Whether the page is kept: used in the last `UNUSED_S` seconds, with its files and status still followed."""
        has_failed = any(task.done() and not task.cancelled() and task.exception() for task in self._tasks)
        return not has_failed and (self.page.streams() > 0 or monotonic() - self.used_s < UNUSED_S)

    async def is_there(self) -> bool:
        """Whether the directory of the run is the one that was opened: it was neither deleted nor replaced."""
        inode = asyncio.to_thread(_inode, self._run_dir)
        return self._inode == await wait_until(inode, READ_TIMEOUT_S, f"the directory {self._run_dir}", "the disk")

    async def close(self) -> None:
        """Follow the run no more, and close the page."""
        await cancel_and_wait(self._tasks, CLOSE_S)
        await self.page.close()


class RunsServer:
    """Serves the page of a folder of runs, and the pages of these runs."""

    def __init__(self, folder: RunsFolder, access: Access, follow_run: FollowRun) -> None:
        """Serve what ``folder`` reads.

        Args:
            folder: from now on used by this server alone.
            access: decides which requests are answered.
            follow_run: passes on the status of a run while its page is open.
        """
        self._folder = folder
        self._access = access
        self._follow_run = follow_run
        self._scanning = ThreadPoolExecutor(1, "runs")
        self._answer: dict[str, Any] = {}
        self._scan_s = float("-inf")  # when the next scan may begin
        self._lock = asyncio.Lock()
        self._open: dict[str, asyncio.Task[_OpenRun]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on an address; returns the port. Raises FlowError as `listen`."""
        handlers: dict[str, Handler] = {path: partial(send_file, *file) for path, file in FILES.items()}
        handlers |= {"/api/runs": self._list, RUN: self._redirect}
        handlers |= {f"{RUN}{path}": partial(self._of_run, path) for path in PageServer.PATHS}
        self._runner, bound_port = await listen(handlers, self._access, host, port)
        return bound_port

    async def follow(self) -> None:
        """Close pages that are not used any more, until cancelled."""
        while True:
            await pause(UNUSED_S / 10)
            for name, task in list(self._open.items()):
                if _has_failed(task) or (task.done() and not task.result().is_in_use):
                    await self._close_run(name, task)

    async def close(self) -> None:
        """Close all pages, and stop listening."""
        for name, task in list(self._open.items()):
            await self._close_run(name, task)
        if self._runner is not None:
            await self._runner.cleanup()
        self._scanning.shutdown(wait=False, cancel_futures=True)

    # ---- the list

    async def _list(self, request: web.Request) -> web.StreamResponse:
        """The newest runs; only ``version`` if the list is the one whose version the request names."""
        await self._scan()
        is_known = request.query.get("known") == self._answer["version"]
        answer = {"version": self._answer["version"]} if is_known else self._answer
        text = to_json({**answer, "now_unix_s": time.time()})
        return compressed(web.Response(text=text, content_type="application/json"), len(text))

    async def _scan(self) -> None:
        """Scan the folder, unless that was done a moment ago."""
        async with locked(self._lock, READ_TIMEOUT_S, "another scan of the runs", "the disk"):
            begin_s = monotonic()
            if begin_s < self._scan_s:
                return
            work = asyncio.get_running_loop().run_in_executor(self._scanning, self._folder.scan)
            self._answer = _answer(self._folder.folder, await wait_until(work, READ_TIMEOUT_S, "the runs", "the disk"))
            end_s = monotonic()
            self._scan_s = end_s + max(MIN_SCAN_S, (end_s - begin_s) / SCAN_SHARE)

    # ---- the pages of runs

    @staticmethod
    async def _redirect(request: web.Request) -> web.StreamResponse:
        """To the page of a run: its addresses are relative to a path that ends with a slash."""
        return web.Response(status=308, headers={"Location": f"{request.rel_url.raw_path}/"})

    async def _of_run(self, path: str, request: web.Request) -> web.StreamResponse:
        """The answer of the page of a run to a path below it."""
        opened = await self._opened(request.match_info["run"])
        opened.touch()
        return await opened.handlers[path](request)

    async def _opened(self, name: str) -> _OpenRun:
        """The page of a run; opens it if necessary. Raises FlowError if there is no such run, or too many are open."""
        task = self._open.get(name)
        if task is not None and task.done() and not _has_failed(task) and not await task.result().is_there():
            await self._close_run(name, task)
            task = self._open.get(name)
        if task is None or _has_failed(task):
            if self._folder.run_dir(name) is None:
                await self._scan()
            run_dir = self._folder.run_dir(name)
            if run_dir is None or not run_dir.is_dir():
                raise FlowError(f"there is no run {name!r:.200} in {self._folder.folder}")
            await self._make_room()
            task = self._open.get(name)
            if task is None or _has_failed(task):
                task = self._open[name] = asyncio.create_task(self._open_run(run_dir))
        return await wait_until(asyncio.shield(task), READ_TIMEOUT_S, f"the files of {name}", "the disk")

    async def _open_run(self, run_dir: Path) -> _OpenRun:
        inode = await asyncio.to_thread(_inode, run_dir)
        reader = await asyncio.to_thread(RunReader, run_dir)
        page = PageServer(reader, self._access)
        following = (page.follow(), self._follow_run(run_dir, page.show))
        return _OpenRun(page, {asyncio.ensure_future(coroutine) for coroutine in following}, run_dir, inode)

    async def _make_room(self) -> None:
        """Close the page that was not used for longest, if as many as allowed are open. Raises FlowError if all are."""
        if len(self._open) < MAX_OPEN:
            return
        ready = {name: task.result() for name, task in self._open.items() if task.done() and not _has_failed(task)}
        idle = {name: opened.used_s for name, opened in ready.items() if not opened.page.streams()}
        if not idle:
            raise FlowError(f"the pages of {MAX_OPEN} runs are open; close one")
        unused = min(idle, key=lambda name: idle[name])
        await self._close_run(unused, self._open[unused])

    async def _close_run(self, name: str, task: asyncio.Task[_OpenRun]) -> None:
        if self._open.get(name) is not task:
            return  # closed meanwhile
        del self._open[name]
        if not task.done():
            task.cancel()
        elif not _has_failed(task):
            await task.result().close()


def _inode(directory: Path) -> tuple[int, int] | None:
    """Device and inode of a directory; None if there is none."""
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_failed(task: asyncio.Task[_OpenRun]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _answer(folder: Path, lines: list[RunLine]) -> dict[str, Any]:
    """The answer of ``api/runs``: the newest runs, the number of others, and a version that differs when they do."""
    answer = {
        "folder": str(folder),
        "runs": [dataclasses.asdict(line) for line in lines[:MAX_LISTED]],
        "others": max(len(lines) - MAX_LISTED, 0),
    }
    return {**answer, "version": f"{zlib.crc32(to_json(answer).encode()):08x}"}
