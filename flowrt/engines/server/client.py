"""An HTTP client of one generation server: every request has a deadline, and errors contain the server's message."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from flowrt.errors import EngineError, EngineGone
from flowrt.runtime.waits import pause, tracked

PROBE_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.25
UNIX_SCHEME = "unix:"
"""Addresses of servers on Unix sockets: unix:PATH."""
MAX_MESSAGE_CHARACTERS = 500
SERVER_ERRORS = 500
"""Status codes from here on mean that the server failed, not that the request is wrong."""


@dataclass(frozen=True, slots=True)
class Call:
    """One POST request."""

    route: str
    body: Mapping[str, Any]


class ServerClient:
    """Requests to one server; used from the event loop in which it was constructed.

    Args:
        url: address of the server: http://HOST:PORT, or unix:PATH.
        name: kind of server, for errors: SGLang.
        key: API key; empty: none is sent.
    """

    def __init__(self, url: str, name: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self.name = name
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A connection for each request: the server closes idle connections, which would look like a failure.
        self._base = self.url
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, force_close=True)
        if url.startswith(UNIX_SCHEME):
            self._base = "http://localhost"
            connector = aiohttp.UnixConnector(url.removeprefix(UNIX_SCHEME), limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, trust_env=False, headers=headers)

    async def post(self, call: Call, deadline_s: float) -> Any:
        """Send a request and decode the JSON of the response.

        Raises:
            EngineGone: if the server does not respond within ``deadline_s`` seconds, or fails (status 500 or above).
            EngineError: if the server refuses the request.
        """
        return await self._request("POST", call.route, call.body, deadline_s)

    async def get(self, route: str, deadline_s: float = PROBE_TIMEOUT_S) -> Any:
        """As `post`, for a GET request."""
        return await self._request("GET", route, None, deadline_s)

    async def text(self, route: str, deadline_s: float) -> str:
        """The text of the response to a GET request. Raises errors as `post` does."""
        return (await self._exchange("GET", route, None, deadline_s))[1]

    async def wait_healthy(self, deadline_s: float, alive: Callable[[], bool], revive: Call | None = None) -> None:
        """Wait until the server is healthy, at most ``deadline_s`` seconds.

        Args:
            deadline_s: the limit.
            alive: whether the server's process runs.
            revive: a request that may make it healthy, sent after each failed check that it took up; None: no request.

        Raises EngineGone at the deadline, and as soon as ``alive`` returns False.
        """
        with tracked(f"the {self.name} server to be ready", self.url, deadline_s):
            await self._healthy(deadline_s, alive, revive)

    async def _healthy(self, deadline_s: float, alive: Callable[[], bool], revive: Call | None) -> None:
        end_s = time.monotonic() + deadline_s
        reason = ""
        while time.monotonic() < end_s:
            if not alive():
                raise EngineGone(f"the {self.name} server at {self.url} ended before it was ready")
            try:
                async with self._http.request(
                    "GET", self._base + "/health", timeout=_timeout(PROBE_TIMEOUT_S)
                ) as answer:
                    if answer.status == 200:
                        return
                    reason = f"it responds with HTTP {answer.status}"
            except TimeoutError:
                reason = f"it does not respond within {PROBE_TIMEOUT_S:.0f} s"
            except aiohttp.ClientError as error:
                reason = str(error) or type(error).__name__
                await pause(POLL_INTERVAL_S)
                continue
            if revive is not None:
                with suppress(EngineError):  # it may be starting
                    await self.post(revive, PROBE_TIMEOUT_S)
            await pause(POLL_INTERVAL_S)
        raise EngineGone(f"waited {deadline_s:.0f} s for the {self.name} server at {self.url} to be ready: {reason}")

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _request(self, method: str, route: str, body: Any, deadline_s: float) -> Any:
        """The decoded JSON of the response; an empty dictionary if it is not JSON."""
        content, text = await self._exchange(method, route, body, deadline_s)
        if isinstance(content, dict) and content.get("success") is False:
            raise EngineError(f"{self.url}{route} refused (HTTP 200): {_message(content, text)}")
        return content

    async def _exchange(self, method: str, route: str, body: Any, deadline_s: float) -> tuple[Any, str]:
        """The decoded JSON of the response, and its text."""
        try:
            with tracked(f"the answer of {route}", self.url, deadline_s):
                async with self._http.request(
                    method, self._base + route, json=body, timeout=_timeout(deadline_s)
                ) as answer:
                    status, text = answer.status, await answer.text()
        except TimeoutError:
            raise EngineGone(f"{self.url}{route} did not answer within {deadline_s:.0f} s") from None
        except aiohttp.ClientError as error:
            raise EngineGone(f"{self.url}{route} broke off: {error or type(error).__name__}") from error
        try:
            content = json.loads(text) if text else {}
        except json.JSONDecodeError:
            content = {}
        if status >= SERVER_ERRORS:
            raise EngineGone(f"{self.url}{route} failed (HTTP {status}): {_message(content, text)}")
        if status != 200:
            raise EngineError(f"{self.url}{route} refused (HTTP {status}): {_message(content, text)}")
        return content, text


def _timeout(deadline_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=deadline_s)


def _message(content: Any, text: str) -> str:
    """The server's error message, on one line."""
    message = content
    for key in ("message", "error", "detail"):
        while isinstance(message, dict) and key in message:
            message = message[key]
    return " ".join((message if isinstance(message, str) else text).split())[:MAX_MESSAGE_CHARACTERS]
