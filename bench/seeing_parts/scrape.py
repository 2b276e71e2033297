"""Scrapes of `/metrics` by Prometheus, of a page that serves a run of 50,000 steps (10,000 with --quick).

`scrape_ms` is the time of a scrape over a kept connection, the 95th percentile of 200; `scrape_grows_ms` by how much
the median is above that of a run of 100 steps. `first_read_s` is the time from the start of the server until a scrape
has all figures, in which the files are read for the first time; `first_read_page_ms` and `first_read_scrape_ms` are the
longest times that a page and a scrape wait for an answer meanwhile.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from flowrt.observability.page.access import Access
from flowrt.observability.page.server import PageServer
from flowrt.observability.run_reader import RunReader
from seeing_parts.watch import TOKEN, write_large_run

BOUNDS: Mapping[str, float] = {"scrape_ms": 20.0, "scrape_grows_ms": 5.0, "first_read_page_ms": 2_000.0}
STEPS, QUICK_STEPS, FEW_STEPS = 50_000, 10_000, 100
WORKERS = 64
SCRAPES = 200
COMPLETE = "flowrt_worker_seconds_total"
POLL_S = 0.02


@asynccontextmanager
async def _served(run_dir: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client with the bearer token, and the address of a page that has just been started."""
    server = PageServer(RunReader(run_dir), Access(TOKEN))
    port = await server.start("127.0.0.1", 0)
    following = asyncio.create_task(server.follow())
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            yield client, f"http://127.0.0.1:{port}"
    finally:
        following.cancel()
        await server.close()


async def _get(client: aiohttp.ClientSession, url: str) -> tuple[str, float]:
    """The text of an answer, and the seconds until it was read."""
    start_s = time.perf_counter()
    async with client.get(url) as answer:
        answer.raise_for_status()
        text = await answer.text()
    return text, time.perf_counter() - start_s


async def _scrapes_ms(client: aiohttp.ClientSession, base: str) -> list[float]:
    return [1e3 * (await _get(client, f"{base}/metrics"))[1] for _ in range(SCRAPES)]


async def _first_read(client: aiohttp.ClientSession, base: str) -> tuple[float, float]:
    """The longest times in seconds that a page and a scrape waited until all files were read."""
    page_s, scrape_s = 0.0, 0.0
    while True:
        text, took_s = await _get(client, f"{base}/metrics")
        scrape_s = max(scrape_s, took_s)
        if COMPLETE in text:
            return page_s, scrape_s
        page_s = max(page_s, (await _get(client, f"{base}/api/run"))[1])
        await asyncio.sleep(POLL_S)


async def _measured(large: Path, small: Path) -> dict[str, float]:
    async with _served(small) as (client, base):
        await _first_read(client, base)
        few_ms = await _scrapes_ms(client, base)
    start_s = time.perf_counter()
    async with _served(large) as (client, base):
        page_s, scrape_s = await _first_read(client, base)
        first_read_s = time.perf_counter() - start_s
        many_ms = await _scrapes_ms(client, base)
    return {
        "scrape_ms": statistics.quantiles(many_ms, n=20)[-1],
        "scrape_grows_ms": statistics.median(many_ms) - statistics.median(few_ms),
        "first_read_s": first_read_s,
        "first_read_page_ms": 1e3 * page_s,
        "first_read_scrape_ms": 1e3 * scrape_s,
    }


def measure(quick: bool) -> dict[str, float]:
    """Write the runs, serve them, and scrape them."""
    with tempfile.TemporaryDirectory(prefix="flowrt-scrape-") as name:
        runs = Path(name) / "large", Path(name) / "small"
        for run_dir, steps in zip(runs, (QUICK_STEPS if quick else STEPS, FEW_STEPS), strict=True):
            run_dir.mkdir()
            write_large_run(run_dir, WORKERS, steps)
        return asyncio.run(_measured(*runs))
