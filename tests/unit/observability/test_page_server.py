"""The page server over real connections: access, answers, and stalled readers."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.errors import ConfigError, FlowError
from flowrt.launcher.watch import page_url
from flowrt.observability.compared_runs import ComparedRuns, differing
from flowrt.observability.exporters.prometheus import CONTENT_TYPE
from flowrt.observability.page.access import HEADERS, NO_BEARER, WRONG_BEARER, Access
from flowrt.observability.page.server import STATIC, PageServer
from flowrt.observability.page.stream import KEPT_UPDATES, MAX_WATCHERS
from flowrt.observability.run_reader import RunReader
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.runtime.files import atomic_write
from tests.unit.observability.exporters.written_run import shares, write_lines
from tests.unit.observability.test_replay import record

TOKEN = "t" * 32
LIMIT_S = 30.0
HOSTILE = "</script><script>document.title='x'</script>\x1b]52;c;x\x07\u202e\x00<!-- \u2028\ud800"
API = ("run", "series?from=0", "attribution?from=0", "events?from=0", "timeline", "samples", "ledger", "logs", "stream")


@dataclass
class Page:
    """A server of a run's page, and a browser that has signed in."""

    server: PageServer
    browser: aiohttp.ClientSession
    base: str
    run_dir: Path

    async def get(self, path: str) -> Any:
        async with self.browser.get(f"{self.base}/{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(to_toml(defaults("arithmetic")))
    write_steps(run_dir, 3)
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "trainer.log").write_text(f"{HOSTILE[:-1]}\n")
    (tmp_path / "secret").write_text("secret")
    server = PageServer(RunReader(run_dir), Access(TOKEN))
    port = await server.start("127.0.0.1", 0)
    following = asyncio.create_task(server.follow())
    base = f"http://127.0.0.1:{port}"
    try:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(LIMIT_S)) as browser:
            async with browser.get(f"{base}/?token={TOKEN}", allow_redirects=False) as answer:
                assert answer.status == 303
            yield Page(server, browser, base, run_dir)
    finally:
        following.cancel()
        await server.close()


def write_steps(run_dir: Path, count: int) -> None:
    lines = (json.dumps({"step": step, "wall_s": step * 1.5, "reward": 0.25}) + "\n" for step in range(count))
    atomic_write(run_dir / "metrics.jsonl", "".join(lines))


async def raw(page: Page, request: str, *, half_close: bool = False) -> bytes:
    """The answer to these bytes; ``half_close``: close the sending side after them."""
    port = int(page.base.rpartition(":")[2])
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request.encode("latin-1"))
            if half_close:
                writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


# ---- access


async def test_a_page_at_an_ipv6_address_is_read_at_its_url(page: Page) -> None:
    server = PageServer(RunReader(page.run_dir), Access(TOKEN))
    port = await server.start("::1", 0)
    try:
        async with page.browser.get(page_url("::1", port, TOKEN), allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
    finally:
        await server.close()


async def test_the_token_moves_from_the_url_to_a_cookie(page: Page) -> None:
    async with page.browser.get(f"{page.base}/?token={TOKEN}", allow_redirects=False) as answer:
        cookie = answer.headers["Set-Cookie"]
        assert answer.headers["Location"] == "/"
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert cookie.startswith(f"flowrt_{page.base.rpartition(':')[2]}=")


async def test_every_path_requires_the_token(page: Page) -> None:
    port = page.base.rpartition(":")[2]
    paths = ["/", "/?token=", "/?token=wrong", "/page.js", *(f"/api/{name}" for name in API)]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as anonymous:
        for path in paths:
            for cookie in ("", "wrong", TOKEN[:-1]):
                headers = {"Cookie": f"flowrt_{port}={cookie}"}
                async with anonymous.get(f"{page.base}{path}", headers=headers) as answer:
                    assert answer.status == 403
                    assert await answer.text() == "open the address with the token that flowrt watch printed\n"
                    assert_headers(answer.headers)


@pytest.mark.parametrize("path", ["/metrics", "/api/run"])
async def test_a_bearer_token_gives_access_under_any_name_of_the_host(page: Page, path: str) -> None:
    url = f"{page.base}{path}"
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as scraper:
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {TOKEN}", "Host": "node7.cluster:8265"}
            async with scraper.get(url, headers=headers) as answer:
                assert answer.status == 200
        for wrong in ("", "wrong", TOKEN[:-1], f"{TOKEN}0", f"{TOKEN} x"):
            async with scraper.get(url, headers={"Authorization": f"Bearer {wrong}"}) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert await answer.text() == f"{WRONG_BEARER}\n"
                assert_headers(answer.headers)
        async with scraper.post(url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert answer.status == 405


async def test_metrics_are_served_with_the_cookie_and_name_the_header_without(page: Page) -> None:
    async with page.browser.get(f"{page.base}/metrics") as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        text = await answer.text()
    assert "flowrt_step 2\n" in text
    assert "flowrt_train_reward 0.25\n" in text
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as anonymous:
        for headers in ({}, {"Authorization": f"Basic {TOKEN}"}, {"Cookie": "flowrt=x"}):
            async with anonymous.get(f"{page.base}/metrics", headers=headers) as answer:
                assert (answer.status, await answer.text()) == (401, f"{NO_BEARER}\n")


async def test_a_scrape_does_not_wait_for_files_that_are_read(page: Page) -> None:
    """The thread that reads files is kept busy: the answer has the figures of the last reading."""
    is_read = threading.Event()
    page.server._files.submit(is_read.wait, LIMIT_S)
    try:
        async with page.browser.get(f"{page.base}/metrics") as answer:
            assert "flowrt_step 2\n" in await answer.text()
        assert not is_read.is_set()
    finally:
        is_read.set()


async def test_pages_are_answered_while_a_long_file_is_read_in_parts(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of workers are exported once all of the file is read: a part of them would look like a reset."""
    for module in ("page.server.PART_BYTES", "tails.READ_BYTES"):
        monkeypatch.setattr(f"flowrt.observability.{module}", 4096)
    server = PageServer(RunReader(page.run_dir), Access(TOKEN))
    write_lines(page.run_dir / "attribution.jsonl", shares(range(2_000)))
    port = await server.start("127.0.0.1", 0)
    following = asyncio.create_task(server.follow())
    seen: list[str] = []
    try:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession(headers=headers) as scraper:
            while not (seen and "flowrt_worker_seconds_total" in seen[-1]):
                async with scraper.get(f"http://127.0.0.1:{port}/api/run") as answer:
                    assert answer.status == 200
                async with scraper.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    seen.append(await answer.text())
    finally:
        following.cancel()
        await server.close()
    gate = seen[-1].partition('flowrt_worker_seconds_total{role="rollout",cause="gate"} ')[2].splitlines()[0]
    assert float(gate) == pytest.approx(0.6 * 2_000)
    assert len(seen) > 1


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8265", "", "localhost.evil.example", "[::2]", "10.9.8.7", "[["]
)
async def test_a_foreign_host_header_is_refused_despite_the_token(page: Page, host: str) -> None:
    async with page.browser.get(f"{page.base}/api/run", headers={"Host": host}) as answer:
        assert answer.status in (400, 403)
        assert "arithmetic" not in await answer.text()


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:9000", socket.gethostname(), "LOCALHOST:1"])
async def test_own_host_names_are_accepted_with_any_port(page: Page, host: str) -> None:
    async with page.browser.get(f"{page.base}/api/run", headers={"Host": host}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://[::"])
async def test_a_foreign_origin_is_refused(page: Page, origin: str) -> None:
    async with page.browser.get(f"{page.base}/api/run", headers={"Origin": origin}) as answer:
        assert answer.status == 403
    async with page.browser.get(f"{page.base}/api/run", headers={"Origin": page.base}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
async def test_methods_other_than_get_and_head_are_refused(page: Page, method: str) -> None:
    async with page.browser.request(method, f"{page.base}/api/run") as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"
        assert_headers(answer.headers)


def assert_headers(headers: Any) -> None:
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "'none'" in headers["Content-Security-Policy"]


async def test_a_replay_does_not_block_other_requests(page: Page) -> None:
    record(page.run_dir)
    pending = asyncio.create_task(page.get("api/replay?at=8.5"))
    assert (await page.get("api/series?from=0"))["steps"] == [0, 1, 2]
    status = await pending
    assert (status["term"], status["at_s"]) == (1, 8.5)
    assert status["slots"]["rollout"] == {"done": 0, "at_work": 2, "not_begun": 0}
    async with page.browser.get(f"{page.base}/api/replay?at=900") as answer:
        assert answer.status == 404
        assert "nothing is recorded at 900 s" in (await answer.json())["error"]
    async with page.browser.get(f"{page.base}/api/replay?at=x") as answer:
        assert answer.status == 400
        assert "at is not a number of seconds" in await answer.text()


async def test_compared_runs_are_served_with_their_names(tmp_path: Path) -> None:
    reader, [other, same] = (
        RunReader(create_run(tmp_path / "a" / "run", 3)),
        [tmp_path / "b" / "other", tmp_path / "c/run"],
    )
    compared = ComparedRuns(reader.run_dir, [create_run(other, 5), create_run(same, 2)])
    server = PageServer(reader, Access(TOKEN), compared=compared)
    port = await server.start("127.0.0.1", 0)
    try:
        cookies = {f"flowrt_{port}": TOKEN}
        async with aiohttp.ClientSession(cookies=cookies, cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            compared_page = Page(server, browser, f"http://127.0.0.1:{port}", reader.run_dir)
            assert (await compared_page.get("api/run"))["compared"] == ["other", str(same)]
            runs = (await compared_page.get("api/compared?from=1&to=3&points=100"))["runs"]
            assert [(run["name"], run["steps"]) for run in runs] == [("other", [1, 2, 3]), (str(same), [1])]
            write_steps(same, 4)
            runs = (await compared_page.get("api/compared?x=wall_s&from=3&points=100"))["runs"]
            assert [run["steps"] for run in runs] == [[2, 3, 4], [2, 3]]
            assert await compared_page.get("api/differences") == {"settings": []}
            config = (same / "config.toml").read_text()
            (same / "config.toml").write_text(config.replace("\nseed = 0", "\nseed = 7", 1))
            assert await compared_page.get("api/differences") == {"settings": [["seed", 0, 0, 7]]}
    finally:
        await server.close()


SETTINGS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2) | st.text(max_size=1), max_size=4)
CONFIGS = st.lists(st.builds(lambda top, table: {**top, "table": table}, SETTINGS, SETTINGS), min_size=2, max_size=4)


@given(CONFIGS)
def test_exactly_the_settings_that_differ_are_listed(configs: list[dict[str, Any]]) -> None:
    tables = [{**{f"table.{name}": value for name, value in config["table"].items()}, **config} for config in configs]
    differences = {name: values for name, *values in differing(configs)}
    for name in {name for table in tables for name in table} - {"table"}:
        values = [table.get(name) for table in tables]
        assert (name in differences) == any(value != values[0] for value in values)
        assert differences.get(name, values) == values


def test_directories_and_unreadable_settings_are_no_differences() -> None:
    assert differing([{"run_dir": "a", "seed": 1}, {"run_dir": "b", "seed": 1}, {}]) == []
    assert differing([{"seed": 1}, {"seed": 2}, {}]) == [["seed", 1, 2, None]]


def create_run(path: Path, steps: int) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(to_toml(defaults("arithmetic")))
    write_steps(path, steps)
    return path


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a run directory"):
        ComparedRuns(run, [tmp_path / "empty"])
    with pytest.raises(ConfigError, match="is not there"):
        ComparedRuns(run, [tmp_path / "none"])
    with pytest.raises(ConfigError, match="cannot be compared with itself"):
        ComparedRuns(run, [tmp_path / "empty" / ".." / "run"])
    with pytest.raises(ConfigError, match="too many"):
        ComparedRuns(run, [tmp_path / str(number) for number in range(6)])


@pytest.mark.parametrize(
    "path",
    [
        "/../secret",
        "/..%2fsecret",
        "/%2e%2e/%2e%2e/secret",
        "//etc/passwd",
        "/page.js/../../secret",
        "/api/sample/../../../secret",
        "/api/sample/-1",
        "/api/prompt/0/x",
        "/config.toml",
        "/api/%00",
        "/run.html",
    ],
)
async def test_no_path_reaches_another_file(page: Page, path: str) -> None:
    cookie = f"flowrt_{page.base.rpartition(':')[2]}={TOKEN}"
    answer = await raw(page, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n")
    status = answer.split(b" ", 2)[1]
    assert status in (b"400", b"403", b"404"), answer
    assert b"secret\r\n" not in answer
    assert b"root:" not in answer


async def test_malformed_requests_are_refused_and_the_server_keeps_running(page: Page) -> None:
    for request in (
        "\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        f"GET /{'x' * 100_000} HTTP/1.1\r\n\r\n",
        "\x16\x03\x01\n\n",
    ):
        assert b" 200 " not in await raw(page, request, half_close=True)
    assert (await page.get("api/run"))["recipe"] == "arithmetic"


# ---- answers


async def test_static_files_are_served_with_the_security_headers(page: Page) -> None:
    for path, (_, content_type) in STATIC.items():
        async with page.browser.get(f"{page.base}{path}") as answer:
            assert answer.status == 200
            assert answer.content_type == content_type
            assert_headers(answer.headers)
            assert len(await answer.read()) > 500
        async with page.browser.head(f"{page.base}{path}") as answer:
            assert answer.status == 200
            assert await answer.read() == b""


async def test_every_path_answers_for_a_run_with_few_files(page: Page) -> None:
    assert (await page.get("api/run"))["files"]["events.jsonl"] == "missing"
    assert (await page.get("api/series?from=1"))["steps"] == [1, 2]
    assert await page.get("api/events?from=0") == {"events": [], "next": 0}
    assert await page.get("api/attribution?from=0") == {"lines": []}
    assert (await page.get("api/timeline?t0=0&t1=9&rows=64"))["spans"] == []
    assert await page.get("api/samples?order=worst&limit=5") == {"samples": [], "total": 0}
    assert (await page.get("api/groups?order=-spread"))["groups"] == []
    assert await page.get("api/ledger") == {"states": {}, "dropped": {}}
    assert (await page.get("api/logs"))["files"]["trainer.log"][0].startswith("</script>")


@pytest.mark.parametrize(
    "path",
    [
        "series?from=-1",
        "series?from=x",
        "series?points=x",
        "series?from=nan&points=9",
        "timeline?t0=nan",
        "timeline?t1=1e999",
        "samples?limit=1e3",
        "samples?order=spread",
        "samples?group=x",
        "groups?order=advantage",
        "groups?right=nan",
        "distributions?right=x",
        "events?from=²",
    ],
)
async def test_an_invalid_query_value_is_refused_in_one_sentence(page: Page, path: str) -> None:
    async with page.browser.get(f"{page.base}/api/{path}") as answer:
        assert answer.status == 400
        assert len((await answer.json())["error"].splitlines()) == 1


async def test_missing_data_is_a_404_with_an_error(page: Page) -> None:
    for path in ("sample/7", "prompt/0/7", "prompts?state=dropped", "replay?at=1"):
        async with page.browser.get(f"{page.base}/api/{path}") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]


# ---- the stream


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str, Any]]:
    """(id, event, data) of each event."""
    fields: dict[str, str] = {}
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}
        else:
            fields = {}


async def take(events: AsyncIterator[tuple[str, str, Any]], kind: str) -> tuple[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        async for number, event_kind, data in events:
            if event_kind == kind:
                return number, data
    raise AssertionError(f"the stream ended without {kind}")


async def test_new_steps_events_and_the_status_are_streamed(page: Page) -> None:
    async with page.browser.get(f"{page.base}/api/stream") as response:
        assert response.content_type == "text/event-stream"
        assert "Content-Encoding" not in response.headers
        events = events_of(response)
        assert await take(events, "status") == ("", None)
        with (page.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "wall_s": 9.0, "reward": 1}) + "\n")
        assert await take(events, "step") == ("3", {"step": 3, "wall_s": 9.0, "reward": 1})
        line = {"wall_s": 9.1, "unix_s": 1.0, "step": 3, "kind": "warning", "text": HOSTILE}
        (page.run_dir / "events.jsonl").write_text(json.dumps(line) + "\n")
        assert (await take(events, "event"))[1] == line
        page.server.show({"step": 4, "what": HOSTILE})
        assert (await take(events, "status"))[1] == {"step": 4, "what": HOSTILE}
        write_steps(page.run_dir, 2)
        assert (await take(events, "rewound"))[1] == {"step": 2}


async def test_a_reconnected_stream_continues_after_its_last_step(page: Page) -> None:
    async with page.browser.get(f"{page.base}/api/stream") as response:
        events = events_of(response)
        write_steps(page.run_dir, 6)
        assert [(await take(events, "step"))[0] for _ in range(3)] == ["3", "4", "5"]
    async with page.browser.get(f"{page.base}/api/stream", headers={"Last-Event-ID": "3"}) as response:
        events = events_of(response)
        assert [(await take(events, "step"))[0] for _ in range(2)] == ["4", "5"]
    async with page.browser.get(f"{page.base}/api/stream", headers={"Last-Event-ID": "99"}) as response:
        assert (await take(events_of(response), "rewound"))[1] == {"step": 6}


async def test_streams_over_the_limit_are_refused(page: Page) -> None:
    async with contextlib.AsyncExitStack() as stack:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=page.browser.cookie_jar,
            timeout=aiohttp.ClientTimeout(LIMIT_S),
        )
        await stack.enter_async_context(session)
        answers = [await stack.enter_async_context(session.get(f"{page.base}/api/stream")) for _ in range(200)]
        assert [answer.status for answer in answers].count(200) == MAX_WATCHERS
        assert [answer.status for answer in answers].count(503) == 200 - MAX_WATCHERS
        page.server.show({"step": 1})
        assert (await page.get("api/run"))["recipe"] == "arithmetic"


async def test_a_stalled_reader_is_disconnected_and_blocks_no_other_reader(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrt.observability.page.stream.WRITE_TIMEOUT_S", 0.5)
    port = int(page.base.rpartition(":")[2])
    slow = socket.create_connection(("127.0.0.1", port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(f"GET /api/stream HTTP/1.1\r\nHost: localhost\r\nCookie: flowrt_{port}={TOKEN}\r\n\r\n".encode())
    streams = page.server.streams
    async with page.browser.get(f"{page.base}/api/stream") as response:
        events = events_of(response)
        assert await take(events, "status") == ("", None)
        async with asyncio.timeout(LIMIT_S):
            count = 0
            while count < 2 or streams() > 1:
                page.server.show({"step": count, "large": "x" * 100_000})
                assert (await take(events, "status"))[1]["step"] == count
                count += 1
    slow.close()


async def test_a_stream_that_is_too_far_behind_is_closed(page: Page) -> None:
    async with page.browser.get(f"{page.base}/api/stream") as response:
        await take(events_of(response), "status")
        write_steps(page.run_dir, KEPT_UPDATES + 500)
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(aiohttp.ClientError):
                await response.read()  # until the server ends it
    assert len((await page.get("api/series?from=0"))["steps"]) == KEPT_UPDATES + 500


# ---- the port


async def test_a_port_in_use_is_refused_with_the_name_of_its_process(page: Page) -> None:
    port = int(page.base.rpartition(":")[2])
    second = PageServer(RunReader(page.run_dir), Access(TOKEN))
    with pytest.raises(FlowError, match=rf"port {port} of 127.0.0.1 is taken by \w+ \(process \d+: "):
        await second.start("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot be listened at"):
        await PageServer(RunReader(page.run_dir), Access(TOKEN)).start("192.0.2.1", 0)
