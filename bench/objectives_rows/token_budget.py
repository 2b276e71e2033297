"""Row `token_budget`: C3PO (arXiv 2506.14731), the spread of trained tokens a step, and whether lengths are biased.

`FixedTokens` is the policy by which the controller cuts a step (``trainer.tokens_per_step``); it is called with drawn
lengths, since only lengths decide. They are log-normal with a heavy tail, and the budget is 0.8 of the mean step, so
some steps have too few tokens. A sample that is trained in part counts by that part.
"""

import random
import statistics

from flowrt.controller.policies.batching import FixedTokens

SAMPLES, BUDGET_SHARE, SIGMA, MEDIAN = 128, 0.8, 1.0, 200.0


def lengths_of_step(rng: random.Random) -> list[int]:
    return [max(1, round(MEDIAN * rng.lognormvariate(0.0, SIGMA))) for _ in range(SAMPLES)]


def spread(tokens: list[int]) -> float:
    """Coefficient of variation."""
    return statistics.pstdev(tokens) / statistics.fmean(tokens)


def measure(quick: bool) -> dict[str, float]:
    """How much smaller the spread is with the budget, and the mean length of what is trained over that of all."""
    rng = random.Random(0)
    steps = [lengths_of_step(rng) for _ in range(300 if quick else 3_000)]
    policy = FixedTokens(round(BUDGET_SHARE * statistics.fmean(map(sum, steps))), order="shuffled")
    kept = [policy.kept(lengths, step) for step, lengths in enumerate(steps)]
    trained = sum(map(sum, kept))
    parts = sum(
        part / length
        for cut, lengths in zip(kept, steps, strict=True)
        for part, length in zip(cut, lengths, strict=True)
    )
    mean = statistics.fmean(length for lengths in steps for length in lengths)
    return {
        "c3po_cv_ratio": spread([sum(lengths) for lengths in steps]) / spread([sum(cut) for cut in kept]),
        "c3po_cv_without": spread([sum(lengths) for lengths in steps]),
        "c3po_length_bias": trained / parts / mean,
    }
