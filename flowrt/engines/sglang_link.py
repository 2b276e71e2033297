"""HTTP to an SGLang server: requests with deadlines, and the server's own words in every error."""

import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import aiohttp

from flowrt.engines.sglang_protocol import Call
from flowrt.errors import EngineError, EngineGone
from flowrt.waiting import noted, pause

PROBE_S = 10.0
LOOK_EVERY_S = 0.25
LONGEST_WORDS = 500
SERVER_ERRORS = 500
"""From here on the server says that it is broken, not that the request is wrong."""


class SglangLink:
    """One server's address; used from one event loop, which it is opened in."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A connection for each request: the server closes idle ones, which would look as if it had died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, trust_env=False, headers=headers)

    async def post(self, call: Call, deadline_s: float) -> Any:
        """The server's answer. Raises EngineGone when it has none in time or breaks, EngineError when it refuses."""
        return await self._ask("POST", call.route, call.body, deadline_s)

    async def get(self, route: str, deadline_s: float = PROBE_S) -> Any:
        return await self._ask("GET", route, None, deadline_s)

    async def wait_healthy(self, deadline_s: float, alive: Callable[[], bool]) -> None:
        """Wait until the server says that it can serve; raises EngineGone when it dies before or takes too long."""
        with noted("an SGLang server to be ready", self.url, deadline_s):
            await self._healthy(deadline_s, alive)

    async def _healthy(self, deadline_s: float, alive: Callable[[], bool]) -> None:
        end_s = time.monotonic() + deadline_s
        reason = ""
        while time.monotonic() < end_s:
            if not alive():
                raise EngineGone(f"the SGLang server at {self.url} ended before it was ready")
            try:
                async with self._http.request("GET", self.url + "/health", timeout=_within(PROBE_S)) as answer:
                    if answer.status == 200:
                        return
                    reason = f"it answers with HTTP {answer.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            await pause(LOOK_EVERY_S)
        raise EngineGone(f"waited {deadline_s:.0f} s for the SGLang server at {self.url} to be ready: {reason}")

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> "SglangLink":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: str, route: str, body: Any, deadline_s: float) -> Any:
        try:
            with noted(f"the answer of {route}", self.url, deadline_s):
                async with self._http.request(
                    method, self.url + route, json=body, timeout=_within(deadline_s)
                ) as answer:
                    status, text = answer.status, await answer.text()
        except TimeoutError:
            raise EngineGone(f"{self.url}{route} did not answer within {deadline_s:.0f} s") from None
        except aiohttp.ClientError as error:
            raise EngineGone(f"{self.url}{route} broke off: {error or type(error).__name__}") from error
        try:
            found = json.loads(text) if text else {}
        except json.JSONDecodeError:
            found = {}
        if status >= SERVER_ERRORS:
            raise EngineGone(f"{self.url}{route} failed (HTTP {status}): {_words(found, text)}")
        if status != 200 or (isinstance(found, dict) and found.get("success") is False):
            raise EngineError(f"{self.url}{route} refused (HTTP {status}): {_words(found, text)}")
        return found


def _within(deadline_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=deadline_s)


def _words(found: Any, text: str) -> str:
    """What the server says is wrong, on one line."""
    said = found
    for key in ("message", "error", "detail"):
        while isinstance(said, dict) and key in said:
            said = said[key]
    return " ".join((said if isinstance(said, str) else text).split())[:LONGEST_WORDS]
