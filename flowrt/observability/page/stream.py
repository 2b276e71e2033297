"""The stream of what is new: server-sent events to each open page, with a bound on what waits for a slow one.

A page has a place in the list of the last updates, and at most one status waits for it: a newer one replaces it. The
stream is never compressed: aiohttp holds back compressed output, and the page would stay empty.
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
"""Streams at a time; each is a connection."""
KEPT_UPDATES = 4096
"""Updates that a stream may be behind; after that the page is told to fetch the steps."""
MAX_BATCH = 256
WRITE_TIMEOUT_S = 10.0
"""A reader that takes nothing for this time is disconnected."""
QUIET_S = 15.0
"""Without an event for this time a comment is sent, so that both ends notice a lost connection."""
SEND_BYTES = 128 << 10
"""Of a connection's output that the kernel keeps."""
Status = Mapping[str, Any]


class Watcher:
    """A page: the place that it has reached."""

    def __init__(self, at: int) -> None:
        self.at = at
        """Number of the next update."""
        self.status = ""
        """The status that waits to be sent; a newer one replaces it."""
        self.news = asyncio.Event()


class Stream:
    """All open pages of a run, and what is sent to them."""

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
        """Stream to a page until it goes.

        Args:
            request: of the page; its header Last-Event-ID, or ``?from=STEP``, says what it has.
            next_step: the step after the last one that was read.
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
        """A page that has all steps up to ``known`` (None: it fetches what it needs), and the steps that it lacks.

        Events are not repeated: a page asks for those by their number.
        """
        watcher = Watcher(self._next)
        if known is None or known == next_step - 1:
            return watcher, ""
        missed: list[FileUpdate] = []
        for update in reversed(self._updates):
            if update.kind == "step" and update.step == known:
                return watcher, "".join(event(one.kind, one.content, one.step) for one in reversed(missed))
            if update.kind != "event":
                missed.append(update)
        return watcher, event("rewound", {"step": min(known + 1, next_step)})

    async def _news(self, watcher: Watcher) -> str:
        """What a page has not got yet; waits for it."""
        with contextlib.suppress(WaitExpired):
            await wait_until(watcher.news.wait(), QUIET_S, "something new in the run", "the run")
        watcher.news.clear()
        first = self._next - len(self._updates)
        if watcher.at < first:  # it reconnects, and asks for what it lacks
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
    """A server-sent event; JSON has no line ends in it."""
    number = "" if step is None or kind != "step" else f"id: {step}\n"
    return f"{number}event: {kind}\ndata: {to_json(content)}\n\n"


def _known(request: web.Request) -> int | None:
    """The last step that the page has; None if it does not say."""
    text = request.headers.get("Last-Event-ID", "")
    if text.isdecimal() and len(text) < 16:
        return int(text)
    text = request.query.get("from", "")
    return int(text) - 1 if text.isdecimal() and len(text) < 16 else None
