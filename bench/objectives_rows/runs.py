"""Row `runs`: the reward of the last ten steps of the default job with each preset, run by `flowrt run`.

All runs start from one embedded model, which is built once, so that presets differ only in training.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.jobs import run_job

from flowrt.recipes.algorithms import PRESETS
from objectives_rows.stale_loop import embedded_model

STEPS, LEARNED = 120, 0.9
"""Steps of the job, and the mean reward of its last ten that counts as learned."""
SEEDS, BOUNDS = 3, (0, 4)
QUICK = ("reinforce", "dapo", "decoupled")


def rewards(folder: Path, model: Path, name: str, seeds: int, bound: int) -> list[float]:
    """The mean reward of the last ten steps of a preset, for each seed.

    With the filter on zero variance, groups of equal rewards are not trained, so that the rewards of steps are biased;
    the values are then mean rewards of held-out problems, answered greedily, after training.

    Args:
        folder: directory of the runs.
        model: directory of the initial model.
        name: the preset.
        seeds: number of seeds.
        bound: staleness bound.
    """
    metric = "eval_last" if PRESETS[name].filter.zero_variance else "reward_last"
    flags = ["--algorithm", name, "--model", str(model), "--trainer.save", "False"]
    final_rewards = []
    for seed in range(seeds):
        words = ("--seed", seed, "--max-staleness", bound, "--steps", STEPS, *flags)
        final_rewards.append(float(run_job(folder / f"{name}-{bound}-{seed}", *words).summary[metric]))
    sys.stdout.write(f"{name}, bound {bound}: {', '.join(f'{value:.3f}' for value in final_rewards)}\n")
    sys.stdout.flush()
    return final_rewards


def measure(quick: bool, seeds: int = SEEDS, names: Sequence[str] = ()) -> dict[str, float]:
    """Medians over seeds, the number of presets that did not learn, and the reward at the largest over the least bound.

    Args:
        quick: only three presets, one seed, bound 1.
        seeds: number of runs of each preset at each bound.
        names: the presets; empty: all.
    """
    bounds, seeds = ((1,), 1) if quick else (BOUNDS, seeds)
    chosen = list(names or (QUICK if quick else PRESETS))
    final_rewards: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = embedded_model(f"{folder}/start")
        # The largest bound first, so that an interrupted measurement has printed the most informative results.
        for bound in reversed(bounds):
            for name in chosen:
                final_rewards[name, bound] = statistics.median(rewards(Path(folder), model, name, seeds, bound))
    return {"runs_seeds": float(seeds), "runs_steps": float(STEPS)} | figures(final_rewards)


def figures(final_rewards: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """The metrics of the row, from the reward of each preset and bound."""
    names = sorted({name for name, _ in final_rewards})
    bounds = sorted({bound for _, bound in final_rewards})
    kept = [final_rewards[name, bounds[-1]] / max(final_rewards[name, bounds[0]], 1e-9) for name in names]
    return {
        **{f"reward_{name}_bound_{bound}": value for (name, bound), value in final_rewards.items()},
        "presets_failed": float(sum(min(final_rewards[name, bound] for bound in bounds) < LEARNED for name in names)),
        "bound4_over_bound0_min": min(kept),
    }
