"""A headless Chromium driven over the DevTools protocol, for tests and figures of the page.

Debian's program is a shell script that starts the browser: it runs in a session of its own, whose process group is
killed at the end.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
START_S = 60.0
CALL_S = 60.0


def program() -> str | None:
    """The path of an installed Chromium; None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Tab:
    """A tab of the browser. ``problems`` has its page's errors and reports, ``requests`` the URLs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result. Raises RuntimeError if it fails."""
        self._number += 1
        future = self._calls[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, CALL_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._calls.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.problems.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(str([argument.get("value") for argument in parameters["args"]]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Audits.issueAdded" if "contentSecurityPolicy" in json.dumps(parameters):
                self.problems.append(json.dumps(parameters))

    async def open(self, url: str) -> None:
        """Go to an address; returns as soon as the page is being loaded."""
        for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Raises RuntimeError if it throws."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", expression))
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> Any:
        """The value of an expression as soon as it is true, evaluated every 20 ms; it may throw until then.

        Raises TimeoutError with the text of the page after ``timeout_s`` seconds.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        value: Any = None
        while not value:
            with contextlib.suppress(RuntimeError):  # the page is still being loaded
                value = await self.evaluate(expression)
            if value:
                break
            if asyncio.get_running_loop().time() > deadline:
                text = await self.evaluate("document.body.innerText.slice(0, 1500)")
                raise TimeoutError(f"not within {timeout_s} s: {expression}\n{self.problems}\n{text}")
            await asyncio.sleep(0.02)
        return value

    async def emulate(self, *, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels, and the colour scheme, "light" or "dark"."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page, as PNG."""
        picture = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))  # noqa: ASYNC240

    async def close(self) -> None:
        """Close the tab and its page, which holds one of the six connections of a browser to a server."""
        if not self._socket.closed:
            await self._socket.send_json({"id": 0, "method": "Page.close"})
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._socket.close()


class Browser:
    """A running browser, with a profile that is removed at the end."""

    def __init__(self, process: subprocess.Popen[bytes], profile: Path, http: aiohttp.ClientSession, port: int) -> None:
        self._process = process
        self._profile = profile
        self._http = http
        self._port = port
        self._tabs: list[Tab] = []

    @classmethod
    async def start(cls) -> Self:
        """Start the browser. Raises RuntimeError if none is installed, or after START_S seconds."""
        path = program()
        if path is None:
            raise RuntimeError(f"none of {', '.join(PROGRAMS)} is installed")
        profile = Path(tempfile.mkdtemp(prefix="flowrt-chromium-"))
        process = _launch(path, profile)
        port_file = profile / "DevToolsActivePort"
        deadline = asyncio.get_running_loop().time() + START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            if process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                _kill(process, profile)
                raise RuntimeError(f"{path} did not open its debugging port within {START_S:.0f} s")
            await asyncio.sleep(0.02)
        port = int(port_file.read_text().split("\n")[0])
        return cls(process, profile, aiohttp.ClientSession(), port)

    async def tab(self) -> Tab:
        """A new tab, on an empty page."""
        async with self._http.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as answer:
            where = (await answer.json())["webSocketDebuggerUrl"]
        tab = Tab(await self._http.ws_connect(where, max_msg_size=0))
        self._tabs.append(tab)
        return tab

    async def close(self) -> None:
        for tab in self._tabs:
            await tab.close()
        await self._http.close()
        _kill(self._process, self._profile)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Browser]:
    """A browser for as long as the block runs."""
    browser = await Browser.start()
    try:
        yield browser
    finally:
        await browser.close()


def _launch(path: str, profile: Path) -> subprocess.Popen[bytes]:
    command = [path, "--headless", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
    command += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    return subprocess.Popen(
        [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _kill(process: subprocess.Popen[bytes], profile: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(profile, ignore_errors=True)
