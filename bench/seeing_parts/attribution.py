"""Attribution: runs in real processes with one planted cause each, and whether the attribution finds it.

- causes_planted: runs with a planted cause, of the twelve; a slow link takes root and tc;
- causes_missed: planted causes whose kind of time, or root, is not the largest of the role that has to wait;
- attribution_gap: the largest relative error of the planted seconds;
- attribution_sum_error: the largest relative difference of a role's seconds in a step from its workers times the length
  of the step;
- attribution_other: the largest share of `other` of all workers of a run, of all plants; attribution_other_PLANT: that
  of each; attribution_other_job: that of the default job.
"""

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.jobs import run_job
from common.links import Unavailable, forked, limited_loopback
from end_to_end.simulated.cluster import Cluster
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
WORKERS = ("rollout-0", "rollout-1", "reference", "reward", "source", "trainer")
LATE = "rollout-late"
EXTRA = {"late": LATE, "rank": SLOW_RANK}
"""Workers that take part in one plant only."""
RUN_S = 240.0
NOT_LOST = ("busy", "other", "away")


def measure(quick: bool) -> dict[str, float]:
    """All figures of this row; with ``quick`` of three plants, and without the default job."""
    figures = dict.fromkeys(("causes_missed", "attribution_gap", "attribution_sum_error", "attribution_other"), 0.0)
    local = [name for name in (QUICK if quick else PLANTS) if not PLANTS[name].link_mbit_s]
    with Cast() as cast:
        results = [of_plant(cast, name) for name in local]
    for name in () if quick else PLANTS:
        if PLANTS[name].link_mbit_s:
            try:
                results.append(forked(of_linked_plant, name))
            except Unavailable as error:
                print(f"plant {name!r} was not played: {error}")
    for result in results:
        for figure, value in result.items():
            so_far = figures.get(figure, 0.0)
            figures[figure] = so_far + value if figure == "causes_missed" else max(so_far, value)
    if not quick:
        figures["causes_planted"] = float(len(results))
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
    limited_loopback(PLANTS[name].link_mbit_s)
    with Cast() as cast:
        return of_plant(cast, name)


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


class Cast(Cluster):
    """The processes of a controller and its workers, for one run after another."""

    def __init__(self) -> None:
        self._ranks = tempfile.TemporaryDirectory(prefix="flowrt-planted-")
        names = {worker: [worker] for worker in (*WORKERS, *EXTRA.values())}
        super().__init__("planted/process.py", names, {STORE_VARIABLE: f"{self._ranks.name}/store"})

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._ranks.cleanup()

    def play(self, name: str, plant: Plant, run_dir: Path) -> None:
        """Run a plant. Raises RuntimeError if the run fails."""
        self.begin(RunSpec(f"planted {name}", plant.mode, seed=0, steps=plant.workload.steps, real_s=1.0), run_dir)
        self.join(*WORKERS)
        if name == "rank":
            self.join(SLOW_RANK)
        if name == "late":
            _wait_for_steps(run_dir, STEPS)
            self.join(LATE)
        if name == "stop":
            _wait_for_steps(run_dir, 3)
            os.kill(self.pid("rollout-0"), signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(self.pid("rollout-0"), signal.SIGCONT)
        self.finish()


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
        job = run_job(Path(directory) / "run", "--steps", 60)
        lines, _ = read(job.run_dir)
    return _other(add_up([line for line in lines if 0 < line["step"] < 60]))
