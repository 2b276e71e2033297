"""Row `retention`: the share of the gain that is kept if one generation provides the mini-batches of N updates.

The experiment of Asynchronous RLHF (arXiv 2410.18252, section 3.2): the generating weights are refreshed after N
updates, so the samples of the last of these updates are N - 1 updates old. The numbers of updates and of samples are
the same for every N. Kept share: the gain in held-out accuracy over the initial model, relative to the gain at N = 1.
The paper measures win rates of a summarisation task; here the task is the default one, and PPO is the preset grpo
without its divergence term.
"""

from itertools import product

from objectives_rows.stale_loop import Outcome, StaleRun, mean_of, train_all

UPDATES, SEEDS, REFRESH = 128, (0, 1, 2), (1, 16, 64)
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "ppo": ("--algorithm", "grpo", "--algorithm.kl.coef", "0"),
    "dpo": ("--algorithm", "dpo_online"),
}


def measure(quick: bool) -> dict[str, float]:
    """Accuracy at each N, and the share of the gain that is kept."""
    updates, seeds, refresh = (64, SEEDS[:1], (1, 64)) if quick else (UPDATES, SEEDS, REFRESH)
    points = list(product(OBJECTIVES, refresh, seeds))
    outcomes = train_all([StaleRun(OBJECTIVES[name], seed, updates, 0, every) for name, every, seed in points])
    curves: dict[tuple[str, int], list[Outcome]] = {}
    for (name, every, _), outcome in zip(points, outcomes, strict=True):
        curves.setdefault((name, every), []).append(outcome)
    metrics = {
        f"retention_{name}_accuracy_{every}": mean_of(of_seeds, lambda outcome: outcome.after)
        for (name, every), of_seeds in curves.items()
    }
    for name, every in curves:
        gains = {
            size: mean_of(curves[name, size], lambda outcome: outcome.after - outcome.before) for size in (1, every)
        }
        if every > 1:
            metrics[f"retention_{name}_{every}"] = gains[every] / max(gains[1], 1e-9)
    return metrics
