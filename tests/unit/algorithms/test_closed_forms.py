"""Every policy loss, weight and KL estimate against a scalar formula: value and gradient of drawn passes, float64.

Gradients of the scalar formulas come from complex steps: the imaginary part of f(x + ih) / h is f'(x) to the last
digit, and `sg` drops it where the formula stops the gradient.
"""

import cmath
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from flowrt.algorithms.algorithm import Tokens
from flowrt.algorithms.kl import KL_ESTIMATORS, KlEstimator
from flowrt.algorithms.objective import Aggregation, Correction, Kl, Objective, OnlineDpo, Rejection
from flowrt.algorithms.policy_losses import (
    Aspo,
    Cispo,
    CrossEntropy,
    Dppo,
    Gmpo,
    Gspo,
    PolicyLoss,
    Ppo,
    Reinforce,
    Sapo,
    Topr,
    Vespo,
)

CASES = 200
STEP = 1e-30
BOUND = 1e-12
LIMIT = 20.0


@dataclass(frozen=True)
class Sample:
    """One sample of a drawn pass: log-probabilities of its tokens, its advantage and weight, and its group."""

    policy: list[complex]
    anchor: list[float]
    rollout: list[float]
    reference: list[float]
    advantage: float
    weight: float
    group: int


def sg(value: complex) -> float:
    """The value without its gradient."""
    return complex(value).real


def clamp(value: complex, low: float, high: float) -> complex:
    real = complex(value).real
    return low if real < low else high if real > high else value


def log_ratios(sample: Sample) -> list[complex]:
    return [clamp(policy - anchor, -LIMIT, LIMIT) for policy, anchor in zip(sample.policy, sample.anchor, strict=True)]


def mean(values: Sequence[complex]) -> complex:
    return sum(values) / len(values) if values else 0.0


def largest(first: complex, second: complex) -> complex:
    return first if complex(first).real >= complex(second).real else second


def clipped(ratio: complex, advantage: float, low: float, high: float) -> complex:
    return largest(-ratio * advantage, -clamp(ratio, 1 - low, 1 + high) * advantage)


def ppo(sample: Sample, low: float = 0.2, high: float = 0.28, dual: float = math.inf) -> list[complex]:
    losses = []
    for log in log_ratios(sample):
        ratio = cmath.exp(log)
        capped = sample.advantage < 0 and ratio.real > dual
        losses.append(-dual * sample.advantage if capped else clipped(ratio, sample.advantage, low, high))
    return losses


def ppo_delta(sample: Sample) -> list[complex]:
    advantage = sample.advantage
    losses = []
    for log in log_ratios(sample):
        ratio = cmath.exp(log)
        losses.append(largest(-clamp(ratio, 0, 1.5) * advantage, -clamp(ratio, 0.8, 1.2) * advantage))
    return losses


def reinforce(sample: Sample) -> list[complex]:
    return [-cmath.exp(policy - sg(policy)) * sample.advantage for policy in sample.policy]


def cispo(sample: Sample) -> list[complex]:
    pairs = zip(log_ratios(sample), sample.policy, strict=True)
    return [-sg(clamp(cmath.exp(sg(log)), 0.0, 5.0)) * sample.advantage * policy for log, policy in pairs]


def gspo(sample: Sample) -> list[complex]:
    loss = clipped(cmath.exp(mean(log_ratios(sample))), sample.advantage, 3e-4, 4e-4)
    return [loss] * len(sample.policy)


def luspo(sample: Sample) -> list[complex]:
    return [loss * len(sample.policy) for loss in gspo(sample)]


def gmpo(sample: Sample) -> list[complex]:
    if sample.advantage >= 0:
        kept = [min(log, clamp(log, -0.4, 0.4), key=lambda one: complex(one).real) for log in log_ratios(sample)]
    else:
        kept = [largest(log, clamp(log, -0.4, 0.4)) for log in log_ratios(sample)]
    return [-sample.advantage * cmath.exp(mean(kept))] * len(sample.policy)


def sapo(sample: Sample) -> list[complex]:
    tau = 1.0 if sample.advantage > 0 else 1.05
    losses = []
    for log in log_ratios(sample):
        at = tau * (cmath.exp(log) - 1)
        sigmoid = 1 / (1 + cmath.exp(-at)) if at.real >= 0 else cmath.exp(at) / (1 + cmath.exp(at))
        losses.append(-4 / tau * sigmoid * sample.advantage)
    return losses


def dppo(sample: Sample, distance: str) -> list[complex]:
    losses = []
    for log, policy, anchor in zip(log_ratios(sample), sample.policy, sample.anchor, strict=True):
        p, q = math.exp(sg(policy)), math.exp(anchor)
        far = abs(p - q) if distance == "tv" else bernoulli_kl(q, p)
        masked = far > 0.2 and (p - q) * sample.advantage > 0
        losses.append(-(0.0 if masked else min(math.exp(sg(log)), 20.0)) * sample.advantage * policy)
    return losses


def bernoulli_kl(q: float, p: float) -> float:
    tiny = torch.finfo(torch.float64).eps
    q, p = min(max(q, tiny), 1 - tiny), min(max(p, tiny), 1 - tiny)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def vespo(sample: Sample) -> list[complex]:
    k, rate = (2.0, 3.0) if sample.advantage >= 0 else (3.0, 2.0)
    log = sg(clamp(sum(log_ratios(sample)), -LIMIT, LIMIT))
    weight = math.exp(rate + k * log - rate * math.exp(log))
    return [-weight * sample.advantage * policy for policy in sample.policy]


def topr(sample: Sample, level: str) -> list[complex]:
    whole = sg(clamp(sum(log_ratios(sample)), -LIMIT, LIMIT))
    losses = []
    for log, policy in zip(log_ratios(sample), sample.policy, strict=True):
        ratio = math.exp(whole if level == "sequence" else sg(log))
        losses.append(-(1.0 if sample.advantage > 0 else min(ratio, 1.0)) * sample.advantage * policy)
    return losses


def aspo(sample: Sample) -> list[complex]:
    if sample.advantage <= 0:
        return ppo(sample, 0.2, 0.2, 3.0)
    ratios = [math.exp(sg(log)) for log in log_ratios(sample)]
    weights = [0.0 if ratio > 1.2 else min(1 / ratio, 3.0) for ratio in ratios]
    return [-weight * sample.advantage * policy for weight, policy in zip(weights, sample.policy, strict=True)]


LOSSES: dict[str, tuple[PolicyLoss, Callable[[Sample], list[complex]]]] = {
    "reinforce": (Reinforce(), reinforce),
    "cross_entropy": (CrossEntropy(), lambda one: [-one.advantage * policy for policy in one.policy]),
    "ppo": (Ppo(clip_low=0.2, clip_high=0.28), ppo),
    "ppo_dual": (Ppo(clip_low=0.2, clip_high=0.28, dual_clip=3.0), lambda one: ppo(one, dual=3.0)),
    "ppo_delta": (Ppo(clip_low=0.2, clip_high=0.2, delta=1.5), ppo_delta),
    "cispo": (Cispo(), cispo),
    "gspo": (Gspo(), gspo),
    "luspo": (Gspo(length_weighted=True), luspo),
    "gmpo": (Gmpo(), gmpo),
    "sapo": (Sapo(), sapo),
    "dppo_tv": (Dppo(), lambda one: dppo(one, "tv")),
    "dppo_kl": (Dppo(distance="kl"), lambda one: dppo(one, "kl")),
    "vespo": (Vespo(), vespo),
    "topr": (Topr(), lambda one: topr(one, "sequence")),
    "topr_token": (Topr(level="token"), lambda one: topr(one, "token")),
    "aspo": (Aspo(), aspo),
}


def draw(rng: random.Random) -> list[Sample]:
    """A pass of 1 to 4 samples of 0 to 6 tokens; some log ratios are as large as 25 nats."""
    spread = rng.choice((0.0, 0.02, 0.3, 2.0, 25.0))
    samples = []
    for _ in range(rng.randint(1, 4)):
        length = rng.choice((0, 1, 1, 2, 3, 6))
        policy: list[complex] = [-rng.expovariate(1.0) - 1e-3 for _ in range(length)]
        moved = [[min(one.real + rng.uniform(-spread, spread), -1e-4) for one in policy] for _ in range(3)]
        advantage = rng.choice((0.0, 1.0, -1.0, rng.gauss(0, 1), rng.gauss(0, 100)))
        samples.append(
            Sample(
                policy=policy,
                anchor=moved[0],
                rollout=moved[1],
                reference=moved[2],
                advantage=advantage,
                weight=rng.choice((1.0, 0.5)),
                group=rng.randint(0, 1),
            )
        )
    return samples


def tokens_of(samples: Sequence[Sample]) -> Tokens:
    def flat(lists: Sequence[Sequence[complex]]) -> torch.Tensor:
        return torch.tensor([complex(one).real for values in lists for one in values], dtype=torch.float64)

    lengths = [len(one.policy) for one in samples]
    logprobs_T = flat([one.policy for one in samples]).requires_grad_()
    return Tokens(
        logprobs_T=logprobs_T,
        anchor_T=flat([one.anchor for one in samples]),
        rollout_T=flat([one.rollout for one in samples]),
        sample_T=torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths)),
        advantages_N=torch.tensor([one.advantage for one in samples], dtype=torch.float64),
        weights_N=torch.tensor([one.weight for one in samples], dtype=torch.float64),
        group_N=torch.tensor([one.group for one in samples]),
        valid_T=torch.ones(sum(lengths), dtype=torch.float64),
        reference_T=flat([one.reference for one in samples]),
    )


Total = Callable[[Sequence[Sample]], complex]


def check(value: torch.Tensor, tokens: Tokens, samples: Sequence[Sample], total: Total) -> None:
    """A scalar of the tokens and its gradient, against the formula and its complex steps, relative to their size."""
    (slope_T,) = torch.autograd.grad(value, tokens.logprobs_T, allow_unused=True)
    expected = total(samples)
    slopes = []
    for sample in samples:
        for at, policy in enumerate(sample.policy):
            sample.policy[at] = policy + 1j * STEP
            slopes.append(complex(total(samples)).imag / STEP)
            sample.policy[at] = policy
    assert abs(value.item() - complex(expected).real) <= BOUND * max(1.0, abs(expected))
    got = torch.zeros_like(tokens.logprobs_T) if slope_T is None else slope_T
    scale = max([1.0, *map(abs, slopes)])
    assert max([0.0, *(abs(a - b) for a, b in zip(got.tolist(), slopes, strict=True))]) <= BOUND * scale


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_equals_its_formula(name: str) -> None:
    loss, formula = LOSSES[name]
    rng = random.Random(name)
    for _ in range(CASES):
        samples = draw(rng)
        tokens = tokens_of(samples)
        # Weighted by position, so that two wrong tokens cannot cancel out.
        weights = [1.0 + 0.1 * at for at in range(len(tokens.logprobs_T))]
        loss_T, _ = loss(tokens)

        def total(drawn: Sequence[Sample], weights: Sequence[float] = weights) -> complex:
            losses = [one for sample in drawn for one in formula(sample)]
            return sum((weight * one for weight, one in zip(weights, losses, strict=True)), 0j)

        check((loss_T * torch.tensor(weights, dtype=torch.float64)).sum(), tokens, samples, total)


def k3(delta: complex) -> complex:
    return (
        cmath.exp(delta) - delta - 1 if abs(delta) > 1e-2 else sum(delta**n / math.factorial(n) for n in range(2, 12))
    )


def estimate(name: KlEstimator, policy: complex, reference: float, rollout: float) -> complex:
    log = policy - reference
    delta = clamp(-log, -LIMIT, LIMIT)
    match name:
        case "k1":
            return log
        case "k2":
            return log * log / 2
        case "k3":
            return k3(delta)
        case "k3_with_k2_slope":
            return log * log / 2 + sg(k3(delta)) - sg(log * log / 2)
        case "unbiased":
            return cmath.exp(clamp(policy - rollout, -LIMIT, LIMIT)) * k3(delta)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimate_equals_its_formula(name: KlEstimator) -> None:
    rng = random.Random(name)
    for _ in range(CASES):
        samples = draw(rng)
        tokens = tokens_of(samples)
        assert tokens.reference_T is not None

        def total(drawn: Sequence[Sample]) -> complex:
            return sum(
                (
                    estimate(name, policy, reference, rollout)
                    for one in drawn
                    for policy, reference, rollout in zip(one.policy, one.reference, one.rollout, strict=True)
                ),
                0j,
            )

        kl_T = KL_ESTIMATORS[name](tokens.logprobs_T, tokens.reference_T, tokens.rollout_T)
        check(kl_T.sum(), tokens, samples, total)


def corrected(sample: Sample, correction: Correction) -> list[float]:
    """The importance weights of a sample's tokens."""
    logs = [
        sg(clamp(anchor - rollout, -LIMIT, LIMIT))
        for anchor, rollout in zip(sample.anchor, sample.rollout, strict=True)
    ]
    match correction.level:
        case "off":
            return [1.0] * len(logs)
        case "sequence":
            logs = [sg(clamp(sum(logs), -LIMIT, LIMIT))] * len(logs)
        case "geometric":
            logs = [sg(mean(logs))] * len(logs)
        case "token":
            pass
    ratios = [math.exp(log) for log in logs]
    low, high = correction.low, correction.high
    if correction.mode == "mask":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    return [min(max(ratio, low), high) for ratio in ratios]


def kept(sample: Sample, rejection: Rejection) -> bool:
    drift = sg(mean([clamp(p - r, -LIMIT, LIMIT) for p, r in zip(map(sg, sample.policy), sample.rollout, strict=True)]))
    in_band = rejection.low <= math.exp(drift) <= rejection.high
    return in_band and (sample.advantage >= 0 or -drift <= rejection.negative_kl)


CORRECTIONS = [
    Correction(level="off"),
    *(Correction(level=level, high=2.0) for level in ("token", "sequence", "geometric")),
    Correction(low=0.5, high=5.0),
    *(Correction(level=level, mode="mask", low=0.5, high=5.0) for level in ("token", "sequence", "geometric")),
]


@pytest.mark.parametrize("style", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_composed_objective_equals_its_formula(correction: Correction, style: str) -> None:
    aggregation = Aggregation(style, 7)  # type: ignore[arg-type]  # one of its literals
    rng = random.Random(f"{correction}{style}")
    for _ in range(CASES // 10):
        rejection = rng.choice((Rejection(), Rejection(low=0.9, high=1.1), Rejection(negative_kl=0.1)))
        objective = Objective(
            policy=Ppo(clip_low=0.2, clip_high=0.28),
            correction=correction,
            rejection=rejection,
            kl=Kl(coef=0.1),
            aggregation=aggregation,
        )
        samples = draw(rng)
        tokens = tokens_of(samples)
        (term,) = objective.terms(tokens)

        def total(drawn: Sequence[Sample], rejection: Rejection = rejection) -> complex:
            whole = 0j
            for one in drawn:
                weights = corrected(one, correction)
                keep = one.weight * kept(one, rejection)
                kls = [estimate("k3", p, r, m) for p, r, m in zip(one.policy, one.reference, one.rollout, strict=True)]
                losses = [w * keep * loss + 0.1 * kl for w, loss, kl in zip(weights, ppo(one), kls, strict=True)]
                match style:
                    case "token_mean":
                        whole += sum(losses)
                    case "sequence_mean":
                        whole += mean(losses)
                    case "constant":
                        whole += sum(losses) / 7
            return whole

        check(term.loss_sum, tokens, samples, total)
        assert term.per == ("token" if style == "token_mean" else "sample")


def test_online_dpo_equals_its_formula() -> None:
    rng = random.Random(5)
    for _ in range(CASES):
        samples = [
            Sample(**{**vars(one), "advantage": float(rng.choice((-1, 1)))}) for one in draw(rng) if len(one.policy)
        ]
        if not samples:
            continue
        tokens = tokens_of(samples)
        (term,) = OnlineDpo(beta=0.3).terms(tokens)

        def total(drawn: Sequence[Sample]) -> complex:
            whole = 0j
            for group in {one.group for one in drawn}:
                members = [one for one in drawn if one.group == group]
                margin = sum(one.advantage * (sum(one.policy) - sum(one.reference)) for one in members)
                at = 0.3 * margin
                whole += cmath.log(1 + cmath.exp(-at)) if complex(at).real > 0 else cmath.log(1 + cmath.exp(at)) - at
            return whole

        check(term.loss_sum, tokens, samples, total)
        assert term.per == "group"
