"""Row `runs`: the default job with each preset, by the command that a user types: the reward of the last ten steps.

All runs start from one embedded model, built once: what differs between presets is training alone.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from main_job import run_job

from flowrt.recipes.algorithms import PRESETS
from objectives_rows.stale_loop import embedded_model

STEPS, LEARNED = 120, 0.9
"""Steps of the job, and the mean reward of its last ten that counts as learned."""
SEEDS, BOUNDS = 3, (0, 4)
QUICK = ("reinforce", "dapo", "decoupled")


def rewards(folder: Path, model: Path, name: str, seeds: int, bound: int) -> list[float]:
    """The mean reward of the last ten steps of each seed."""
    flags = ["--algorithm", name, "--model", str(model), "--data.eval-prompts", "0", "--trainer.save", "False"]
    found = []
    for seed in range(seeds):
        result = run_job(folder / f"{name}-{bound}-{seed}", seed, bound, STEPS, *flags)
        found.append(float(result["reward_last"]))
    sys.stdout.write(f"{name}, bound {bound}: {', '.join(f'{value:.3f}' for value in found)}\n")
    sys.stdout.flush()
    return found


def measure(quick: bool, seeds: int = SEEDS, names: Sequence[str] = ()) -> dict[str, float]:
    """Medians over seeds, how many presets did not learn, and what the largest bound keeps of the smallest.

    Args:
        quick: three presets, one seed, bound 1.
        seeds: runs of each preset at each bound.
        names: these presets; default: all.
    """
    bounds, seeds = ((1,), 1) if quick else (BOUNDS, seeds)
    metrics: dict[str, float] = {"runs_seeds": float(seeds), "runs_steps": float(STEPS)}
    failed, kept = 0, [1.0]
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = embedded_model(f"{folder}/start")
        for name in names or (QUICK if quick else PRESETS):
            medians = {bound: statistics.median(rewards(Path(folder), model, name, seeds, bound)) for bound in bounds}
            metrics |= {f"reward_{name}_bound_{bound}": value for bound, value in medians.items()}
            failed += min(medians.values()) < LEARNED
            kept.append(medians[bounds[-1]] / max(medians[bounds[0]], 1e-9))
    return metrics | {"presets_failed": float(failed), "bound4_over_bound0_min": min(kept)}
