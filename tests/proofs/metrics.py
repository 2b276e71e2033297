"""Scalar definitions of the metrics of an objective, as docs/reference/metrics.md words them, and drawn comparisons.

A definition counts or averages over the tokens of a step, one token at a time, and shares no code with
`flowrt.algorithms`.
"""

import math
import random
from collections.abc import Callable, Sequence

from flowrt.algorithms.objective import Correction, Objective, OnlineDpo
from tests.proofs.comparisons import dice, draw_objective
from tests.proofs.formulas import (
    Sample,
    bernoulli_kl,
    corrected,
    draw,
    drifts,
    entropy_threshold,
    estimates,
    kept,
    log_ratios,
    mean,
    second_moment_threshold,
    sg,
    stale_quantile,
    stale_scale,
    step_of,
    tokens_of,
)

TOLERANCE = 1e-11
"""Of a metric, relative to its size above 1."""

PerToken = list[float]
"""One number for each token of a sample."""


def ratios(sample: Sample) -> PerToken:
    """policy / anchor of each token."""
    return [math.exp(sg(log)) for log in log_ratios(sample)]


def geometric_ratio(sample: Sample) -> PerToken:
    """The geometric mean of the ratios of the sample, for each of its tokens."""
    return [math.exp(sg(mean(log_ratios(sample))))] * len(sample.policy)


def counted(values: Sequence[float], outside: Callable[[float], bool]) -> PerToken:
    """1 for each value that is outside, else 0."""
    return [float(outside(value)) for value in values]


def clipped(values: Sequence[float], advantage: float, low: float, high: float) -> dict[str, PerToken]:
    """``ratio``, and the tokens that PPO clips: below ``low`` for A < 0, above ``high`` for A > 0."""
    return {
        "ratio": list(values),
        "clipped_low": counted(values, lambda ratio: advantage < 0 and ratio < low),
        "clipped_high": counted(values, lambda ratio: advantage > 0 and ratio > high),
    }


def of_dppo(sample: Sample, distance: str) -> dict[str, PerToken]:
    """``ratio``, and the tokens that DPPO masks."""
    masked = []
    for policy, anchor in zip(sample.policy, sample.anchor, strict=True):
        p, q = math.exp(sg(policy)), math.exp(anchor)
        far = abs(p - q) if distance == "tv" else bernoulli_kl(q, p)
        masked.append(float(far > 0.2 and (p - q) * sample.advantage > 0))
    return {"ratio": ratios(sample), "masked": masked}


def of_topr(sample: Sample, level: str) -> dict[str, PerToken]:
    """``ratio``, and the tokens without positive advantage whose weight is the cap."""
    weights = ratios(sample)
    if level == "sequence":
        whole = sg(sum(sg(log) for log in log_ratios(sample)))
        weights = [math.exp(min(max(whole, -20.0), 20.0))] * len(sample.policy)
    return {
        "ratio": ratios(sample),
        "clipped_high": counted(weights, lambda weight: sample.advantage <= 0 and weight > 1.0),
    }


def of_gmpo(sample: Sample) -> dict[str, PerToken]:
    """``ratio``, and the tokens whose log ratio GMPO clips."""
    logs = [sg(log) for log in log_ratios(sample)]
    return {
        "ratio": ratios(sample),
        "clipped_low": counted(logs, lambda log: sample.advantage < 0 and log < -0.4),
        "clipped_high": counted(logs, lambda log: sample.advantage >= 0 and log > 0.4),
    }


def of_aspo(sample: Sample) -> dict[str, PerToken]:
    """PPO's, and the tokens whose ratio, for A > 0 the inverted one, exceeds 3."""
    values, advantage = ratios(sample), sample.advantage
    turned = [1 / value if advantage > 0 else value for value in values]
    dual = counted(turned, lambda ratio: advantage != 0 and ratio > 3.0)
    return clipped(values, advantage, 0.8, 1.2) | {"clipped_dual": dual}


def of_sat(sample: Sample, quantile: float) -> dict[str, PerToken]:
    """PPO's with the range of each token, and the factors of the ranges."""
    scales = [stale_scale(drift, quantile) for drift in drifts(sample)]
    pairs = list(zip(ratios(sample), scales, strict=True))
    advantage = sample.advantage
    return {
        "ratio": ratios(sample),
        "clip_range_factor": scales,
        "clipped_low": [float(advantage < 0 and ratio < 1 - 0.2 * scale) for ratio, scale in pairs],
        "clipped_high": [float(advantage > 0 and ratio > 1 + 0.2 * scale) for ratio, scale in pairs],
    }


def of_loss(name: str, sample: Sample, step: Sequence[Sample]) -> dict[str, PerToken]:
    """The metrics of a policy loss, by its name in `formulas.LOSSES`, for each token of a sample of a step."""
    values, advantage = ratios(sample), sample.advantage
    match name:
        case "reinforce" | "cross_entropy":
            return {}
        case "ppo":
            return clipped(values, advantage, 0.8, 1.28)
        case "ppo_dual":
            dual = counted(values, lambda ratio: advantage < 0 and ratio > 3.0)
            return clipped(values, advantage, 0.8, 1.28) | {"clipped_dual": dual}
        case "ppo_delta":
            return clipped(values, advantage, 0.8, 1.2)
        case "cispo":
            high = counted(values, lambda ratio: ratio > 5.0)
            return {"ratio": values, "clipped_low": [0.0] * len(values), "clipped_high": high}
        case "gspo" | "luspo":
            return clipped(geometric_ratio(sample), advantage, 1 - 3e-4, 1 + 4e-4)
        case "gmpo":
            return of_gmpo(sample)
        case "dppo_tv" | "dppo_kl":
            return of_dppo(sample, name.removeprefix("dppo_"))
        case "topr" | "topr_token":
            return of_topr(sample, "token" if name == "topr_token" else "sequence")
        case "aspo":
            return of_aspo(sample)
        case "sat":
            return of_sat(sample, stale_quantile(0.9, step))
        case _:
            return {"ratio": values}


def of_masks(objective: Objective, sample: Sample, step: Sequence[Sample]) -> dict[str, PerToken]:
    """The metrics of correction, rejection, masks, KL and entropy, for each token of a sample of a step."""
    tokens = len(sample.policy)
    unbounded = Correction(objective.correction.level, "truncate", 0.0, math.inf)
    before, after = corrected(sample, unbounded), corrected(sample, objective.correction)
    pairs = list(zip(before, after, strict=True))
    metrics = {
        "importance_truncated": [float(weight not in (0.0, ratio)) for ratio, weight in pairs],
        "importance_masked": [float(weight == 0.0) for _, weight in pairs],
    }
    if not objective.rejection.keeps_all:
        metrics["rejected"] = [float(not kept(sample, objective.rejection))] * tokens
    if objective.second_moment is not None:
        largest = second_moment_threshold(objective.second_moment, step)
        metrics["second_moment_masked"] = [float(drift * drift > largest) for drift in drifts(sample)]
    if objective.entropy.top < 1:
        least = entropy_threshold(objective.entropy, step)
        metrics["low_entropy_masked"] = [float(sg(nats) < least) for nats in sample.entropy]
    if objective.kl is not None:
        metrics["kl"] = [sample.valid * sg(estimate) for estimate in estimates(objective.kl.estimator, sample)]
    return metrics | {"entropy": [sg(nats) for nats in sample.entropy]}


def wrong_metrics(cases: int) -> dict[str, int]:
    """In how many drawn steps of two passes each metric differs from its definition; without those that never do."""
    rng = dice("metrics")
    wrong: dict[str, int] = {}
    for _ in range(cases):
        objective, loss = draw_objective(rng)
        passes = [draw(rng), draw(rng)]
        for name in differing(objective, loss, passes):
            wrong[name] = wrong.get(name, 0) + 1
    for _ in range(cases // 10):
        for name in differing_preference(rng):
            wrong[name] = wrong.get(name, 0) + 1
    return wrong


def differing(objective: Objective, loss: str, passes: Sequence[Sequence[Sample]]) -> list[str]:
    """Names of the metrics of a step whose sum over its tokens differs from that of the definition, or is missing."""
    step = [member for drawn in passes for member in drawn]
    expected: dict[str, float] = {}
    for sample in step:
        for name, values in (of_loss(loss, sample, step) | of_masks(objective, sample, step)).items():
            expected[name] = expected.get(name, 0.0) + math.fsum(values)
    measured = objective.measure(step_of(passes))
    actual: dict[str, float] = {}
    for samples in passes:
        for term in objective.terms(tokens_of(samples, measured)):
            for name, value in term.metrics.items():
                actual[name] = actual.get(name, 0.0) + float(value)
    return _different(actual, expected)


def differing_preference(rng: random.Random) -> list[str]:
    """As `differing`, of online DPO on one drawn pass: ``kl`` (k3) over tokens, ``margin`` over groups."""
    samples = [sample for sample in draw(rng) if sample.valid]
    if not samples:
        return []
    (term,) = OnlineDpo().terms(tokens_of(samples))
    actual = {name: float(value) for name, value in (*term.metrics.items(), *term.means.items())}
    margins = [sample.advantage * sg(sum(sample.policy) - sum(sample.reference)) for sample in samples]
    kl = [sg(estimate) for sample in samples for estimate in estimates("k3", sample)]
    return _different(actual, {"kl": math.fsum(kl), "margin": math.fsum(margins)})


def _different(actual: dict[str, float], expected: dict[str, float]) -> list[str]:
    names = sorted(actual.keys() | expected.keys())
    return [
        name
        for name in names
        if not abs(actual.get(name, math.nan) - expected.get(name, math.nan))
        <= TOLERANCE * max(1.0, abs(expected.get(name, 0.0)))
    ]
