"""Attribution: runs in real processes with one planted cause each, and whether the attribution finds it.

- causes_planted: runs with a planted cause, of the twelve; a slow link takes root and tc;
- causes_missed: planted causes whose kind of time, or root, is not the largest of the role that has to wait;
- attribution_gap: the largest relative error of the planted seconds;
- attribution_sum_error: the largest relative difference of a role's seconds in a step from its workers times the length
  of the step;
- attribution_other: the largest share of `other` of all workers of a run, of all plants; attribution_other_PLANT: that
  of each; attribution_other_job: that of the default job.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.links import Unavailable, limited_loopback
from end_to_end.simulated.modes import RunSpec
from planted.plants import PLANTS, SLOW_RANK, STEPS, STOP_S, Plant

from flowrt.controller.attribution.causes import KINDS
from flowrt.observability.attribution import Times, add_up, read
from flowrt.ranks.process_group import STORE_VARIABLE

BOUNDS: Mapping[str, float] = {
    "causes_missed": 0.0,
    "attribution_gap": 0.1,
    "attribution_sum_error": 0.001,
    "attribution_other": 0.03,
    "attribution_other_job": 0.08,
}
FLOORS: Mapping[str, float] = {"causes_planted": 12.0}
QUICK = ("trainer", "reference", "stop")
BENCH = Path(__file__).parents[1]
WORKERS = ("rollout-0", "rollout-1", "reference", "reward", "source", "trainer")
LATE = "rollout-late"
EXTRA = {"late": LATE, "rank": SLOW_RANK}
"""Workers that take part in one plant only."""
RUN_S = 240.0
_FORK = multiprocessing.get_context("fork")
NOT_LOST = ("busy", "other", "away")


def measure(quick: bool) -> dict[str, float]:
    """All figures of this row; with ``quick`` of three plants, and without the default job."""
    figures = dict.fromkeys(("causes_missed", "attribution_gap", "attribution_sum_error", "attribution_other"), 0.0)
    local = [name for name in (QUICK if quick else PLANTS) if not PLANTS[name].link_mbit_s]
    with Cast() as cast:
        found = [of_plant(cast, name) for name in local]
    for name in () if quick else PLANTS:
        if PLANTS[name].link_mbit_s:
            try:
                found.append(of_linked_plant(name))
            except Unavailable as error:
                print(f"plant {name!r} was not played: {error}")
    for one in found:
        for figure, value in one.items():
            so_far = figures.get(figure, 0.0)
            figures[figure] = so_far + value if figure == "causes_missed" else max(so_far, value)
    if not quick:
        figures["causes_planted"] = float(len(found))
        figures["attribution_other_job"] = _of_job()
    return figures


def of_plant(cast: "Cast", name: str) -> dict[str, float]:
    """Run a plant; returns the figures that compare its attribution with the planted cause."""
    plant = PLANTS[name]
    with tempfile.TemporaryDirectory(prefix="flowrt-planted-") as directory:
        cast.play(name, plant, Path(directory))
        lines, damaged = read(Path(directory))
        assert not damaged
    steps = [line for line in lines if 0 < line["step"] < plant.workload.steps]  # the first one fills the pipeline
    other = _other(add_up(steps))
    return {
        "causes_missed": float(not _is_named(name, plant, add_up(steps))),
        "attribution_gap": _gap(plant, add_up(lines)),
        "attribution_sum_error": _sum_error(name, steps),
        "attribution_other": other,
        f"attribution_other_{name}": other,
    }


def of_linked_plant(name: str) -> dict[str, float]:
    """As `of_plant`, in a network of its own whose only link, the loopback, is limited. Raises Unavailable."""
    mine, its = _FORK.Pipe()

    def play() -> None:
        try:
            limited_loopback(PLANTS[name].link_mbit_s)
        except Unavailable as error:
            its.send(str(error))
            return
        with Cast() as cast:
            its.send(of_plant(cast, name))

    process = _FORK.Process(target=play)
    process.start()
    its.close()  # so that `mine` reports the end of the child
    try:
        if not mine.poll(2 * RUN_S):
            raise TimeoutError(f"plant {name!r} has not ended after {2 * RUN_S:.0f} s")
        answer: dict[str, float] | str = mine.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise Unavailable(answer)
    return answer


def _is_named(name: str, plant: Plant, times: Times) -> bool:
    if not plant.kind:
        return True
    shares = times.shares()[plant.role]
    first = max((kind for kind in KINDS if kind not in NOT_LOST), key=lambda kind: shares[kind])
    root, _ = times.root(plant.role, first)
    is_named = first == plant.kind and root.startswith(plant.root)
    if not is_named:
        print(f"{name}: {plant.role} {first} because of {root or '-'}; expected {plant.kind}, {plant.root or '-'}")
    return is_named


def _gap(plant: Plant, times: Times) -> float:
    planted = plant.planted
    if planted is None:
        return 0.0
    return abs(times.roles[planted.role].get(planted.kind, 0.0) - planted.seconds) / planted.seconds


def _sum_error(name: str, steps: list[dict[str, Any]]) -> float:
    """Largest relative error over the roles whose workers are connected during all of these steps."""
    errors = [0.0]
    for line in steps:
        whole_s = line["to_s"] - line["from_s"]
        for role, of in line["roles"].items():
            if name in ("late", "stop") and role == "rollout":  # a worker is away or joins late
                continue
            seconds = sum(of[kind] for kind in KINDS)
            errors.append(abs(seconds - of["workers"] * whole_s) / (of["workers"] * whole_s))
    return max(errors)


def _other(times: Times) -> float:
    total = sum(sum(of.values()) for of in times.roles.values())
    return sum(of.get("other", 0.0) for of in times.roles.values()) / total


# ---- processes


class Cast:
    """The processes of a controller and its workers, for one run after another."""

    def __init__(self) -> None:
        self._ranks = tempfile.TemporaryDirectory(prefix="flowrt-planted-")
        store = {STORE_VARIABLE: f"{self._ranks.name}/store"}
        cast = ("controller", *WORKERS, *EXTRA.values())
        self._processes = {worker: _start(worker, store) for worker in cast}

    def __enter__(self) -> "Cast":
        for process in self._processes.values():
            _receive(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(10.0)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._ranks.cleanup()

    def play(self, name: str, plant: Plant, run_dir: Path) -> None:
        """Run a plant. Raises RuntimeError if the run fails."""
        spec = RunSpec(f"planted {name}", plant.mode, seed=0, steps=plant.workload.steps, real_s=1.0)
        controller = self._processes["controller"]
        _send(controller, {"run_dir": str(run_dir), "play": dataclasses.asdict(spec)})
        address = _receive(controller)
        not_yet = ("controller", *EXTRA.values())
        playing = [process for worker, process in self._processes.items() if worker not in not_yet]
        if name == "rank":
            playing.append(self._processes[SLOW_RANK])
        for process in playing:
            _send(process, {"address": address})
        if name == "late":
            _wait_for_steps(run_dir, STEPS)
            _send(self._processes[LATE], {"address": address})
            playing.append(self._processes[LATE])
        if name == "stop":
            _wait_for_steps(run_dir, 3)
            self._processes["rollout-0"].send_signal(signal.SIGSTOP)
            time.sleep(STOP_S)
            self._processes["rollout-0"].send_signal(signal.SIGCONT)
        summary = _receive(controller)
        errors = [error for process in playing if (error := _receive(process))]
        if summary["exit_code"] or errors:
            raise RuntimeError(f"plant {name!r}: {summary['reason']}; {'; '.join(errors)}")


def _start(worker: str, variables: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "planted.process", worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
    )


def _send(process: "subprocess.Popen[str]", what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def _receive(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} of the planted run has gone; its errors are above")
    return json.loads(line)


def _wait_for_steps(run_dir: Path, steps: int) -> None:
    end_s = time.monotonic() + RUN_S
    path = run_dir / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < steps:
        if time.monotonic() > end_s:
            raise RuntimeError(f"{run_dir} has not {steps} steps after {RUN_S:.0f} s")
        time.sleep(0.05)


def _of_job() -> float:
    """The share of `other` in the default job, of the time from its second step to its last."""
    with tempfile.TemporaryDirectory(prefix="flowrt-planted-") as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "flowrt.cli", "run", "--steps", "60", "--run-dir", str(run_dir)]
        subprocess.run(command, check=True, timeout=2 * RUN_S, stdout=subprocess.DEVNULL)
        lines, _ = read(run_dir)
    return _other(add_up([line for line in lines if 0 < line["step"] < 60]))
