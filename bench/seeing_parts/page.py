"""The page in a real Chromium, on a drawn run.

- paint_ms: from the request of the page to all curves drawn, with 4,096 workers and 10,000 steps (median of 5);
- paint_cpu_ms: CPU time of the page's thread until then (least of 5), without that of other processes;
- redraw_ms: from a zoom of its timeline to the next frame, the 90th percentile of 40 zooms: 20 of the heat map, 20 of
  64 opened lanes;
- event_s: from a lost worker at the server to its red line on the page (slowest of 5);
- hostile_effects: of 10,000 hostile texts (1,000 with --quick): changed titles, added elements, foreign requests,
  reports of the content security policy, errors.
"""

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from common.chromium import Browser, Tab, running
from common.drawn_run import DrawnRun, serving

MAX_PAINT_MS, MAX_REDRAW_MS, MAX_EVENT_S = 300.0, 50.0, 1.5
BOUNDS: Mapping[str, float] = {
    "paint_ms": MAX_PAINT_MS,
    "redraw_ms": MAX_REDRAW_MS,
    "event_s": MAX_EVENT_S,
    "hostile_effects": 0.0,
}
WORKERS, STEPS, LOADS, ZOOMS = 4096, 10_000, 5, 20
DRAWN = "performance.getEntriesByName('drawn').length"
COMPLETE = "performance.getEntriesByName('complete').length"
MARKED = '<b id="planted">planted</b>'
HOSTILE = (
    MARKED,
    '<img src="x" onerror="document.title=1">',
    "<script>document.title = 'changed'</script>",
    "</script><script>document.title = 'changed'</script>",
    "</style><style>* { display: none }</style>",
    "<!--",
    "--><b id=planted>",
    "<svg onload=document.title=1>",
    '"><iframe src="https://example.invalid/"></iframe>',
    "javascript:document.title=1",
    "<link rel=stylesheet href=//example.invalid/x.css>",
    "<base href=https://example.invalid/>",
    "<form action=https://example.invalid/><input name=q>",
    "{{constructor.constructor('document.title=1')()}}",
    "${document.title=1}",
    "'; document.title = 1; '",
    "\u202egnitirw fo noitcerid\u2066\u2069",
    "\x00\x01\x02\x7f\x9b",
    "\x1b]0;title\x07\x1b[31mred\x1b]52;c;eA==\x07",
    "\ud800 lone \udfff surrogates",
    "\u2028\u2029\u200b\u200d\ufeff\u00ad",
    "__proto__",
    "constructor",
    "NaN",
    "&lt;b id=planted&gt;&amp;",
    "é́́́́́́́́́́́" * 40,
    "x" * 5_000,
)
"""Texts that would change a page that interpreted them as markup or code."""
LONG = "<b id=planted>" * 75_000
"""1 MB."""


def hostile_strings(count: int, seed: int = 0) -> list[str]:
    """``count`` texts: those of HOSTILE, one of 1 MB, and random concatenations of HOSTILE."""
    draw = random.Random(seed)
    mixed = ["".join(draw.choices(HOSTILE, k=draw.randint(2, 4)))[:6_000] for _ in range(count - len(HOSTILE) - 1)]
    return [*HOSTILE, LONG, *mixed]


async def effects(browser: Browser, texts: Sequence[str]) -> list[str]:
    """What the texts do to a page that shows each of them as a prompt, a completion, an event and a line of a log."""
    run = DrawnRun(steps=40, texts=texts)
    plain = DrawnRun(steps=40)
    run.events = [{**event, "text": texts[at % len(texts)]} for at, event in enumerate(plain.events)]
    tab = await browser.tab()
    changes: list[str] = []
    async with serving(run) as server:
        await tab.open(server.url)
        await tab.until(COMPLETE, 60)
        title = await tab.evaluate("document.title")
        names = set(await tab.evaluate(ELEMENTS))
        for offset in range(0, len(texts), 200):
            # The page shows 50 at a time: each of them as a row, one of them opened.
            for start in range(offset, min(offset + 200, len(texts)), 50):
                await tab.evaluate(SHOW % start)
            await tab.evaluate(OPEN)
            changes += await _changes(tab, title, names)
        for at in range(0, len(texts), 500):
            server_texts = texts[at : at + 500]
            for number, text in enumerate(server_texts, at):
                server.push("event", run.add_event("gone", "", 1, float(number)) | {"text": text, "worker": text})
            await tab.until(f"run.events.length >= {len(run.events)}", 60)
            await tab.evaluate("events()")
            changes += await _changes(tab, title, names)
        hosts = {urlsplit(url).netloc for url in tab.requests} - {f"127.0.0.1:{server.port}"}
        changes += [f"a request to {host}" for host in hosts]
        changes += tab.problems
    await tab.close()
    return changes


ELEMENTS = "[...new Set([...document.querySelectorAll('*')].map((one) => one.tagName))]"
SHOW = """(async () => {
  const found = await get('api/samples?limit=50&offset=%d');
  samples.list(found.samples);
})()"""
OPEN = """(async () => {
  const row = document.querySelector('#samples tr.open');
  row.click();
  await new Promise((done) => setTimeout(done, 100));
})()"""


async def _changes(tab: Tab, title: str, names: set[str]) -> list[str]:
    """Changes of the title and new elements of the page since before the texts."""
    changes = []
    if (now := await tab.evaluate("document.title")) != title:
        changes.append(f"the title is {now!r}")
    if await tab.evaluate("Boolean(document.getElementById('planted'))"):
        changes.append("an element was added")
    more = set(await tab.evaluate(ELEMENTS)) - names - {"B", "DL", "DT", "DD", "PRE", "BUTTON", "H3", "I"}
    return [*changes, *(f"an element {name} was added" for name in sorted(more))]


async def paints(browser: Browser, run: DrawnRun, loads: int) -> list[tuple[float, float]]:
    """Of each load, in ms: time until the curves are drawn, and CPU time of the page's thread until then."""
    times = []
    async with serving(run) as server:
        server.prepare("api/run", "api/series?from=0&points=1600", "api/events?from=0", "api/attribution?from=0")
        for _ in range(loads):
            tab = await browser.tab()
            await tab.emulate(width=1440, height=900)
            await tab.call("Performance.enable", timeDomain="threadTicks")
            await tab.open(server.url)
            await tab.until(DRAWN, 60)
            wall = await tab.evaluate("performance.getEntriesByName('drawn')[0].startTime")
            metrics = (await tab.call("Performance.getMetrics"))["metrics"]
            times.append((wall, 1e3 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")))
            await tab.close()
    return times


ZOOM = """(async () => {
  const canvas = document.querySelector('#timeline canvas'), box = canvas.getBoundingClientRect();
  canvas.focus();
  const times = [];
  for (let i = 0; i < %d; i++) {
    const began = performance.now();
    canvas.dispatchEvent(new WheelEvent('wheel', {
      deltaY: i %% 2 ? 90 : -120, clientX: box.left + box.width * 0.6, clientY: box.top + 60, cancelable: true,
    }));
    await new Promise((done) => requestAnimationFrame(() => {
      const next = new MessageChannel();
      next.port1.onmessage = done;
      next.port2.postMessage(0);
    }));
    times.push(performance.now() - began);
  }
  return times;
})()"""


async def redraws_ms(browser: Browser, run: DrawnRun) -> list[float]:
    """Times of zooms of the timeline, from the turn of the wheel to the next frame, in ms."""
    async with serving(run) as server:
        tab = await browser.tab()
        await tab.emulate(width=1440, height=900)
        await tab.open(server.url)
        await tab.until(COMPLETE, 60)
        await tab.evaluate("document.querySelector('#timeline').scrollIntoView()")
        times = await tab.evaluate(ZOOM % ZOOMS)
        # 64 lanes of a window that holds almost the 20,000 spans that an answer may have.
        await tab.evaluate("lanes.first = 64; lanes.t0 = 100; lanes.t1 = 230; timeline.ask()")
        await tab.until("!lanes.image && lanes.data.spans.length > 8000", 60)
        times += await tab.evaluate(ZOOM % ZOOMS)
        await tab.close()
    return [float(time) for time in times]


async def event_s(browser: Browser, times: int) -> float:
    """The slowest time from a lost worker at the server to its row and line on the page, in seconds."""
    run = DrawnRun(state="live", steps=60)
    async with serving(run) as server:
        tab = await browser.tab()
        await tab.open(server.url)
        await tab.until("live.opened && " + COMPLETE)
        slowest = 0.0
        for number in range(times):
            text = f"rollout-{number} is gone: killed by test"
            began = asyncio.get_running_loop().time()
            server.push("event", run.add_event("gone", text, 30, 60.0))
            await tab.until(f"document.querySelector('#events tr.fault')?.innerText.includes({text!r})")
            slowest = max(slowest, asyncio.get_running_loop().time() - began)
        await tab.close()
    return slowest


async def _measure(quick: bool) -> dict[str, float]:
    large = DrawnRun(workers=WORKERS, steps=STEPS)
    async with running() as browser:
        times = await paints(browser, large, LOADS)
        return {
            "paint_ms": statistics.median(wall for wall, _ in times),
            "paint_cpu_ms": min(cpu for _, cpu in times),
            "redraw_ms": statistics.quantiles(await redraws_ms(browser, large), n=10)[-1],
            "event_s": await event_s(browser, 5),
            "hostile_effects": float(len(await effects(browser, hostile_strings(1_000 if quick else 10_000)))),
        }


def measure(quick: bool) -> dict[str, float]:
    """The figures by name."""
    return asyncio.run(_measure(quick))
