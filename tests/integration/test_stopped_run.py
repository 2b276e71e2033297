"""A run whose processes are all stopped for a while, as a pause of a container or of its machine does, goes on."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from flowrt.runtime.waits import pause
from tests.integration.helpers import small_controller

WORKER_TIMEOUT_S = 3.0
STOP_S = 9.0
"""Longer than the worker timeout, than the detection of a stopped process, and than the missed heartbeats."""
BETWEEN_S = 1.0
"""Between the continuations of both processes."""
DEADLINE_S = 60.0
WORKER = """
import asyncio, sys
from flowrt import api
from flowrt.client import connection
connection.MAX_MISSED_HEARTBEATS = 8

async def main():
    session = await api.connect(sys.argv[1], "worker", "worker", 20)
    print("joined", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for _ in range(5):  # also heartbeats after the stop
        try:
            await session.pull("nothing", slots=1)
        except api.FlowError as error:
            print(error, flush=True)
        await asyncio.sleep(0.5)
    await session.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("first", ["controller", "worker"])
async def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path: Path, first: str) -> None:
    async def start(*words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)

    async def line(process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        return (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode().strip()

    arguments = (str(tmp_path), "tcp://127.0.0.1:0", f"timeout={WORKER_TIMEOUT_S}")
    controller = await start(small_controller.__file__, *arguments)
    worker = await start("-c", WORKER, await line(controller))
    try:
        assert await line(worker) == "joined"
        order = [controller, worker] if first == "controller" else [worker, controller]
        for process in order:
            process.send_signal(signal.SIGSTOP)
        await pause(STOP_S)
        order[0].send_signal(signal.SIGCONT)
        await pause(BETWEEN_S)
        order[1].send_signal(signal.SIGCONT)
        assert worker.stdin is not None
        worker.stdin.write(b"go on\n")
        for _ in range(5):
            assert "no stage 'nothing'" in await line(worker)
        assert await asyncio.wait_for(worker.wait(), DEADLINE_S) == 0
    finally:
        for process in (worker, controller):
            if process.returncode is None:
                process.kill()
                await process.wait()
