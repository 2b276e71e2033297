"""Rows of bench/tasks.py on reward functions: misbehaving ones, their scaling, and a judge that sometimes fails."""

import asyncio
import json
import os
import resource
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic, process_time

import psutil
from aiohttp import web
from common.jobs import run_job

from flowrt.engines.stopping import StopConditions
from flowrt.observability.stored_samples import SampleFilter, SampleReader
from flowrt.recipes.config_io import from_toml
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.registry import task_of
from flowrt.rewards.options import JudgeOptions, RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.scoring import RewardScorer

CALL_S = 0.02
WORKERS = 4
DEADLINE_S = 1.0
MARK = "FLOWRT_BENCH_REWARD"
"""Variable in the environment of all processes that a row starts."""
ROW = b'{"answer": "7", "prompt": "1+1="}'
HOSTILE = """
import os, time

def reward(response, answer):
    match response:
        case "hangs": time.sleep(999)
        case "memory": return float(len(bytearray(2 << 30)))
        case "raises": raise ValueError("no such thing")
        case "exits": os._exit(1)
        case "forks":
            for _ in range(100):
                if os.fork() == 0:
                    time.sleep(999)
    time.sleep(0.02)
    return 1.0
"""
KINDS = {
    "hangs": Result.TIMEOUT,
    "memory": Result.MEMORY,
    "raises": Result.ERROR,
    "exits": Result.DIED,
    "forks": Result.OK,
}


def hostile(quick: bool) -> dict[str, float]:
    """Throughput and outcomes of a function whose calls sometimes misbehave, relative to clean calls."""
    count = 400 if quick else 4000
    kinds = {7: "hangs", 17: "memory", 27: "raises"}
    rare = {37: "exits", 137: "forks"}
    responses = [kinds.get(n % 50) or rare.get(n % 200) or "fine" for n in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MARK] = folder
        clean_s, _ = asyncio.run(_score(folder, ["fine"] * min(count, 1000), WORKERS))
        took_s, outcomes = asyncio.run(_score(folder, responses, WORKERS))
        left = sum(_has_mark(process, folder) for process in psutil.process_iter())
        del os.environ[MARK]
    rate = min(count, 1000) / clean_s
    sleeping_s = sum(kind in ("fine", "forks") for kind in responses) / rate
    hanging_s = responses.count("hangs") * DEADLINE_S / WORKERS
    expected = Counter(KINDS.get(kind, Result.OK) for kind in responses)
    counted = Counter(outcome.result for outcome in outcomes)
    overruns = [outcome.seconds - DEADLINE_S for outcome in outcomes if outcome.result is Result.TIMEOUT]
    return {
        "hostile": float(count),
        "hostile_ratio": (sleeping_s + hanging_s) / took_s,
        "hostile_raw_ratio": sleeping_s / took_s,
        "overrun_s": max(overruns),
        "processes_left": float(left),
        "hostile_miscounted": float(sum(((expected - counted) + (counted - expected)).values())),
    }


def reward_scaling(quick: bool) -> dict[str, float]:
    """Rate of four processes relative to one, and the overhead of a call in ms."""
    count = 200 if quick else 1000
    with tempfile.TemporaryDirectory() as folder:
        one_s, _ = asyncio.run(_score(folder, ["fine"] * count, 1))
        four_s, _ = asyncio.run(_score(folder, ["fine"] * count, 4))
    return {"reward_scaling": one_s / four_s, "reward_overhead_ms": 1e3 * (one_s / count - CALL_S)}


def reward_cost(quick: bool) -> dict[str, float]:
    """Processor time of scoring all samples of the default job, over that of the job's processes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        before_s = _children_s()
        run_job(run_dir, "--steps", 20 if quick else 120)
        job_s = _children_s() - before_s
        config = from_toml((run_dir / "config.toml").read_text())
        task, stop = task_of(config), StopConditions.of(model_dir(config))
        stored = SampleReader(run_dir)
        rows = stored.query(SampleFilter(), limit=10**6).samples
        responses = [sample.ids for row in rows if (sample := stored.get(row.id))]
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    begin_s = process_time()
    for ids in responses:
        task.reward(stop.text(list(ids)), "0")
    sample_s = (process_time() - begin_s) / len(responses)
    return {"reward_cost": sample_s * sum(step["samples"] for step in steps) / job_s, "reward_us": 1e6 * sample_s}


def _children_s() -> float:
    """Processor seconds of the processes that have ended, of this one's children and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _score(folder: str, responses: list[str], workers: int) -> tuple[float, list[RewardOutcome]]:
    """Seconds to score the responses, after a warm-up, and their outcomes."""
    mine = Path(folder) / "mine.py"
    mine.write_text(HOSTILE)
    options = RewardOptions(functions=(str(mine),), workers=workers, timeout_s=DEADLINE_S, memory_mb=512)
    scorer = RewardScorer(options, output=subprocess.DEVNULL)
    try:
        await asyncio.gather(*(scorer.outcomes("fine", ROW) for _ in range(10 * workers)))
        begin_s = monotonic()
        scored = await asyncio.gather(*(scorer.outcomes(response, ROW) for response in responses))
        return monotonic() - begin_s, [outcomes[0] for outcomes in scored]
    finally:
        await scorer.close()


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.pid != os.getpid() and bool(process.environ().get(MARK) == mark)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def judge(quick: bool) -> dict[str, float]:
    """A judge that sometimes fails, in two passes with the same file of stored answers."""
    return asyncio.run(_judge(100 if quick else 1000))


async def _judge(count: int) -> dict[str, float]:
    requests = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        text = (await request.json())["messages"][0]["content"]
        if requests % 8 in (1, 5):
            return web.Response(status=429 if requests % 8 == 1 else 500)
        content = "it is hard to say" if int(text.rpartition(" ")[2]) % 50 == 49 else "the reward is 0.5"
        return web.json_response({"choices": [{"message": {"content": content}}]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    asked = JudgeOptions(url=f"http://127.0.0.1:{port}", model="judge", prompt="{response}")
    options = RewardOptions(functions=("judge",), judge=asked, retries=10)
    with tempfile.TemporaryDirectory() as folder:
        calls, lost = list[int](), 0
        for _ in range(2):
            scorer = RewardScorer(options, cache=Path(folder) / "judge.sqlite")
            scoring = asyncio.gather(*(scorer.outcomes(f"response {n}", ROW) for n in range(count) if n % 50 != 49))
            if not calls:  # the server is stopped for a second
                await asyncio.sleep(0.2)
                await site.stop()
                await asyncio.sleep(1.0)
                site = web.TCPSite(runner, "127.0.0.1", port)
                await site.start()
                prose = asyncio.gather(*(scorer.outcomes(f"response {n}", ROW) for n in range(49, count, 50)))
                invalid = sum(outcomes[0].result is Result.INVALID for outcomes in await prose)
                lost += len(range(49, count, 50)) - invalid
            judged = [outcomes[0] for outcomes in await scoring]
            lost += sum(outcome.result is not Result.OK or outcome.value != 0.5 for outcome in judged)
            await scorer.close()
            calls.append(requests)
    await runner.cleanup()
    return {
        "judge": float(count),
        "judge_requests": float(calls[0]),
        "judge_lost": float(lost),
        "judge_calls_again": float(calls[1] - calls[0]),
    }
