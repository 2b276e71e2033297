"""The processes of a simulated cluster, started once for many runs."""

import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from end_to_end.simulated.bubble_attribution import Accounts, account
from end_to_end.simulated.modes import RunSpec

BENCH = Path(__file__).parents[2]
START_S = 60.0
RUN_S = 300.0


class ClusterProcesses:
    """One controller and its workers, each a process of its own; source and reward share one."""

    def __init__(self, controller: asyncio.subprocess.Process, workers: list[asyncio.subprocess.Process]) -> None:
        self._controller = controller
        self._workers = workers

    async def run(self, spec: RunSpec) -> Accounts:
        """Run once; returns the accounts. Raises RuntimeError if the run fails, TimeoutError after RUN_S seconds."""
        with tempfile.TemporaryDirectory(prefix="flowrt-simulated-") as run_dir:
            before_s, began_s = self._cpu_s(), time.monotonic()
            async with asyncio.timeout(RUN_S):
                await _send(self._controller, {"run_dir": run_dir, "play": dataclasses.asdict(spec)})
                address = await _receive(self._controller)
                for worker in self._workers:
                    await _send(worker, {"address": address})
                summary = await _receive(self._controller)
                errors = [error for worker in self._workers if (error := await _receive(worker))]
            cpu_s, wall_s = self._cpu_s() - before_s, time.monotonic() - began_s
            if summary["exit_code"] != 0 or errors:
                raise RuntimeError(f"{spec}: {summary['reason']}; {'; '.join(errors)}")
            return account(Path(run_dir), spec, summary, cpu_s / wall_s / (os.cpu_count() or 1))

    def _cpu_s(self) -> float:
        times = [psutil.Process(one.pid).cpu_times() for one in (self._controller, *self._workers)]
        return float(sum(one.user + one.system for one in times))


@asynccontextmanager
async def running_cluster(rollout_workers: int) -> AsyncIterator[ClusterProcesses]:
    """Processes for workloads with ``rollout_workers`` rollout workers; none of them outlives the block."""
    names = [[f"rollout-{number}"] for number in range(rollout_workers)]
    names += [["reference"], ["source", "reward"], ["trainer"]]
    processes: list[asyncio.subprocess.Process] = []
    try:
        for arguments in (["controller"], *names):
            processes.append(await _start(arguments))
        async with asyncio.timeout(START_S):
            for process in processes:
                await _receive(process)
        yield ClusterProcesses(processes[0], processes[1:])
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


async def _start(arguments: list[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "end_to_end.simulated.process",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


async def _send(process: asyncio.subprocess.Process, what: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    await process.stdin.drain()


async def _receive(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} of the simulated cluster has gone; its errors are above")
    return json.loads(line)
