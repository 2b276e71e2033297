"""The controller as a process: time to its first answer, memory, cost of its ledger."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from common.children import Child, cpu_s
from common.harness import ROOT, Samples
from common.memory import status_bytes
from common.peer_queue import start_queue

from flowrt.recipes.config_io import defaults, to_toml

STEPS, GROUPS, MEMBERS = 400, 16, 8
STOP_S = 20.0


def start(client: Child, folder: Path, samples: Samples) -> None:
    """Seconds until the controller of the default job has served a sample, and its memory in MB then."""
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(to_toml(replace(defaults("arithmetic"), run_dir=str(folder))))
    read_end, write_end = os.pipe()
    command = [sys.executable, str(ROOT / "launch" / "controller.py"), "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    start_s = time.monotonic()
    with subprocess.Popen(
        [*command, "--ready-fd", str(write_end)], pass_fds=(write_end,), stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            os.close(write_end)
            with os.fdopen(read_end) as ready:
                address = ready.readline().strip()
            if not address:
                raise RuntimeError(f"the controller did not start: {' '.join(command)}")
            samples.add("start_s", client.ask("first_sample", address=address) - start_s)
            samples.add("controller_rss_mb", status_bytes("VmRSS", process.pid) / 1e6)
            client.ask("leave")
        finally:
            process.terminate()
            process.wait(STOP_S)


def start_baseline(client: Child, python: str, samples: Samples) -> None:
    """The same of the baseline's queue, with all processes that it needs."""
    start_s = time.monotonic()
    queue = start_queue(python)
    try:
        reached = queue.wait_ready()
        samples.add("baseline_start_s", client.ask("first_row", address=reached["address"]) - start_s)
        if reached["controller_pid"]:
            samples.add("baseline_controller_rss_mb", status_bytes("VmRSS", reached["controller_pid"]) / 1e6)
    finally:
        queue.leave()


def ledger(trainers: Child, folder: Path, first: bool, shrink: int, samples: Samples) -> None:
    """A small training run with and without the ledger: ratios of wall time and of the controller's CPU time.

    ``first``: the run with the ledger comes first.
    """
    seconds, spent_s = {}, {}
    steps = STEPS // shrink
    for kept in (first, not first):
        run_dir = folder / ("with" if kept else "without")
        run_dir.mkdir(parents=True)
        size = ["--steps", str(steps), "--groups", str(GROUPS)]
        server = Child(
            "control_plane/servers.py", "training", "--run-dir", str(run_dir), *size, *([] if kept else ["--no-ledger"])
        )
        try:
            address = server.wait_ready()
            before_s = cpu_s(server.pid)
            seconds[kept] = trainers.ask("run", address=address, steps=steps, groups=GROUPS, members=MEMBERS)
            spent_s[kept] = cpu_s(server.pid) - before_s
        finally:
            server.leave()
    samples.add("ledger_ratio", seconds[True] / seconds[False])
    samples.add("ledger_cpu_ratio", spent_s[True] / spent_s[False])
    samples.add("train_samples_per_s", steps * GROUPS * MEMBERS / seconds[True])
