"""Row `runs`: the default job with each preset, by the command that a user types: the reward of the last ten steps.

All runs start from one embedded model, built once: what differs between presets is training alone.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from main_job import run_job

from flowrt.recipes.algorithms import PRESETS
from objectives_rows.stale_loop import embedded_model

STEPS, LEARNED = 120, 0.9
"""Steps of the job, and the mean reward of its last ten that counts as learned."""
SEEDS, BOUNDS = 3, (0, 4)
QUICK = ("reinforce", "dapo", "decoupled")


def rewards(folder: Path, model: Path, name: str, seeds: int, bound: int) -> list[float]:
    """The mean reward of the last ten steps of each seed.

    With a group filter the rewards of a step are those of groups that are not all right, so then it is the mean reward
    of held-out problems, answered greedily, after training.
    """
    figure = "eval_last" if PRESETS[name].filter.zero_variance else "reward_last"
    flags = ["--algorithm", name, "--model", str(model), "--trainer.save", "False"]
    found = []
    for seed in range(seeds):
        result = run_job(folder / f"{name}-{bound}-{seed}", seed, bound, STEPS, *flags)
        found.append(float(result[figure]))
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
    chosen = list(names or (QUICK if quick else PRESETS))
    found: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = embedded_model(f"{folder}/start")
        # The hardest bound first: a measurement that is stopped has said most by then.
        for bound in reversed(bounds):
            for name in chosen:
                found[name, bound] = statistics.median(rewards(Path(folder), model, name, seeds, bound))
    return {"runs_seeds": float(seeds), "runs_steps": float(STEPS)} | figures(found)


def figures(found: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """The figures of the row, from the reward of each preset and bound."""
    names = sorted({name for name, _ in found})
    bounds = sorted({bound for _, bound in found})
    kept = [found[name, bounds[-1]] / max(found[name, bounds[0]], 1e-9) for name in names]
    return {
        **{f"reward_{name}_bound_{bound}": value for (name, bound), value in found.items()},
        "presets_failed": float(sum(min(found[name, bound] for bound in bounds) < LEARNED for name in names)),
        "bound4_over_bound0_min": min(kept),
    }
