"""How the workers of each role spent a run, from the spans of work that they reported.

A rollout worker is busy while it generates, even with few occupied rows. Any other role is busy for the time that the
cost model gives the work of its engine, so that the time between two pieces of work counts as idle even if one span
covers both. The cause of idle time follows from the spans of the other workers:

* idle time of a rollout worker before a swap: *gate* (the staleness bound) until the end of the optimiser step that
  made the new weights, and *weights* from then on. Idle time that no swap follows is *gate*, too: no further group may
  be opened before a step is closed. Idle times of up to 20 real milliseconds without a swap are round trips to the
  controller and count as *samples*;
* idle time of any other worker: *samples*, except while no rollout worker generates because all of them fetch or swap
  weights, which is *weights*.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from end_to_end.simulated.modes import RunSpec

from flowrt.controller.storage.timeline_file import read_timeline

Intervals = list[tuple[float, float]]
BUSY = {"generate", "reference", "reward", "train", "step"}
STALL = {"swap", "snapshot"}
TOLERANCE_S = 0.02
LOSSES = ("samples", "weights", "gate", "update")
ROLES = ("rollout", "reference", "reward", "trainer")


@dataclass(frozen=True)
class Accounts:
    """Figures of one run; shares are of the time from the first opened prompt to the end of the last step."""

    spec: RunSpec
    samples_per_s: float  # by simulated second
    step_s: float  # simulated seconds a step
    busy: dict[str, float]
    steady: float  # busy share of the trainer after its first step, when the pipeline is full
    lost: dict[str, dict[str, float]]  # by role and cause
    occupied: float  # share of the rows of all rollout workers that had a sequence
    staleness_max: int
    staleness_mean: float
    prompts_lost: int
    trained_twice: int
    dropped: int
    samples: int
    cpu: float  # share of the machine's cores that the run used


def account(run_dir: Path, spec: RunSpec, summary: dict[str, Any], cpu: float) -> Accounts:
    """The figures of a run from its files; times of its timeline are real seconds. ``cpu`` is stored as it is."""
    spans = _spans(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(end for spans_ in spans["trainer"].values() for kind, _, end in spans_ if kind == "step")
    end_s = steps[-1]
    start_s = end_s - summary["training_s"]
    busy: dict[str, float] = {}
    lost: dict[str, dict[str, float]] = {}
    no_generation = _no_generation(spans["rollout"], steps, start_s, end_s)
    for role in ROLES:
        shares = [
            _shares(spans_, steps if role == "rollout" else None, no_generation, start_s, end_s)
            for spans_ in spans[role].values()
        ]
        worked = summary["numbers"].get(f"worked_s of {role}")
        if worked is not None:
            for one in shares:
                exactly = worked / (end_s - start_s)
                one["samples"], one["busy"] = one["samples"] + one["busy"] - exactly, exactly
        busy[role] = sum(one["busy"] for one in shares) / len(shares)
        lost[role] = {loss: sum(one[loss] for one in shares) / len(shares) for loss in LOSSES}
    numbers = summary["numbers"]
    first_s = numbers["worked_s of trainer in the first step"]
    steady = (numbers.get("worked_s of trainer", first_s) - first_s) / max(end_s - steps[0], 1e-9)
    row_s = sum(value for name, value in numbers.items() if name.startswith("row_s of "))
    workload = spec.workload
    real_s = summary["training_s"]
    return Accounts(
        spec=spec,
        samples_per_s=summary["samples"] / real_s * spec.real_s,
        step_s=real_s / spec.real_s / len(lines),
        busy=busy,
        steady=steady,
        lost=lost,
        occupied=row_s / (workload.rollout_workers * workload.rows * real_s),
        staleness_max=summary["staleness_max"],
        staleness_mean=summary["staleness_mean"],
        prompts_lost=summary["prompts_lost"],
        trained_twice=summary["prompts_trained_twice"],
        dropped=sum(summary["dropped"].values()),
        samples=summary["samples"],
        cpu=cpu,
    )


Spans = dict[str, list[tuple[str, float, float]]]


def _spans(run_dir: Path) -> dict[str, Spans]:
    spans: dict[str, Spans] = defaultdict(lambda: defaultdict(list))
    for line in read_timeline(run_dir):
        if "kind" not in line:
            continue
        spans[line["role"]][line["worker"]].append((line["kind"], line["start_s"], line["end_s"]))
    return spans


def _shares(
    spans: list[tuple[str, float, float]],
    steps: list[float] | None,
    no_generation: Intervals,
    start_s: float,
    end_s: float,
) -> dict[str, float]:
    """Shares of one worker's time; ``steps`` are the ends of optimiser steps, for a rollout worker only."""
    whole = end_s - start_s
    busy = _of_kinds(spans, BUSY, start_s, end_s)
    update = _of_kinds(spans, STALL, start_s, end_s)
    idle = _gaps(sorted(busy + update), start_s, end_s)
    if steps is not None:
        gate, weights = _of_rollout(spans, idle, steps)
    else:
        gate, weights = [], _both(idle, no_generation)
    shares = {"busy": busy, "update": update, "gate": gate, "weights": weights}
    lengths = {name: sum(end - start for start, end in intervals) / whole for name, intervals in shares.items()}
    return {**lengths, "samples": 1.0 - sum(lengths.values())}


def _of_rollout(spans: list[tuple[str, float, float]], idle: Intervals, steps: list[float]) -> tuple[Intervals, ...]:
    """Idle intervals of a rollout worker whose cause is *gate*, and those whose cause is *weights*."""
    swaps = [start for kind, start, _ in spans if kind == "swap"]
    gate: Intervals = []
    weights: Intervals = []
    for start, end in idle:
        if not any(abs(swap - end) < TOLERANCE_S for swap in swaps):
            if end - start > TOLERANCE_S:
                gate.append((start, end))
            continue
        published_s = max([step for step in steps if step <= end], default=start)
        gate.append((start, max(start, published_s)))
        weights.append((max(start, published_s), end))
    return gate, weights


def _no_generation(workers: Spans, steps: list[float], start_s: float, end_s: float) -> Intervals:
    """Intervals in which all rollout workers wait for weights or swap."""
    together = [(start_s, end_s)]
    for spans in workers.values():
        busy, update = _of_kinds(spans, BUSY, start_s, end_s), _of_kinds(spans, STALL, start_s, end_s)
        idle = _gaps(sorted(busy + update), start_s, end_s)
        together = _both(together, sorted(update + _of_rollout(spans, idle, steps)[1]))
    return together


def _of_kinds(spans: list[tuple[str, float, float]], kinds: set[str], start_s: float, end_s: float) -> Intervals:
    cut = [(max(start, start_s), min(end, end_s)) for kind, start, end in spans if kind in kinds]
    return sorted((start, end) for start, end in cut if end > start)


def _gaps(intervals: Intervals, start_s: float, end_s: float) -> Intervals:
    gaps, reached_s = [], start_s
    for start, end in intervals:
        if start > reached_s:
            gaps.append((reached_s, start))
        reached_s = max(reached_s, end)
    return [*gaps, (reached_s, end_s)] if end_s > reached_s else gaps


def _both(some: Intervals, others: Intervals) -> Intervals:
    cut = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return sorted((start, end) for start, end in cut if end > start)
