"""The controller as a process: how soon it serves, how large it is, how fast its mind is, what its ledger costs."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from children import FOLDER, Child, cpu_s
from report import Samples

from flowrt.recipes.load import defaults, to_toml

LIVE = ("1e3", "1e5", "1e6")
CYCLES = 10_000
STEPS, GROUPS, MEMBERS = 400, 16, 8
STOP_S = 20.0


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in 10^6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"process {pid} has no resident memory: is it running?")


def start(client: Child, folder: Path, samples: Samples) -> None:
    """The controller's own script for the default job: until it has served a row, and its memory then."""
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(to_toml(replace(defaults("arithmetic"), run_dir=str(folder))))
    hear, say = os.pipe()
    command = [sys.executable, str(FOLDER.parent / "launch" / "controller.py"), "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    start_s = time.monotonic()
    with subprocess.Popen(
        [*command, "--ready-fd", str(say)], pass_fds=(say,), stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            os.close(say)
            with os.fdopen(hear) as ready:
                address = ready.readline().strip()
            if not address:
                raise RuntimeError(f"the controller did not start: {' '.join(command)}")
            samples.add("start_s", client.ask("first_sample", address=address) - start_s)
            samples.add("controller_rss_mb", rss_mb(process.pid))
            client.ask("leave")
        finally:
            process.terminate()
            process.wait(STOP_S)


def peer_start(client: Child, python: str, samples: Samples) -> None:
    """The peer's queue with all that it needs, in the same way."""
    start_s = time.monotonic()
    queue = Child("peer.py", "queue", python=python)
    try:
        reached = queue.wait_ready()
        samples.add("peer_start_s", client.ask("first_row", address=reached["address"]) - start_s)
        if reached["controller_pid"]:
            samples.add("peer_controller_rss_mb", rss_mb(reached["controller_pid"]))
    finally:
        queue.leave()


def core_events(cores: dict[str, Child], shrink: int, samples: Samples) -> None:
    """The mind alone with so many slots live."""
    for live, core in cores.items():
        samples.add(f"core_events_per_s_{live}", core.ask("measure", cycles=CYCLES // shrink))


def ledger(trainers: Child, folder: Path, first: bool, shrink: int, samples: Samples) -> None:
    """The same small training with the ledger and without, ``first`` first: seconds, and the controller's own."""
    seconds, spent_s = {}, {}
    steps = STEPS // shrink
    for kept in (first, not first):
        run_dir = folder / ("with" if kept else "without")
        run_dir.mkdir(parents=True)
        size = ["--steps", str(steps), "--groups", str(GROUPS)]
        server = Child("servers.py", "training", "--run-dir", str(run_dir), *size, *([] if kept else ["--no-ledger"]))
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
