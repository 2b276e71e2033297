"""Row `token_budget`: C3PO (arXiv 2506.14731): the spread of trained tokens per step, and the bias in lengths.

`FixedTokens` is the policy by which the controller cuts a step (``trainer.tokens_per_step``); it is called with drawn
lengths, since its decision depends only on lengths. They are log-normal with a heavy tail, and the budget is 0.8 of the
mean step, so some steps have fewer tokens than the budget. A partly trained sample counts as that fraction of a sample.
"""

import random
import statistics

from flowrt.controller.policies.batching import FixedTokens

SAMPLES, BUDGET_SHARE, SIGMA, MEDIAN = 128, 0.8, 1.0, 200.0


def lengths_of_step(rng: random.Random) -> list[int]:
    """The response lengths of the samples of a step, in tokens."""
    return [max(1, round(MEDIAN * rng.lognormvariate(0.0, SIGMA))) for _ in range(SAMPLES)]


def spread(tokens: list[int]) -> float:
    """Coefficient of variation: standard deviation over mean."""
    return statistics.pstdev(tokens) / statistics.fmean(tokens)


def measure(quick: bool) -> dict[str, float]:
    """The spread without the budget over that with it, the former, and the mean trained length over that of all."""
    rng = random.Random(0)
    steps = [lengths_of_step(rng) for _ in range(300 if quick else 3_000)]
    policy = FixedTokens(round(BUDGET_SHARE * statistics.fmean(map(sum, steps))))
    kept = [policy.kept(lengths, step) for step, lengths in enumerate(steps)]
    trained = sum(map(sum, kept))
    sample_equivalents = sum(
        part / length
        for cut, lengths in zip(kept, steps, strict=True)
        for part, length in zip(cut, lengths, strict=True)
    )
    mean = statistics.fmean(length for lengths in steps for length in lengths)
    return {
        "c3po_cv_ratio": spread([sum(lengths) for lengths in steps]) / spread([sum(cut) for cut in kept]),
        "c3po_cv_without": spread([sum(lengths) for lengths in steps]),
        "c3po_length_bias": trained / sample_equivalents / mean,
    }
