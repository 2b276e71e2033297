"""The server of a folder of runs over real connections: the list, the pages of runs, access, and what is kept open."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from flowrt.observability.page import runs_server
from flowrt.observability.page.access import HEADERS, Access
from flowrt.observability.page.runs_server import FILES, RunsServer
from flowrt.observability.page.server import PageServer
from flowrt.observability.runs_folder import RunsFolder
from flowrt.runtime.waits import BoundedElsewhere, wait_until
from tests.unit.observability.test_page_server import LIMIT_S, TOKEN, create_run

FOREVER = BoundedElsewhere("the cancellation of the task")
NOTHING_THERE = ("/api/replay", "/api/prompts")
"""Paths without an answer, as the runs have no recording and no ledger."""
REFUSED = "open the address with the token that flowrt watch printed\n"


@dataclass
class Runs:
    """A server of a folder of runs, and a browser that has signed in."""

    server: RunsServer
    browser: aiohttp.ClientSession
    base: str
    folder: Path
    followed: list[str] = field(default_factory=list)
    """Names of the runs whose controllers are followed now."""
    unfollowed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when none is followed any more."""

    async def status(self, path: str) -> int:
        async with self.browser.get(f"{self.base}{path}", allow_redirects=False) as answer:
            return answer.status

    async def get(self, path: str) -> Any:
        async with self.browser.get(f"{self.base}/{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def names(self) -> list[str]:
        return [run["name"] for run in (await self.get("api/runs"))["runs"]]

    def scan_at_once(self) -> None:
        self.server._scan_s = float("-inf")


@pytest.fixture
async def runs(tmp_path: Path) -> AsyncIterator[Runs]:
    folder = tmp_path / "runs"
    for number in range(3):
        create_run(folder / f"run-{number}", 2 + number)
    (tmp_path / "secret").write_text("secret")
    followed: list[str] = []
    unfollowed = asyncio.Event()

    async def follow(run_dir: Path, show: Callable[[Any], None]) -> None:
        followed.append(run_dir.name)
        show(None)
        try:
            await wait_until(asyncio.Event().wait(), FOREVER, "the end of the test", "the test")
        finally:
            followed.remove(run_dir.name)
            if not followed:
                unfollowed.set()

    server = RunsServer(RunsFolder(folder), Access(TOKEN), follow)
    port = await server.start("127.0.0.1", 0)
    base = f"http://127.0.0.1:{port}"
    try:
        cookies = {f"flowrt_{port}": TOKEN}
        jar = aiohttp.CookieJar(unsafe=True)
        limit = aiohttp.ClientTimeout(LIMIT_S)
        async with aiohttp.ClientSession(cookies=cookies, cookie_jar=jar, timeout=limit) as browser:
            yield Runs(server, browser, base, folder, followed, unfollowed)
    finally:
        await server.close()
        assert followed == []


async def test_the_list_follows_the_folder(runs: Runs) -> None:
    answer = await runs.get("api/runs")
    assert answer["folder"] == str(runs.folder)
    assert {run["name"]: run["done"] for run in answer["runs"]} == {"run-0": 2, "run-1": 3, "run-2": 4}
    same = await runs.get(f"api/runs?known={answer['version']}")
    assert set(same) == {"version", "now_unix_s"}
    create_run(runs.folder / "new", 1)
    assert len(await runs.names()) == 3  # the folder was scanned a moment ago
    runs.scan_at_once()
    assert len((await runs.get(f"api/runs?known={answer['version']}"))["runs"]) == 4


async def test_a_long_list_is_cut_and_counted(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_server, "MAX_LISTED", 2)
    answer = await runs.get("api/runs")
    assert (len(answer["runs"]), answer["others"]) == (2, 1)


async def test_each_run_has_its_whole_page(runs: Runs) -> None:
    name = "a run: 100 % {näme}"
    create_run(runs.folder / name, 5)
    runs.scan_at_once()
    assert name in await runs.names()
    at = "run/a%20run%3A%20100%20%25%20%7Bn%C3%A4me%7D"
    async with runs.browser.get(f"{runs.base}/{at}", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (308, f"/{at}/".replace("%3A", ":"))
    assert await runs.status(f"/{at}/") == 200
    assert (await runs.get(f"{at}/api/run"))["name"] == name
    assert (await runs.get(f"{at}/api/series?from=0"))["steps"] == [0, 1, 2, 3, 4]
    assert (await runs.get("run/run-1/api/series?from=0"))["steps"] == [0, 1, 2]
    async with runs.browser.get(f"{runs.base}/run/run-1/metrics") as answer:
        assert "flowrt_step 2" in await answer.text()
    async with runs.browser.get(f"{runs.base}/run/run-1/api/stream") as stream:
        assert b"event: status" in await stream.content.readuntil(b"data: null")
    assert sorted(runs.followed) == [name, "run-1"]
    for path in PageServer.PATHS:
        if "{" not in path and path != "/api/stream":
            expected = 404 if path in NOTHING_THERE else 200
            assert await runs.status(f"/run/run-1{path}") == expected


async def test_every_path_requires_the_token_and_stays_in_the_folder(runs: Runs) -> None:
    below = [f"/run/run-0{path}" for path in ("", "/", "/api/run", "/page.js")]
    paths = [*FILES, "/api/runs", *below]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as anonymous:
        for path in paths:
            async with anonymous.get(f"{runs.base}{path}", allow_redirects=False) as answer:
                assert (answer.status, await answer.text()) == (403, REFUSED)
                assert HEADERS.items() <= dict(answer.headers).items()
        async with anonymous.post(f"{runs.base}/api/runs") as answer:
            assert answer.status == 405
    for name in ("none", "..", "%2e%2e", "..%2fruns%2frun-0", "run-0%2f..%2f..", "%00", "x" * 4000, ".hidden"):
        async with runs.browser.get(f"{runs.base}/run/{name}/api/run") as answer:
            assert answer.status in (400, 404)
            assert "secret" not in await answer.text()


async def test_unused_pages_are_closed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_server, "MAX_OPEN", 2)
    async with runs.browser.get(f"{runs.base}/run/run-0/api/stream") as stream:
        await stream.content.readuntil(b"\n\n")
        for name in ("run-1", "run-2"):
            assert (await runs.get(f"run/{name}/api/run"))["name"] == name
        assert runs.followed == ["run-0", "run-2"]
        async with runs.browser.get(f"{runs.base}/run/run-2/api/stream") as other:
            await other.content.readuntil(b"\n\n")
            async with runs.browser.get(f"{runs.base}/run/run-1/api/run") as answer:
                assert answer.status == 404
                assert "the pages of 2 runs are open" in (await answer.json())["error"]
    monkeypatch.setattr(runs_server, "UNUSED_S", 0.05)
    following = asyncio.create_task(runs.server.follow())
    async with asyncio.timeout(LIMIT_S):
        await runs.unfollowed.wait()
    following.cancel()
    assert (await runs.get("run/run-0/api/run"))["name"] == "run-0"  # opened again


async def test_a_run_that_is_deleted_or_replaced_is_opened_anew(runs: Runs) -> None:
    assert (await runs.get("run/run-0/api/series?from=0"))["steps"] == [0, 1]
    for path in (runs.folder / "run-1").iterdir():
        path.unlink()
    assert await runs.status("/run/run-1/api/run") == 404
    (runs.folder / "run-1" / "metrics.jsonl").write_text(json.dumps({"step": 0, "wall_s": 1.0}) + "\n")
    runs.scan_at_once()
    assert (await runs.get("run/run-1/api/series?from=0"))["steps"] == [0]
    pages = ("/", "/metrics", "/api/run", "/api/series?from=0")
    assert {await runs.status(f"/run/run-2{path}") for path in pages} == {200}
    (runs.folder / "run-2").rename(runs.folder.parent / "run-2")
    assert {await runs.status(f"/run/run-2{path}") for path in pages} == {404}
    assert "run-2" not in runs.followed
    create_run(runs.folder / "run-2", 1)
    runs.scan_at_once()
    assert (await runs.get("run/run-2/api/series?from=0"))["steps"] == [0]
    (runs.folder / "run-2").rename(runs.folder.parent / "other")
    create_run(runs.folder / "run-2", 3)  # before the next request
    assert (await runs.get("run/run-2/api/series?from=0"))["steps"] == [0, 1, 2]


async def test_many_requests_open_a_page_once(runs: Runs) -> None:
    names = await asyncio.gather(*(runs.get("run/run-2/api/run") for _ in range(20)))
    assert {name["name"] for name in names} == {"run-2"}
    assert runs.followed == ["run-2"]
