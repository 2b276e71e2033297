"""Watching: the status of a large run, the size of its page, what watching costs a run, and runs killed at any instant.

- status_ms, status_kb: processor time to make and encode the brief status of 4,096 simulated workers (least of 5 at
  each of several instants, the largest of these), and its size;
- page_kb: bytes of the first load of its page over HTTP, with 10,000 steps;
- cost_ratio: samples/s of the default job with samples, recorder, timeline, the page and three clients on its stream,
  over a job without any of it that can be switched off, by turns; cost_memory_mb: the difference of the largest memory
  of their controllers;
- cost_rows_ratio: rows/s of the metadata plane with three observers over those without, by turns;
- unopened: on runs killed (SIGKILL of all processes) at a random instant, the commands that fail to open the run:
  run.html, samples, the Perfetto trace, the replay of an instant; unopened_runs is the number of runs;
- http_leaks: requests without or with a wrong token, of a foreign host or origin, of other methods, of paths that leave
  the page, that are not refused, or whose answer has a part of a file; http_requests is their number.
"""

import asyncio
import concurrent.futures
import contextlib
import gzip
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.cookiejar import CookieJar
from pathlib import Path

import aiohttp
import msgspec
import psutil
from common.children import Child
from common.harness import Samples, by_turns, median_ratio
from common.jobs import FLOWRT
from control_plane import rows

from flowrt.client.connection import Connection
from flowrt.controller.core import Core
from flowrt.controller.diagnostics.status import brief_text, status
from flowrt.controller.events import Command, Event
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.launcher.observer import hello, statuses
from flowrt.observability.page.access import Access
from flowrt.observability.page.server import STATIC, PageServer
from flowrt.observability.run_reader import RunReader
from flowrt.protocol.messages import Leave
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.simulation.cluster import ClusterPlan, ClusterSimulation

BOUNDS: Mapping[str, float] = {
    "status_ms": 3.0,
    "status_kb": 40.0,
    "page_kb": 1024.0,
    "unopened": 0.0,
    "http_leaks": 0.0,
    "cost_memory_mb": 40.0,
}
FLOORS: Mapping[str, float] = {"cost_ratio": 0.98, "cost_rows_ratio": 0.95}
WORKERS, QUICK_WORKERS = 4096, 512
STEPS = 10_000
RUN_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 120.0
LEAVE_S = 0.5
POLL_S = 0.02
MEMORY_POLL_S = 0.5
TOKEN = "0" * 32
SECRET = "held back"
SMALL = (
    *("--steps", "400", "--prompts-per-step", "4", "--group-size", "4", "--rollout.max-new-tokens", "8"),
    *("--eval.at-start", "False", "--eval.at-end", "False", "--checkpoint.every", "20"),
)
PLAIN = ("--samples.per-step", "0", "--recorder.mb", "0", "--timeline.mb", "32")


# ---- the status


class ProbedCore(Core):
    """A core that makes the brief status at every ``every``-th event, and records processor time and size."""

    events = 0
    every = 0
    spent_s: list[float]
    longest = 0

    def transition(self, event: Event, now: float) -> list[Command]:
        commands = super().transition(event, now)
        self.events += 1
        if self.events % self.every == 0:
            self.spent_s.append(min(self._take(now) for _ in range(5)))
        return commands

    def _take(self, now: float) -> float:
        start_s = time.process_time()
        text = brief_text(status(self, now, 600.0, {}, {}, {}, brief=True))
        self.longest = max(self.longest, len(text))
        return time.process_time() - start_s


def status_figures(workers: int) -> dict[str, float]:
    """Processor time in ms and size in KiB of the brief status of a simulated run."""
    plan = ClusterPlan(
        workers=workers,
        rows=4,
        groups_per_step=workers // 4,
        members=8,
        steps=3,
        lengths=Lengths(LogNormal(200, 0.8, 2000), correlation=0.6, seed=1),
        decode=GenerationCost(base_s=0.01, per_row_s=0.0005),
        train=TrainCost(token_s=1e-6, optimizer_s=5.0),
    )
    ProbedCore.every = 6 * workers
    ProbedCore.spent_s = []
    fleet = ClusterSimulation(plan, ProbedCore)
    fleet.run()
    assert isinstance(fleet.core, ProbedCore)
    return {"status_ms": 1e3 * max(ProbedCore.spent_s), "status_kb": fleet.core.longest / 1024}


# ---- the page


def write_large_run(run_dir: Path, workers: int, steps: int) -> None:
    """A directory of a long run with many workers, drawn at random."""
    draw = random.Random(0)
    (run_dir / "config.toml").write_text(to_toml(defaults("arithmetic")))
    names = [f"metric_{at}" for at in range(36)]
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            values = {name: round(draw.gauss(step / steps, 0.1), 6) for name in names}
            file.write(json.dumps({"step": step, "wall_s": 2.0 * step, "reward": values["metric_0"], **values}) + "\n")
    causes = ("busy", "samples", "gate", "weights", "update", "save", "away", "other")
    with (run_dir / "attribution.jsonl").open("w") as file:
        for step in range(steps):
            roles = {
                role: {"workers": 2, **{cause: round(draw.random(), 4) for cause in causes}}
                for role in ("source", "rollout", "reward", "reference", "trainer")
            }
            worst = {cause: [[f"rollout-{draw.randrange(workers)}", 1.5] for _ in range(8)] for cause in causes[1:]}
            roots = [["rollout", "gate", "trainer", 1.25], ["rollout", "samples", "source", 0.25]]
            line = {
                "step": step,
                "from_s": 2.0 * step,
                "to_s": 2.0 * step + 2,
                "roles": roles,
                "roots": roots,
                "worst": worst,
            }
            file.write(json.dumps(line) + "\n")
    with (run_dir / "events.jsonl").open("w") as file:
        for at in range(2000):
            worker = f"rollout-{draw.randrange(workers)}"
            line = {
                "wall_s": 10.0 * at,
                "unix_s": 1e9 + at,
                "term": 1,
                "step": 5 * at,
                "kind": "joined",
                "worker": worker,
            }
            file.write(json.dumps({**line, "text": f"{worker} (rollout on host 'node') has joined"}) + "\n")
    (run_dir / "timeline").mkdir()
    with gzip.open(run_dir / "timeline" / "0000.jsonl.gz", "wt", compresslevel=1) as file:
        for at in range(100 * workers):
            start_s = 200.0 * (at // workers)
            line = {"worker": f"rollout-{at % workers}", "role": "rollout", "kind": "generate", "start_s": start_s}
            file.write(json.dumps({**line, "end_s": start_s + 200 * draw.random()}) + "\n")


async def first_load_bytes(run_dir: Path) -> int:
    """Bytes that a browser receives until the page is complete."""
    reader = RunReader(run_dir)
    reader.read_attribution()
    server = PageServer(reader, Access(TOKEN))
    port = await server.start("127.0.0.1", 0)
    jar = aiohttp.CookieJar(unsafe=True)
    asked = (
        "run",
        "series?from=0",
        "attribution?from=0",
        "events?from=0",
        "timeline?rows=64",
        "ledger",
        "logs",
        "samples?limit=50",
    )
    total = 0
    try:
        async with aiohttp.ClientSession(cookie_jar=jar, auto_decompress=False) as browser:
            base = f"http://127.0.0.1:{port}"
            async with browser.get(f"{base}/?token={TOKEN}") as answer:
                await answer.read()
            for path in (*STATIC, *(f"/api/{name}" for name in asked)):
                async with browser.get(f"{base}{path}", headers={"Accept-Encoding": "gzip, deflate"}) as answer:
                    assert answer.status == 200, path
                    total += len(await answer.read())
    finally:
        await server.close()
    return total


def page_figures(workers: int, steps: int) -> dict[str, float]:
    """Size of the first load of the page in KiB."""
    with tempfile.TemporaryDirectory() as place:
        write_large_run(Path(place), workers, steps)
        return {"page_kb": asyncio.run(first_load_bytes(Path(place))) / 1024}


# ---- what it costs


class Client(threading.Thread):
    """Reads the stream of a page, as an open browser does."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address

    def run(self) -> None:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with contextlib.suppress(OSError):  # ends with the run
            opener.open(self._address, timeout=RUN_TIMEOUT_S).read()
            with opener.open(f"{self._address.partition('?')[0]}api/stream", timeout=RUN_TIMEOUT_S) as stream:
                for _ in stream:
                    pass


class ControllerMemory(threading.Thread):
    """Follows the memory of the controller that a process has started, until that process ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._launcher = psutil.Process(pid)
        self.peak_mb = 0.0

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                for child in self._launcher.children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        if "flowrt.launcher.controller_main" in " ".join(child.cmdline()):
                            self.peak_mb = max(self.peak_mb, child.memory_info().rss / 2**20)
                time.sleep(MEMORY_POLL_S)


def default_job(run_dir: Path, *flags: str, clients: int = 0) -> tuple[float, float]:
    """Samples/s of the default job and the largest memory of its controller in MB, with the page for ``clients``.

    Raises RuntimeError if it fails.
    """
    words = [*FLOWRT, "run", "arithmetic", "--run-dir", str(run_dir), *flags]
    if clients:
        words += ["--watch", "0"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        _limit(process),
    ):
        assert process.stdout is not None
        memory = ControllerMemory(process.pid)
        memory.start()
        output = ""
        for line in process.stdout:
            output += line
            address = next((word for word in line.split() if "/?token=" in word), "")
            for _ in range(clients if address else 0):
                Client(address).start()
        if code := process.wait(RUN_TIMEOUT_S):
            raise RuntimeError(
                f"`{' '.join(words)}` ended with {code} after at most {RUN_TIMEOUT_S:.0f} s: {output[-2000:]}"
            )
    if not memory.peak_mb:
        raise RuntimeError(f"`{' '.join(words)}` had no process of a controller")
    return float(json.loads((run_dir / "summary.json").read_text())["samples_per_s"]), memory.peak_mb


@contextlib.contextmanager
def _limit(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill a run and its workers after `RUN_TIMEOUT_S`, so that its output ends."""
    timer = threading.Timer(RUN_TIMEOUT_S, kill_all, [process.pid])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def kill_all(pid: int) -> None:
    """Kill a process and all that it has started, at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def cost_figures(quick: bool) -> dict[str, float]:
    """Throughput with everything on, relative to that with all off, and the memory of the controller."""
    steps, turns = ("10", 1) if quick else ("120", 7)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = built_model(folder)

        def job(is_on: bool, turn: int) -> tuple[float, float]:
            flags = ["--steps", steps, "--seed", str(turn), "--model", str(model), *(() if is_on else PLAIN)]
            return default_job(folder / f"{turn}-{is_on}", *flags, clients=3 if is_on else 0)

        runs = by_turns({"on": partial(job, True), "off": partial(job, False)}, turns)
    rates, memory_mb = ({side: [run[at] for run in runs[side]] for side in runs} for at in (0, 1))
    return {
        "cost_samples_per_s": statistics.median(rates["on"]),
        "cost_ratio": median_ratio(rates["on"], rates["off"]),
        "cost_memory_mb": statistics.median(memory_mb["on"]) - statistics.median(memory_mb["off"]),
    }


def built_model(folder: Path) -> Path:
    """The default job's model, built once."""
    default_job(folder / "first", "--steps", "1", *PLAIN)
    return folder / "first" / "model"


class Observers:
    """Three connections that get every status, as three ``flowrt watch`` have them, during a ``with`` block."""

    COUNT = 3

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._opened = threading.Event()

    def __enter__(self) -> None:
        self._thread.start()
        self._following = asyncio.run_coroutine_threadsafe(self._follow_all(), self._loop)
        if not self._opened.wait(COMMAND_TIMEOUT_S):
            raise RuntimeError("no status has come")

    async def _follow_all(self) -> None:
        await asyncio.gather(*(self._follow(number) for number in range(self.COUNT)))

    async def _follow(self, number: int) -> None:
        connection = Connection(self._address, msgspec.structs.replace(hello(), worker=f"observer-{number}"), None)
        await connection.open(COMMAND_TIMEOUT_S)
        try:
            async for _ in statuses(connection):
                self._opened.set()
        finally:
            connection.send(Leave(""))
            connection.close()

    def __exit__(self, *_: object) -> None:
        self._following.cancel()
        with contextlib.suppress(concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(LEAVE_S), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def rows_figures(quick: bool) -> dict[str, float]:
    """Rows/s of 64 rows a request with observers, relative to those without, by turns at one queue."""
    samples = {True: Samples(), False: Samples()}
    with tempfile.TemporaryDirectory() as place:
        system = rows.System("", Path(place))
        system.start_clients(2)
        queue = Child("control_plane/servers.py", "stream", "--run-dir", place, "--sources", "1")
        address = queue.wait_ready()
        for client in system.clients:
            client.ask("join", address=address)
        rows.warm(system)
        for turn in range(2 if quick else 10):
            for is_on in (turn % 2 == 0, turn % 2 == 1):
                with Observers(str(address)) if is_on else contextlib.nullcontext():
                    rows.put_and_get(system, 64, 1, samples[is_on])
        for client in system.clients:
            client.ask("leave")
            client.leave()
        queue.leave()
    name = "rows_per_s_64_pipelined"
    on, off = (samples[is_on].medians()[name] for is_on in (True, False))
    return {"cost_rows_per_s": on, "cost_rows_ratio": on / off}


# ---- killed runs


def killed_figures(quick: bool) -> dict[str, float]:
    """Commands that fail on runs that were killed."""
    count, failed = (1 if quick else 100), 0
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        model = built_model(Path(place))
        for number in range(count):
            run_dir = Path(place) / str(number)
            kill_at_random(run_dir, model, draw)
            failed += sum(not opens(words) for words in openings(run_dir, draw))
    return {"unopened_runs": float(count), "unopened": float(failed)}


def kill_at_random(run_dir: Path, model: Path, draw: random.Random) -> None:
    """A run of which all processes are killed at once, some time after its first step."""
    words = [*FLOWRT, "run", "arithmetic", "--run-dir", str(run_dir), "--model", str(model), *SMALL]
    metrics = run_dir / "metrics.jsonl"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process, _limit(process):
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(POLL_S)
        if process.poll() is not None:
            raise RuntimeError(f"`{' '.join(words)}` ended with {process.returncode} before its first step")
        time.sleep(draw.uniform(0.0, 6.0))
        kill_all(process.pid)


def openings(run_dir: Path, draw: random.Random) -> Iterator[list[str]]:
    """The commands that have to open a run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    at_s = draw.uniform(0.0, json.loads(lines[0])["wall_s"])
    page, trace = run_dir / "page.html", run_dir / "trace.json.gz"
    yield [sys.executable, "-m", "flowrt.observability.page.single_file", str(run_dir), str(page)]
    yield [*FLOWRT, "samples", str(run_dir)]
    yield [*FLOWRT, "export", str(run_dir), "--perfetto", str(trace)]
    yield [*FLOWRT, "replay", str(run_dir), "--at", f"{at_s:.3f}"]


def opens(words: list[str]) -> bool:
    """Whether a command succeeds; writes the end of its output to standard error if not."""
    ended = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if ended.returncode:
        sys.stderr.write(f"{' '.join(words)}: {ended.stdout[-500:]}{ended.stderr[-500:]}\n")
    return ended.returncode == 0


# ---- hostile requests


async def hostile_requests(run_dir: Path) -> tuple[int, int]:
    """Number of requests that must not be answered, and of those that were."""
    server = PageServer(RunReader(run_dir), Access(TOKEN))
    port = await server.start("127.0.0.1", 0)
    base, name = f"http://127.0.0.1:{port}", f"flowrt_{port}"
    apis = [f"/api/{api}" for api in ("run", "series", "events", "timeline", "samples", "ledger", "logs", "stream")]
    escapes = [
        "/../secret",
        "/%2e%2e/secret",
        "/..%2fsecret",
        "//secret",
        "/api/sample/..%2f..%2fsecret",
        "/config.toml",
    ]
    signed = {"Cookie": f"{name}={TOKEN}"}
    cases: list[tuple[str, str, dict[str, str]]] = [
        *(("GET", path, {}) for path in (*STATIC, *apis)),
        *(
            ("GET", path, {"Cookie": f"{name}={wrong}"})
            for path in apis
            for wrong in ("", "1" * 32, TOKEN[1:], TOKEN + "0")
        ),
        *(("GET", f"/?token={wrong}", {}) for wrong in ("", "1" * 32, TOKEN[1:])),
        *(
            ("GET", path, {"Authorization": f"{scheme} {wrong}"})
            for path in ("/metrics", *apis)
            for scheme, wrong in (("Bearer", ""), ("Bearer", TOKEN[1:]), ("Bearer", TOKEN + "0"), ("Basic", TOKEN))
        ),
        *(("GET", path, {**signed, "Host": host}) for path in apis for host in ("evil.example", "10.1.2.3", "[::9]")),
        *(("GET", path, {**signed, "Origin": origin}) for path in apis for origin in ("http://evil.example", "null")),
        *((method, path, signed) for path in ("/", *apis) for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH")),
        *(("GET", path, signed) for path in escapes),
    ]
    answered = 0
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as browser:
        for method, path, headers in cases:
            async with browser.request(method, f"{base}{path}", headers=headers, allow_redirects=False) as answer:
                is_refused = answer.status in (400, 401, 403, 404, 405)
                answered += not is_refused or SECRET.encode() in await answer.read()
    await server.close()
    return len(cases), answered


def http_figures() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place) / "run"
        run_dir.mkdir()
        (Path(place) / "secret").write_text(SECRET)
        (run_dir / "config.toml").write_text(f"# {SECRET}\n{to_toml(defaults('arithmetic'))}")
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "trainer.log").write_text(SECRET)
        requests, answered = asyncio.run(hostile_requests(run_dir))
    return {"http_requests": float(requests), "http_leaks": float(answered)}


def measure(quick: bool) -> dict[str, float]:
    """All figures of this row; each part that is done is reported on standard error."""
    workers = QUICK_WORKERS if quick else WORKERS
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "status": lambda: status_figures(workers),
        "page": lambda: page_figures(workers, STEPS // 10 if quick else STEPS),
        "requests": http_figures,
        "rows": lambda: rows_figures(quick),
        "killed runs": lambda: killed_figures(quick),
        "cost": lambda: cost_figures(quick),
    }
    figures: dict[str, float] = {}
    for name, part in parts.items():
        start_s = time.monotonic()
        figures |= part()
        sys.stderr.write(f"watch, {name}: {time.monotonic() - start_s:.0f} s\n")
    return figures
