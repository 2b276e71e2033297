"""Row `runs`: the default job with each preset, by the command that a user types: the reward of the last ten steps."""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from main_job import run_job

from flowrt.recipes.algorithms import PRESETS

STEPS, LEARNED = 120, 0.9
"""Steps of the job, and the mean reward of its last ten that counts as learned."""
SEEDS, BOUNDS = (0, 1, 2), (0, 4)
QUICK = ("reinforce", "dapo", "decoupled")


def rewards(name: str, seeds: Sequence[int], bound: int) -> list[float]:
    """The mean reward of the last ten steps of each seed."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        return [
            float(run_job(Path(folder) / f"{name}-{seed}", seed, bound, STEPS, "--algorithm", name)["reward_last"])
            for seed in seeds
        ]


def measure(quick: bool) -> dict[str, float]:
    """Medians over seeds, how many presets did not learn, and what the largest bound keeps of the smallest."""
    bounds = (1,) if quick else BOUNDS
    metrics: dict[str, float] = {}
    failed, kept = 0, [1.0]
    for name in QUICK if quick else PRESETS:
        medians = {bound: statistics.median(rewards(name, SEEDS[:1] if quick else SEEDS, bound)) for bound in bounds}
        metrics |= {f"reward_{name}_bound_{bound}": value for bound, value in medians.items()}
        failed += min(medians.values()) < LEARNED
        kept.append(medians[bounds[-1]] / max(medians[bounds[0]], 1e-9))
    return metrics | {"presets_failed": float(failed), "bound4_over_bound0_min": min(kept)}
