"""The stream of updates: server-sent events to each open page, with a bound on what is buffered for a slow page.

All pages share a list of the last updates. A page has a position in the list and at most one pending status, which a
newer status replaces. The stream is never compressed: aiohttp buffers compressed output, and the page would stay empty.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from flowrt.errors import WaitExpired
from flowrt.observability.json_text import to_json
from flowrt.observability.page.access import refuse
from flowrt.observability.run_reader import FileUpdate
from flowrt.runtime.waits import wait_until

MAX_WATCHERS = 100
"""Maximum number of open streams; each is a connection."""
KEPT_UPDATES = 4096
"""Number of updates that a stream may lag behind; beyond that it is closed, and the page fetches the steps."""
MAX_BATCH = 256
WRITE_TIMEOUT_S = 10.0
"""Seconds after which a page that reads nothing is disconnected."""
QUIET_S = 15.0
"""Seconds without an event after which a comment is sent, so that both ends detect a lost connection."""
SEND_BYTES = 128 << 10
"""Size of a connection's send buffer in the kernel, in bytes."""
Status = Mapping[str, Any]


class Watcher:
    """An open page and its position in the updates."""

    def __init__(self, at: int) -> None:
        self.at = at
        """Number of the next update to send."""
        self.status = ""
        """The pending status as an event; empty if there is none."""
        self.news = asyncio.Event()


class Stream:
    """All open pages of a run, and the updates that are sent to them."""

    def __init__(self) -> None:
        self._updates: deque[FileUpdate] = deque(maxlen=KEPT_UPDATES)
        self._next = 0
        self._watchers: set[Watcher] = set()
        self._status = event("status", None)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, updates: Iterable[FileUpdate]) -> None:
        """Send updates to all pages."""
        for update in updates:
            self._updates.append(update)
            self._next += 1
        for watcher in self._watchers:
            if watcher.at < self._next:
                watcher.news.set()

    def show(self, status: Status | None) -> None:
        """Send a status to all pages; None: no controller answers."""
        self._status = event("status", status)
        for watcher in self._watchers:
            watcher.status = self._status
            watcher.news.set()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.news.set()

    async def answer(self, request: web.Request, next_step: int) -> web.StreamResponse:
        """Stream to a page until it disconnects.

        Args:
            request: of the page; its header Last-Event-ID, or ``?from=STEP``, says which steps the page has.
            next_step: the step after the last one that was read.

        Returns:
            The response when it is complete; one with status 503 if `MAX_WATCHERS` pages are open.
        """
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        if len(self._watchers) >= MAX_WATCHERS:
            return refuse(503, f"{MAX_WATCHERS} pages are open; close one")
        self._limit_output(request)
        watcher, first = self._begin(_known(request), next_step)
        response = web.StreamResponse(headers=headers)
        self._watchers.add(watcher)
        try:
            await response.prepare(request)
            await self._write(response, f"retry: 1000\n\n{first}{self._status}")
            while not self._is_closed:
                await self._write(response, await self._news(watcher))
        except WaitExpired:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
        finally:
            self._watchers.discard(watcher)
        return response

    def _begin(self, known: int | None, next_step: int) -> tuple[Watcher, str]:
        """A watcher for a page that has all steps up to ``known``, and the events of the steps that the page lacks.

        If ``known`` is None, the page fetches the steps itself. If the missing steps are not kept any more, the event
        ``rewound`` tells it to do so. Events of the run are not repeated: the page requests them by number.
        """
        watcher = Watcher(self._next)
        if known is None or known == next_step - 1:
            return watcher, ""
        missed: list[FileUpdate] = []
        for update in reversed(self._updates):
            if update.kind == "step" and update.step == known:
                return watcher, "".join(event(update.kind, update.content, update.step) for update in reversed(missed))
            if update.kind != "event":
                missed.append(update)
        return watcher, event("rewound", {"step": min(known + 1, next_step)})

    async def _news(self, watcher: Watcher) -> str:
        """The next events for a page; waits for them, and returns a comment if there are none in `QUIET_S`."""
        with contextlib.suppress(WaitExpired):
            await wait_until(watcher.news.wait(), QUIET_S, "something new in the run", "the run")
        watcher.news.clear()
        first = self._next - len(self._updates)
        if watcher.at < first:  # the page reconnects, and requests the steps that it lacks
            raise ConnectionAbortedError
        text = ""
        last = min(watcher.at + MAX_BATCH, self._next)
        for at in range(watcher.at, last):
            update = self._updates[at - first]
            text += event(update.kind, update.content, update.step)
        watcher.at = last
        if last < self._next:
            watcher.news.set()
        text, watcher.status = text + watcher.status, ""
        return text or ": nothing new\n\n"

    @staticmethod
    async def _write(response: web.StreamResponse, text: str) -> None:
        await wait_until(response.write(text.encode()), WRITE_TIMEOUT_S, "a page to take its updates", "a browser")

    @staticmethod
    def _limit_output(request: web.Request) -> None:
        connection = None if request.transport is None else request.transport.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def event(kind: str, content: object, step: int | None = None) -> str:
    """A server-sent event as text; a step has its number as the id. JSON has no line breaks in it."""
    number = "" if step is None or kind != "step" else f"id: {step}\n"
    return f"{number}event: {kind}\ndata: {to_json(content)}\n\n"


def _known(request: web.Request) -> int | None:
    """The last step that the page has; None if the request does not tell."""
    text = request.headers.get("Last-Event-ID", "")
    if text.isdecimal() and len(text) < 16:
        return int(text)
    text = request.query.get("from", "")
    return int(text) - 1 if text.isdecimal() and len(text) < 16 else None
