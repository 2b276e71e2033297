"""Every part of an objective compared with its scalar formula, value and gradient, in float64.

An error is the distance from the formula, relative to the size of its values above 1 (`formulas.error`).
"""

import dataclasses
import random
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from flowrt.algorithms.losses import KL_ESTIMATORS, KlEstimator
from flowrt.algorithms.objective import (
    Aggregation,
    Entropy,
    Kl,
    Objective,
    OnlineDpo,
    Rejection,
    SecondMoment,
)
from tests.proofs.credit import ADVANTAGES, SELECTIONS, credit_error, draw_groups
from tests.proofs.formulas import (
    CORRECTIONS,
    LOSSES,
    Sample,
    draw,
    error,
    estimates,
    formula_of,
    loss_error,
    objective_total,
    preference_total,
    step_of,
    tokens_of,
)

CASES, QUICK_CASES = 1000, 50
REJECTIONS = (Rejection(), Rejection(low=0.9, high=1.1), Rejection(negative_kl=0.1), Rejection(binary_kl=0.003))
ESTIMATORS: list[KlEstimator] = list(KL_ESTIMATORS)


def worst_loss(name: str, cases: int) -> float:
    """The largest error of a policy loss, by its name in `LOSSES`, over drawn cases."""
    rng, worst = dice(name), 0.0
    for _ in range(cases):
        samples = draw(rng)
        worst = max(worst, loss_error(LOSSES[name][0], formula_of(name, samples), samples))
    return worst


def worst_estimate(name: KlEstimator, cases: int) -> float:
    """The largest error of a KL estimator over drawn cases."""

    def total(samples: Sequence[Sample]) -> complex:
        return sum((estimate for sample in samples for estimate in estimates(name, sample)), 0j)

    def case(rng: random.Random) -> float:
        samples = draw(rng)
        tokens = tokens_of(samples)
        assert tokens.reference_T is not None
        kl_T = KL_ESTIMATORS[name](tokens.logprobs_T, tokens.reference_T, tokens.rollout_T)
        return error(kl_T.sum(), tokens, samples, total)

    rng = dice(name)
    return max(case(rng) for _ in range(cases))


def draw_objective(rng: random.Random) -> tuple[Objective, str]:
    """A composed objective with parts drawn independently, and the name of its policy loss."""
    name = rng.choice(list(LOSSES))
    objective = Objective(
        policy=LOSSES[name][0],
        correction=rng.choice(CORRECTIONS),
        rejection=rng.choice(REJECTIONS),
        second_moment=rng.choice((None, SecondMoment(), SecondMoment(tau=1.0))),
        kl=rng.choice((None, Kl(), Kl(coef=0.1, estimator=rng.choice(ESTIMATORS)))),
        entropy=rng.choice((Entropy(), Entropy(coef=0.01), Entropy(coef=0.02, top=rng.uniform(0.1, 0.9)))),
        aggregation=rng.choice((Aggregation(), Aggregation("sequence_mean"), Aggregation("constant", 7))),
    )
    return objective, name


def objective_error(
    objective: Objective, loss: str, passes: Sequence[Sequence[Sample]], formula: Objective | None = None
) -> float:
    """The largest error of the sum of all terms, over the passes of a step.

    Args:
        objective: the objective whose code is called.
        loss: name of its policy loss in `LOSSES`.
        passes: the samples of each pass.
        formula: the objective whose formula it is compared with; None: the same one.
    """
    step = [sample for drawn in passes for sample in drawn]
    total = objective_total(formula or objective, formula_of(loss, step), step)
    measured = objective.measure(step_of(passes))
    worst = 0.0
    for samples in passes:
        tokens = tokens_of(samples, measured)
        loss_sum = sum(term.loss_sum for term in objective.terms(tokens))
        worst = max(worst, error(loss_sum + tokens.logprobs_T.sum() * 0.0, tokens, samples, total))
    return worst


def worst_objective(cases: int) -> float:
    """The largest error of composed objectives over drawn steps of two passes."""
    rng, worst = dice("objective"), 0.0
    for _ in range(cases):
        objective, loss = draw_objective(rng)
        passes = [draw(rng), draw(rng)]
        if any(sample.policy for drawn in passes for sample in drawn):
            worst = max(worst, objective_error(objective, loss, passes))
    return worst


def worst_preference(cases: int) -> float:
    """The largest error of online DPO over drawn samples that are chosen, rejected, or neither."""
    rng, worst = dice("preference"), 0.0
    for _ in range(cases):
        samples = [dataclasses.replace(sample, advantage=float(rng.choice((-1, 1, 0)))) for sample in draw(rng)]
        tokens = tokens_of(samples)
        for nll in (0.0, 0.7):
            (term,) = OnlineDpo(beta=0.3, nll=nll).terms(tokens)
            worst = max(worst, error(term.loss_sum, tokens, samples, preference_total(0.3, nll)))
    return worst


def worst_credit(name: str, cases: int) -> float:
    """The largest error of a credit rule over drawn groups."""
    rng = dice(name)
    single_group = name in ("reinforce", "batch_mean", "kl_in_reward", "overlong", *SELECTIONS)
    return max(credit_error(name, draw_groups(rng, 1 if single_group else 2)) for _ in range(cases))


def dice(name: str) -> random.Random:
    """A generator seeded with a name."""
    return random.Random(zlib.crc32(name.encode()))


def parts() -> dict[str, Callable[[int], float]]:
    """The comparisons by name: functions from a number of cases to the largest error."""
    worst: dict[str, Callable[[int], float]] = {f"loss {name}": partial(worst_loss, name) for name in LOSSES}
    worst |= {f"kl {name}": partial(worst_estimate, name) for name in ESTIMATORS}
    worst |= {f"credit {name}": partial(worst_credit, name) for name in (*ADVANTAGES, *SELECTIONS)}
    return {**worst, "objective": worst_objective, "online_dpo": worst_preference}


def measure(quick: bool) -> dict[str, float]:
    """The largest error of any part, the number of parts, and the cases of each."""
    cases = QUICK_CASES if quick else CASES
    errors = {name: part(cases) for name, part in parts().items()}
    return {
        "closed_form_max": max(errors.values()),
        "closed_form_parts": float(len(errors)),
        "closed_form_cases": cases,
    }
