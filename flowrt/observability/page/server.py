"""HTTP server of the page: the answers of a `RunReader`, and a stream of updates.

The server is read-only. Requests are answered from a fixed table of paths; no part of a request is used as a file name.
"""

import asyncio
import errno
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

from aiohttp import web

from flowrt.errors import ConfigError, FlowError
from flowrt.observability.compared_runs import ComparedRuns
from flowrt.observability.exporters.prometheus import CONTENT_TYPE, prometheus_text
from flowrt.observability.json_text import to_json
from flowrt.observability.page.access import METRICS_PATH, Access, Handler, add_headers, refuse
from flowrt.observability.page.listeners import who_listens
from flowrt.observability.page.replayer import Replayer
from flowrt.observability.page.stream import Status, Stream
from flowrt.observability.run_reader import FileUpdate, RunFigures, RunReader
from flowrt.observability.series import MAX_POINTS, Axis
from flowrt.observability.timeline_rows import MAX_LANES
from flowrt.runtime.waits import pause, wait_until

STATIC = {
    "/": ("page.html", "text/html"),
    "/elements.js": ("elements.js", "text/javascript"),
    "/page.js": ("page.js", "text/javascript"),
    "/samples.js": ("samples.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/uplot.min.js": ("uplot.min.js", "text/javascript"),
    "/uplot.min.css": ("uplot.min.css", "text/css"),
}
"""Files of the page by path: name and content type."""
POLL_S = 0.25
FRESH_S = 10.0
"""Age in seconds from which a status is no longer used as that of the controller."""
READ_TIMEOUT_S = 60.0
PART_BYTES = 1 << 20
"""Bytes of attribution.jsonl that are read at a time: about 0.05 s, for which other requests may wait."""
COMPRESSED_CHARS = 1 << 10
"""Responses of at most this length (characters or bytes) are not compressed."""
MAX_LINE_BYTES = 8190
MAX_ROWS = 200
"""Maximum number of samples, groups or prompts in an answer."""
SAMPLE_PATH = r"/api/sample/{id:\d{1,18}}"
PROMPT_PATH = r"/api/prompt/{epoch:\d{1,15}}/{number:\d{1,18}}"
REPLAY, STREAM = "/api/replay", "/api/stream"
FILES, DATABASES = "files", "databases"
"""Threads of a page: a long database query does not delay the stream."""
Values = Mapping[str, str]


class PageServer:
    """Serves the page of one run."""

    def __init__(
        self,
        reader: RunReader,
        access: Access,
        compared: ComparedRuns | None = None,
    ) -> None:
        """Serve what ``reader`` reads.

        Args:
            reader: of the run; from now on used by this server alone.
            access: decides which requests are answered.
            compared: other runs, whose curves are shown too.
        """
        self._reader = reader
        self._access = access
        self._figures = reader.figures()
        self._compared = compared or ComparedRuns(reader.run_dir, ())
        self._stream = Stream()
        self._status: Status | None = None
        self._status_s = float("-inf")
        self._files = ThreadPoolExecutor(1, FILES)
        self._databases = ThreadPoolExecutor(1, DATABASES)
        self._replayer = Replayer(reader.run_dir)
        self._runner: web.AppRunner | None = None

    # ---- start and stop

    async def start(self, host: str, port: int) -> int:
        """Listen on an address; returns the port. Raises FlowError as `listen`."""
        self._runner, bound_port = await listen(self.handlers(), self._access, host, port)
        return bound_port

    async def close(self) -> None:
        """Close all streams, stop listening, and end the replay process."""
        self._stream.close()
        await self._replayer.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for threads in (self._files, self._databases):
            threads.shutdown(wait=False, cancel_futures=True)

    async def follow(self) -> None:
        """Send what is appended to the run's files to all pages, every `POLL_S` seconds, until cancelled.

        A long attribution.jsonl is read in parts, between which requests are answered.
        """
        while True:
            updates, is_behind, self._figures = await self._in_thread(self._files, self._read_new)
            self._stream.add(updates)
            await pause(0.0 if is_behind else POLL_S)

    def _read_new(self) -> tuple[list[FileUpdate], bool, RunFigures]:
        updates, is_behind = self._reader.read_new(), self._reader.read_attribution(PART_BYTES)
        return updates, is_behind, self._reader.figures()

    def show(self, status: Status | None) -> None:
        """Send a status of the run to all pages; None: no controller answers."""
        self._status, self._status_s = status, monotonic()
        self._stream.show(status)

    def streams(self) -> int:
        """The number of open pages."""
        return len(self._stream)

    @property
    def _fresh_status(self) -> Status | None:
        return self._status if monotonic() - self._status_s < FRESH_S else None

    async def _in_thread(self, threads: ThreadPoolExecutor, call: Callable[..., Any], *values: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(threads, call, *values)
        return await wait_until(work, READ_TIMEOUT_S, "the files of the run", "the disk")

    # ---- requests

    def handlers(self) -> dict[str, Handler]:
        """What answers each path."""
        pools = {FILES: self._files, DATABASES: self._databases}
        handlers: dict[str, Handler] = {path: partial(send_file, *file) for path, file in STATIC.items()}
        handlers |= {path: self._call(pools[pool], partial(call, self)) for path, (pool, call) in self.ANSWERS.items()}
        return handlers | {REPLAY: self._replay, STREAM: self._follow_stream, METRICS_PATH: self._prometheus}

    def _call(self, threads: ThreadPoolExecutor, call: Callable[[Values], object]) -> Handler:
        """A handler that answers with the JSON of what ``call`` returns for the parameters of a request."""

        async def handler(request: web.Request) -> web.StreamResponse:
            values = {**request.query, **request.match_info}
            text: str = await self._in_thread(threads, lambda: to_json(call(values)))
            return compressed(web.Response(text=text, content_type="application/json"), len(text))

        return handler

    def _run(self) -> dict[str, Any]:
        run = self._reader.run()
        if run["state"] == "killed" and self._fresh_status is not None:
            run["state"] = "live"  # the lock of a controller on another host is not visible here
        return {**run, "compared": list(self._compared.names)}

    def _timeline(self, of: Values) -> dict[str, Any]:
        first = _whole(of, "first") if of.get("first") else None
        return self._reader.timeline(_seconds(of, "t0"), _seconds(of, "t1"), _whole(of, "rows", MAX_LANES), first)

    def _prompts(self, of: Values) -> dict[str, Any]:
        return self._reader.prompts(of.get("state", ""), of.get("reason", ""), *_page(of))

    async def _follow_stream(self, request: web.Request) -> web.StreamResponse:
        return await self._stream.answer(request, self._reader.next_step)

    async def _replay(self, request: web.Request) -> web.StreamResponse:
        text = to_json(await self._replayer.status_at(_seconds(request.query, "at") or 0.0))
        return compressed(web.Response(text=text, content_type="application/json"), len(text))

    async def _prometheus(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002 (aiohttp passes it)
        """The figures of the last reading: a scrape waits for no file."""
        text = prometheus_text(self._figures, self._fresh_status)
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    ANSWERS: ClassVar[Mapping[str, tuple[str, Callable[["PageServer", Values], object]]]] = {
        "/api/run": (FILES, lambda self, _: self._run()),
        "/api/series": (FILES, lambda self, of: _series(self._reader, of)),
        "/api/compared": (FILES, lambda self, of: self._compared.series(*_window(of))),
        "/api/differences": (FILES, lambda self, _: self._compared.differences()),
        "/api/attribution": (FILES, lambda self, of: self._reader.attribution(_whole(of, "from"))),
        "/api/events": (FILES, lambda self, of: self._reader.events(_whole(of, "from"))),
        "/api/timeline": (FILES, lambda self, of: self._timeline(of)),
        "/api/samples": (DATABASES, lambda self, of: self._reader.samples(of, *_page(of))),
        "/api/groups": (DATABASES, lambda self, of: self._reader.groups(of, *_page(of))),
        "/api/distributions": (DATABASES, lambda self, of: self._reader.distributions(of)),
        SAMPLE_PATH: (DATABASES, lambda self, of: self._reader.sample(int(of["id"]))),
        PROMPT_PATH: (DATABASES, lambda self, of: self._reader.prompt(int(of["epoch"]), int(of["number"]))),
        "/api/prompts": (DATABASES, lambda self, of: self._prompts(of)),
        "/api/ledger": (DATABASES, lambda self, _: self._reader.ledger()),
        "/api/logs": (FILES, lambda self, _: self._reader.logs()),
    }
    """Paths that are answered with JSON: the thread that makes it, and how, from the parameters of a request."""
    PATHS: ClassVar[tuple[str, ...]] = (*STATIC, *ANSWERS, REPLAY, STREAM, METRICS_PATH)
    """All paths of the page of a run."""


async def listen(handlers: Mapping[str, Handler], access: Access, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Answer the paths of ``handlers`` at an address, to requests that have access; returns the runner and the port.

    Raises FlowError if that is not possible; for a port in use, the error names its owner.
    """
    application = web.Application(middlewares=[_answering(access)])
    application.on_response_prepare.append(add_headers)
    for path, handler in handlers.items():
        application.router.add_get(path, handler)
    runner = web.AppRunner(application, access_log=None, max_line_size=MAX_LINE_BYTES, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise FlowError(
                f"port {port} of {host} is taken{who_listens(port)}; end that, or name another with --port"
            ) from error
        raise ConfigError(
            f"{host}, port {port}, cannot be listened at: {error.strerror}; --host takes an address of this "
            "machine, --port a number from 1024 on"
        ) from error
    bound_port = int(runner.addresses[0][1])
    access.cookie = f"flowrt_{bound_port}"
    return runner, bound_port


def _answering(access: Access) -> Any:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request that has access. Errors are one sentence and reveal nothing about the server."""
        refusal = access.refusal(request)
        if refusal is not None:
            return refusal
        try:
            return await handler(request)
        except web.HTTPException as error:
            return refuse(error.status, error.reason)
        except FlowError as error:
            return _json({"error": str(error)}, 404)
        except ValueError as error:
            return _json({"error": str(error)}, 400)

    return answer


async def send_file(name: str, content_type: str, request: web.Request) -> web.StreamResponse:  # noqa: ARG001
    """Answer with a file of the page."""
    try:
        data = Path(__file__).with_name(name).read_bytes()
    except FileNotFoundError:
        return refuse(404, f"{name} is not installed")
    return compressed(web.Response(body=data, content_type=content_type, charset="utf-8"), len(data))


def _series(reader: RunReader, of: Values) -> dict[str, Any]:
    """Curves: all steps from ``from`` on, or with ``points`` a window, decimated to that number of points."""
    return reader.series_window(*_window(of)) if of.get("points") else reader.series(_whole(of, "from"))


def _page(of: Values) -> tuple[int, int]:
    """Number of rows of a list, at most `MAX_ROWS`, and number of rows before them. Raises ValueError."""
    return min(_whole(of, "limit", 50), MAX_ROWS), _whole(of, "offset")


def _window(of: Values) -> tuple[Axis, float, float, int]:
    """The axis, the bounds and the number of points of a request for curves. Raises ValueError."""
    axis: Axis = "wall_s" if of.get("x") == "wall_s" else "step"
    high = _seconds(of, "to")
    return axis, _seconds(of, "from") or 0.0, math.inf if high is None else high, _whole(of, "points", MAX_POINTS)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(text=to_json(content), content_type="application/json", status=status)


def compressed(response: web.Response, size: int) -> web.Response:
    """The response, to be compressed if it is long; ``size``: its length in characters or bytes."""
    if size > COMPRESSED_CHARS:
        response.enable_compression()
    return response


def _whole(of: Values, name: str, default: int = 0) -> int:
    """The whole number in a parameter of a request; ``default`` if it is missing. Raises ValueError."""
    text = of.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(f"{name} is not a whole number")
    return int(text)


def _seconds(of: Values, name: str) -> float | None:
    """The number of seconds in a parameter of a request; None if it is missing. Raises ValueError."""
    text = of.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e12:
        raise ValueError(f"{name} is not a number of seconds")
    return value
