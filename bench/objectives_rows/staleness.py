"""Row `staleness`: held-out accuracy after training on samples that are all 0, 1, 2, 4, 8 or 16 versions old.

Every sample has exactly that staleness (`stale_loop`), except in the first steps. That is harder than a bound: a run
with the bound 16 has samples of every staleness up to it. Mean, least and largest over seeds, for each objective.
``none`` is REINFORCE without importance correction. No objective has a divergence term, so that only the treatment of
stale samples differs.
"""

from itertools import product

from objectives_rows.stale_loop import Outcome, StaleRun, mean_of, train_all

STEPS, SEEDS, LAGS = 60, (0, 1, 2, 3, 4), (0, 1, 2, 4, 8, 16)
NO_KL = ("--algorithm.kl.coef", "0")
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "none": ("--algorithm", "reinforce", *NO_KL, "--algorithm.correction.level", "off"),
    "reinforce": ("--algorithm", "reinforce", *NO_KL),
    "grpo": ("--algorithm", "grpo", *NO_KL),
    "gspo": ("--algorithm", "gspo"),
    "m2po": ("--algorithm", "m2po"),
    "topr": ("--algorithm", "topr"),
    "decoupled": ("--algorithm", "decoupled"),
}
QUICK = ("reinforce", "decoupled")


def measure(quick: bool) -> dict[str, float]:
    """The accuracy of each objective at each staleness; best and worst ratio of accuracy at 16 to accuracy at 0."""
    names = QUICK if quick else tuple(OBJECTIVES)
    lags, seeds = ((LAGS[0], LAGS[-1]), SEEDS[:1]) if quick else (LAGS, SEEDS)
    points = list(product(names, lags, seeds))
    outcomes = train_all([StaleRun(OBJECTIVES[name], seed, STEPS, lag) for name, lag, seed in points])
    curves: dict[tuple[str, int], list[Outcome]] = {}
    for (name, lag, _), outcome in zip(points, outcomes, strict=True):
        curves.setdefault((name, lag), []).append(outcome)
    metrics: dict[str, float] = {"staleness_steps": float(STEPS), "staleness_seeds": float(len(seeds))}
    for (name, lag), of_seeds in curves.items():
        after = [seed.after for seed in of_seeds]
        metrics[f"staleness_{name}_{lag}"] = mean_of(of_seeds, lambda outcome: outcome.after)
        metrics |= {f"staleness_{name}_{lag}_least": min(after), f"staleness_{name}_{lag}_most": max(after)}
    kept = [metrics[f"staleness_{name}_16"] / metrics[f"staleness_{name}_0"] for name in names]
    return metrics | {"staleness16_best": max(kept), "staleness16_worst": min(kept)}
