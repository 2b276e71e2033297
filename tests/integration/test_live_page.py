"""The page of a run in Chromium: it shows a killed worker as a fault and survives restarts of controller and server."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from common.chromium import PROGRAMS, Tab, program, running

from tests.integration.conftest import FLOWRT

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason=f"none of {', '.join(PROGRAMS)} is installed"),
]
LIMIT_S = 120.0
STATE = "document.querySelector('#state').innerText"
FAULTS = "[...document.querySelectorAll('#events tr.fault')].map((row) => row.innerText).join()"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def watched(run_dir: Path, port: int) -> Iterator[str]:
    """`flowrt watch` of a run, killed at the end of the block; the value is the address that it prints."""
    command = [str(FLOWRT), "watch", str(run_dir), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match is not None
        yield match[0]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def wait_for_two_steps(tab: Tab) -> None:
    """Wait until the page shows two more steps."""
    steps = await tab.evaluate("run.steps.length")
    await tab.until(f"run.steps.length >= {steps + 2}", LIMIT_S)


async def test_the_page_shows_a_killed_worker_and_survives_restarts(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    small = [
        "--prompts-per-step",
        "2",
        "--group-size",
        "2",
        "--rollout.max-new-tokens",
        "8",
        "--algorithm.kl.coef",
        "0",
    ]
    run = launch("--model", str(untrained_model), "--steps", "5000", *small)
    metrics = run.run_dir / "metrics.jsonl"
    run.wait_for(lambda: metrics.is_file() and metrics.stat().st_size, "first step", LIMIT_S)
    port = free_port()
    async with running() as browser:
        tab = await browser.tab()
        with watched(run.run_dir, port) as address:
            await tab.open(address)
            await tab.until("live.opened && performance.getEntriesByName('complete').length", LIMIT_S)
            await wait_for_two_steps(tab)
            assert await tab.evaluate(STATE) == "live"
            assert await tab.evaluate("document.querySelector('#waits table') !== null || run.status !== null")
            assert tab.problems == []

            [rollout] = run.find("flowrt.roles.rollout", "rollout-1")
            run.signal(signal.SIGKILL, rollout)
            await tab.until(f"{FAULTS}.includes('rollout-1')", LIMIT_S)

            [controller] = run.find("flowrt.launcher.controller_main")
            run.signal(signal.SIGKILL, controller)
            await tab.until("run.events.some((event) => event.kind === 'controller_restarted')", LIMIT_S)
            await wait_for_two_steps(tab)
        await tab.until(f"{STATE} === 'connection lost'", LIMIT_S)
        with watched(run.run_dir, port):
            await tab.until(f"{STATE} === 'live'", LIMIT_S)
            await wait_for_two_steps(tab)
            numbers = await tab.evaluate("run.steps.every((step, at) => step === at)")
            assert numbers, "each step is on the page once"
    assert [problem for problem in tab.problems if "net::ERR_" not in problem] == []
