"""The default job over seeds and staleness bounds: reward, wall time, samples/s, busy share of each role.

    python bench/main_job.py [--parts bound_1 bound_0 ...] [--quick] [--json PATH] [--seeds N] [--other-seeds N]

Every run is a `flowrt run` command; wall times count from its start, so they include building the model and its warm
start. Medians over the seeds at each bound.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.harness import Bench, Figures, Options, Part, Skipped
from common.jobs import Job, run_job

WINDOW = 10
TARGET = 0.8
BOUNDS = (1, 0, 2, 4)
STEPS, QUICK_STEPS = 120, 40


def figures_of(job: Job) -> dict[str, Any]:
    """The summary of a job, with ``total_s``, ``first_step_total_s`` and ``reached_s``.

    ``reached_s`` are the seconds until the mean reward of ten steps reached the target, None if it never did.
    """
    summary, lines = job.summary, job.lines
    # The controller's clock starts when the model is ready; the user's wait includes the time before.
    before_s = job.total_s - summary["wall_s"]
    hits = (
        before_s + lines[end - 1]["wall_s"]
        for end in range(WINDOW, len(lines) + 1)
        if statistics.fmean(line["reward"] for line in lines[end - WINDOW : end]) >= TARGET
    )
    first_s = before_s + lines[0]["wall_s"]
    return {**summary, "total_s": job.total_s, "first_step_total_s": first_s, "reached_s": next(hits, None)}


def reached_target(result: dict[str, Any]) -> bool:
    """Whether the reward rose from at most 0.4 to at least 0.8, within 240 s of the start of the command."""
    reached_s = result["reached_s"]
    return result["reward_first"] <= 0.4 and result["reward_last"] >= 0.8 and reached_s is not None and reached_s <= 240


def metrics_of(jobs: list[Job], bound: int) -> Figures:
    """Medians over the seeds at one staleness bound, and the number of seeds that reached each target."""
    some = [figures_of(job) for job in jobs]
    key = f"staleness_{bound}"
    reached = [figures["reached_s"] for figures in some if figures["reached_s"] is not None]
    metrics = {
        f"{key}_seeds": len(some),
        f"{key}_seeds_from_0.4_to_0.8_in_240_s": sum(map(reached_target, some)),
        f"{key}_seeds_to_0.9": sum(figures["reward_last"] >= 0.9 for figures in some),
        f"{key}_prompts_lost": sum(figures["prompts_lost"] for figures in some),
        f"{key}_prompts_trained_twice": sum(figures["prompts_trained_twice"] for figures in some),
        f"{key}_staleness_max": max(figures["staleness_max"] for figures in some),
    }
    medians = ("reward_first", "reward_last", "eval_first", "eval_last", "samples_per_s", "tokens_per_s", "total_s")
    for name in (*medians, "first_step_total_s"):
        metrics[f"{key}_{name}"] = statistics.median(figures[name] for figures in some)
    for role in ("rollout", "trainer", "reference", "reward"):
        metrics[f"{key}_busy_{role}"] = statistics.median(figures["busy_fraction"].get(role, 0.0) for figures in some)
    if reached:
        metrics[f"{key}_seconds_to_0.8"] = statistics.median(reached)
    return metrics


def at_bound(bound: int) -> Part:
    """The measurement at a staleness bound."""

    def measure(options: Options) -> Figures:
        if options.quick and bound > 1:
            raise Skipped("a quick run has the bounds 0 and 1")
        seeds = 1 if options.quick else options.seeds if bound == 1 else options.other_seeds
        words = ("--max-staleness", bound, "--steps", QUICK_STEPS if options.quick else STEPS)
        with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
            jobs = [run_job(Path(folder) / str(seed), "--seed", seed, *words) for seed in range(seeds)]
            return metrics_of(jobs, bound)

    return measure


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10, help="seeds at staleness 1")
    parser.add_argument("--other-seeds", type=int, default=3, help="seeds at the other bounds")


BENCH = Bench(
    about=__doc__,
    parts={f"bound_{bound}": at_bound(bound) for bound in BOUNDS},
    add_options=add_options,
    machine=lambda options: {"steps": QUICK_STEPS if options.quick else STEPS},
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
