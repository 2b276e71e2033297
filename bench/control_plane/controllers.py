"""The controller as a process: time to its first answer, memory, speed of its core, cost of its ledger."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from common.children import ROOT, Child, ask_all, cpu_s, start_all
from common.report import Samples

from flowrt.recipes.config_io import defaults, to_toml

LIVE = ("1e3", "1e5", "1e6")
CYCLES = 10_000
WORKERS = (4, 64)
STEPS, GROUPS, MEMBERS = 400, 16, 8
STOP_S = 20.0


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in 10^6 bytes. Raises ValueError if it has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"process {pid} has no resident memory: is it running?")


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
            samples.add("controller_rss_mb", rss_mb(process.pid))
            client.ask("leave")
        finally:
            process.terminate()
            process.wait(STOP_S)


def start_baseline(client: Child, python: str, samples: Samples) -> None:
    """The same of the baseline's queue, with all processes that it needs."""
    start_s = time.monotonic()
    queue = Child("control_plane/baseline.py", "queue", python=python)
    try:
        reached = queue.wait_ready()
        samples.add("baseline_start_s", client.ask("first_row", address=reached["address"]) - start_s)
        if reached["controller_pid"]:
            samples.add("baseline_controller_rss_mb", rss_mb(reached["controller_pid"]))
    finally:
        queue.leave()


def core(repeats: int, shrink: int, samples: Samples) -> None:
    """The core alone, in processes of `bench/core_events.py`: events a second by live slots, cost by workers."""
    cores = {live: Child("core_events.py", "--serve", live) for live in LIVE}
    runs = Child("core_events.py", "--serve", "workers")
    start_all([*cores.values(), runs])
    ask_all(list(cores.values()), "measure", cycles=1000)
    for _ in range(repeats):
        core_events(cores, shrink, samples)
        least, *_, most = (samples.last(f"core_events_per_s_{live}") for live in LIVE)
        samples.add("core_flatness", most / least)
        core_flatness(runs, shrink, samples)
    for child in (*cores.values(), runs):
        child.leave()


def core_events(cores: dict[str, Child], shrink: int, samples: Samples) -> None:
    """Events a second of the core alone, by the number of live slots."""
    for live, core in cores.items():
        samples.add(f"core_events_per_s_{live}", core.ask("measure", cycles=CYCLES // shrink))


def core_flatness(runs: Child, shrink: int, samples: Samples) -> None:
    """Processor time of the core for a sample with many rollout workers over that with few."""
    for workers in WORKERS:
        samples.add(f"core_us_a_sample_{workers}", runs.ask("measure", workers=workers, steps=max(4 // shrink, 2)))
    few, many = (samples.last(f"core_us_a_sample_{workers}") for workers in WORKERS)
    samples.add("core_flatness_workers", many / few)


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
