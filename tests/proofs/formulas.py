"""Scalar formulas of every part of an objective, drawn cases, and the distance of the tensor code from them.

The formulas are written on Python numbers, one token or sample at a time, and share no code with `flowrt.algorithms`;
a loss of a sample is the list of the losses of its tokens. Gradients are computed by complex steps: the imaginary part
of f(x + ih) / h is f'(x) to the last digit, and `sg` drops it where the formula stops the gradient.
"""

import cmath
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flowrt.algorithms.algorithm import StepTokens, Tokens
from flowrt.algorithms.losses import (
    Aspo,
    Cispo,
    CrossEntropy,
    Dppo,
    Gmpo,
    Gspo,
    KlEstimator,
    PolicyLoss,
    Ppo,
    Reinforce,
    Sapo,
    Sat,
    Surrogate,
    Topr,
    Vespo,
)
from flowrt.algorithms.objective import Aggregation, Correction, Entropy, Objective, Rejection, SecondMoment

STEP = 1e-30
"""Length h of the complex step."""
LIMIT = 20.0
"""Bound of the absolute value of every clamped log ratio, in nats."""


@dataclass(frozen=True)
class Sample:
    """One sample of a drawn pass: log-probabilities and entropies (nats) of its tokens, advantage, weight and group.

    A sample that is not ``valid`` is excluded from the loss.
    """

    policy: list[complex]
    entropy: list[complex]
    anchor: list[float]
    rollout: list[float]
    reference: list[float]
    advantage: float
    weight: float
    group: int
    valid: bool = True


def sg(value: complex) -> float:
    """The value without its gradient (stop-gradient)."""
    return complex(value).real


def clamp(value: complex, low: float, high: float) -> complex:
    """The value between both bounds; outside them, a bound without gradient."""
    real = complex(value).real
    return low if real < low else high if real > high else value


def log_ratios(sample: Sample) -> list[complex]:
    """log(policy / anchor) of a sample's tokens, clamped to +-LIMIT."""
    return [clamp(policy - anchor, -LIMIT, LIMIT) for policy, anchor in zip(sample.policy, sample.anchor, strict=True)]


def mean(values: Sequence[complex]) -> complex:
    """The mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


def largest(first: complex, second: complex) -> complex:
    """The value with the larger real part; the first one if they are equal."""
    return first if complex(first).real >= complex(second).real else second


def clipped(ratio: complex, advantage: float, low: float, high: float) -> complex:
    """max(-rho A, -clip(rho, 1 - low, 1 + high) A)."""
    return largest(-ratio * advantage, -clamp(ratio, 1 - low, 1 + high) * advantage)


def ppo(sample: Sample, low: float = 0.2, high: float = 0.28, dual: float = math.inf) -> list[complex]:
    """PPO (arXiv 1707.06347, equation 7) with two clip bounds (arXiv 2503.14476) and dual clip (arXiv 1912.09729)."""
    losses = []
    for log in log_ratios(sample):
        ratio = cmath.exp(log)
        capped = sample.advantage < 0 and ratio.real > dual
        losses.append(-dual * sample.advantage if capped else clipped(ratio, sample.advantage, low, high))
    return losses


def ppo_delta(sample: Sample) -> list[complex]:
    """PPO with the unclipped ratio bounded at 1.5 (INTELLECT-2, arXiv 2505.07291)."""
    advantage = sample.advantage
    losses = []
    for log in log_ratios(sample):
        ratio = cmath.exp(log)
        losses.append(largest(-clamp(ratio, 0, 1.5) * advantage, -clamp(ratio, 0.8, 1.2) * advantage))
    return losses


def reinforce(sample: Sample) -> list[complex]:
    """-A policy / sg(policy), whose gradient is -A times that of log policy (Williams, 1992)."""
    return [-cmath.exp(policy - sg(policy)) * sample.advantage for policy in sample.policy]


def cispo(sample: Sample) -> list[complex]:
    """-sg(min(rho, 5)) A log policy (CISPO, arXiv 2506.13585, section 3.1)."""
    pairs = zip(log_ratios(sample), sample.policy, strict=True)
    return [-sg(clamp(cmath.exp(sg(log)), 0.0, 5.0)) * sample.advantage * policy for log, policy in pairs]


def gspo(sample: Sample) -> list[complex]:
    """The clipped loss of the ratio exp(mean of log ratios) (GSPO, arXiv 2507.18071, section 4.1)."""
    loss = clipped(cmath.exp(mean(log_ratios(sample))), sample.advantage, 3e-4, 4e-4)
    return [loss] * len(sample.policy)


def luspo(sample: Sample) -> list[complex]:
    """GSPO times the length of the sample (LUSPO, arXiv 2602.05261)."""
    return [loss * len(sample.policy) for loss in gspo(sample)]


def gmpo(sample: Sample) -> list[complex]:
    """The geometric mean of clipped ratios (GMPO, arXiv 2507.20673, equation 5)."""
    if sample.advantage >= 0:
        kept = [min(log, clamp(log, -0.4, 0.4), key=lambda value: complex(value).real) for log in log_ratios(sample)]
    else:
        kept = [largest(log, clamp(log, -0.4, 0.4)) for log in log_ratios(sample)]
    return [-sample.advantage * cmath.exp(mean(kept))] * len(sample.policy)


def sapo(sample: Sample) -> list[complex]:
    """-(4 / tau) sigmoid(tau (rho - 1)) A (SAPO, arXiv 2511.20347, equations 5 and 6)."""
    tau = 1.0 if sample.advantage > 0 else 1.05
    losses = []
    for log in log_ratios(sample):
        gate = tau * (cmath.exp(log) - 1)
        sigmoid = 1 / (1 + cmath.exp(-gate)) if gate.real >= 0 else cmath.exp(gate) / (1 + cmath.exp(gate))
        losses.append(-4 / tau * sigmoid * sample.advantage)
    return losses


def dppo(sample: Sample, distance: str) -> list[complex]:
    """-sg(min(rho, 20)) A log policy, 0 for tokens that moved too far (DPPO, arXiv 2602.04879).

    Args:
        sample: the sample.
        distance: of policy and anchor: "tv" or "kl", of the probabilities of the token.
    """
    losses = []
    for log, policy, anchor in zip(log_ratios(sample), sample.policy, sample.anchor, strict=True):
        p, q = math.exp(sg(policy)), math.exp(anchor)
        change = abs(p - q) if distance == "tv" else bernoulli_kl(q, p)
        masked = change > 0.2 and (p - q) * sample.advantage > 0
        losses.append(-(0.0 if masked else min(math.exp(sg(log)), 20.0)) * sample.advantage * policy)
    return losses


def bernoulli_kl(q: float, p: float) -> float:
    """KL(q || p) of two Bernoulli distributions, in nats."""
    eps = torch.finfo(torch.float64).eps
    q, p = min(max(q, eps), 1 - eps), min(max(p, eps), 1 - eps)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def vespo(sample: Sample) -> list[complex]:
    """-sg(e^lambda w^k e^(-lambda w)) A log policy, w the ratio of the sample (VESPO, arXiv 2602.10693)."""
    k, rate = (2.0, 3.0) if sample.advantage >= 0 else (3.0, 2.0)
    log = sg(clamp(sum(log_ratios(sample)), -LIMIT, LIMIT))
    weight = math.exp(rate + k * log - rate * math.exp(log))
    return [-weight * sample.advantage * policy for policy in sample.policy]


def topr(sample: Sample, level: str) -> list[complex]:
    """A > 0: -A log policy; else -sg(min(ratio, 1)) A log policy (TOPR, arXiv 2503.14286, equation 7).

    Args:
        sample: the sample.
        level: the ratio: of the "sequence" or the "token".
    """
    whole = sg(clamp(sum(log_ratios(sample)), -LIMIT, LIMIT))
    losses = []
    for log, policy in zip(log_ratios(sample), sample.policy, strict=True):
        ratio = math.exp(whole if level == "sequence" else sg(log))
        losses.append(-(1.0 if sample.advantage > 0 else min(ratio, 1.0)) * sample.advantage * policy)
    return losses


def aspo(sample: Sample) -> list[complex]:
    """A > 0: -sg(min(1 / rho, 3)) A log policy, 0 for rho > 1.2; A < 0: PPO, but -3 A log policy for rho > 3.

    ASPO (arXiv 2510.06062), whose soft dual clip keeps the gradient.
    """
    ratios = [math.exp(sg(log)) for log in log_ratios(sample)]
    if sample.advantage <= 0:
        losses = zip(ppo(sample, 0.2, 0.2), ratios, sample.policy, strict=True)
        soft = -3.0 * sample.advantage
        return [soft * policy if sample.advantage < 0 and ratio > 3.0 else loss for loss, ratio, policy in losses]
    weights = [0.0 if ratio > 1.2 else min(1 / ratio, 3.0) for ratio in ratios]
    return [-weight * sample.advantage * policy for weight, policy in zip(weights, sample.policy, strict=True)]


def surrogate(sample: Sample) -> list[complex]:
    """-rho A (arXiv 1707.06347, equation 6)."""
    return [-cmath.exp(log) * sample.advantage for log in log_ratios(sample)]


def stale_quantile(share: float, step: Sequence[Sample]) -> float:
    """The quantile of the absolute log ratios, policy over rollout, of the tokens of a step; 0 of none."""
    ranked = sorted(abs(drift) for sample in step for drift in drifts(sample))
    if not ranked:
        return 0.0
    below = int(share * (len(ranked) - 1))
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (share * (len(ranked) - 1) - below)


def stale_scale(drift: float, quantile: float) -> float:
    """Factor of a token's clip range: 1 up to the quantile, then 1 / (1 + (|drift| / quantile - 1)^2)."""
    return 1.0 if quantile == 0 or abs(drift) <= quantile else 1 / (1 + (abs(drift) / quantile - 1) ** 2)


def sat(sample: Sample, quantile: float) -> list[complex]:
    """PPO with the clip range of each token times its factor (after SAT, arXiv 2607.18722).

    Args:
        sample: the sample.
        quantile: of the absolute log ratios of the step.
    """
    losses = []
    for log, drift in zip(log_ratios(sample), drifts(sample), strict=True):
        bound = 0.2 * stale_scale(drift, quantile)
        losses.append(clipped(cmath.exp(log), sample.advantage, bound, bound))
    return losses


LOSSES: dict[str, tuple[PolicyLoss, Callable[[Sample], list[complex]]]] = {
    "reinforce": (Reinforce(), reinforce),
    "cross_entropy": (CrossEntropy(), lambda sample: [-sample.advantage * policy for policy in sample.policy]),
    "ppo": (Ppo(clip_low=0.2, clip_high=0.28), ppo),
    "ppo_dual": (Ppo(clip_low=0.2, clip_high=0.28, dual_clip=3.0), lambda sample: ppo(sample, dual=3.0)),
    "ppo_delta": (Ppo(clip_low=0.2, clip_high=0.2, delta=1.5), ppo_delta),
    "cispo": (Cispo(), cispo),
    "gspo": (Gspo(), gspo),
    "luspo": (Gspo(length_weighted=True), luspo),
    "gmpo": (Gmpo(), gmpo),
    "sapo": (Sapo(), sapo),
    "dppo_tv": (Dppo(), lambda sample: dppo(sample, "tv")),
    "dppo_kl": (Dppo(distance="kl"), lambda sample: dppo(sample, "kl")),
    "vespo": (Vespo(), vespo),
    "topr": (Topr(), lambda sample: topr(sample, "sequence")),
    "topr_token": (Topr(level="token"), lambda sample: topr(sample, "token")),
    "aspo": (Aspo(), aspo),
    "surrogate": (Surrogate(), surrogate),
    "sat": (Sat(), lambda sample: sat(sample, stale_quantile(0.9, [sample]))),
}


Formula = Callable[[Sample], list[complex]]
Total = Callable[[Sequence[Sample]], complex]


def formula_of(name: str, step: Sequence[Sample]) -> Formula:
    """The formula of a loss of `LOSSES` for the samples of this step."""
    if name != "sat":
        return LOSSES[name][1]
    quantile = stale_quantile(0.9, step)
    return lambda sample: sat(sample, quantile)


def draw(rng: random.Random) -> list[Sample]:
    """A pass of 1 to 4 samples of 0 to 6 tokens; some log ratios are as large as 25 nats."""
    spread = rng.choice((0.0, 0.02, 0.3, 2.0, 25.0))
    samples = []
    for _ in range(rng.randint(1, 4)):
        length = rng.choice((0, 1, 1, 2, 3, 6))
        policy: list[complex] = [-rng.expovariate(1.0) - 1e-3 for _ in range(length)]
        noisy = [[min(log.real + rng.uniform(-spread, spread), -1e-4) for log in policy] for _ in range(3)]
        advantage = rng.choice((0.0, 1.0, -1.0, rng.gauss(0, 1), rng.gauss(0, 100)))
        samples.append(
            Sample(
                policy=policy,
                entropy=[rng.uniform(0, 4) for _ in range(length)],
                anchor=noisy[0],
                rollout=noisy[1],
                reference=noisy[2],
                advantage=advantage,
                weight=rng.choice((1.0, 0.5)),
                group=rng.randint(0, 1),
                valid=rng.random() > 0.1,
            )
        )
    return samples


def flat(lists: Sequence[Sequence[complex]]) -> torch.Tensor:
    """The real parts of all numbers of the lists, as one float64 tensor."""
    return torch.tensor([complex(value).real for values in lists for value in values], dtype=torch.float64)


def tokens_of(samples: Sequence[Sample], step: dict[str, float] | None = None) -> Tokens:
    """The samples as one pass, in float64; ``step`` has the statistics of the step that `Objective.measure` returns."""
    lengths = [len(sample.policy) for sample in samples]
    return Tokens(
        logprobs_T=flat([sample.policy for sample in samples]).requires_grad_(),
        anchor_T=flat([sample.anchor for sample in samples]),
        rollout_T=flat([sample.rollout for sample in samples]),
        sample_T=torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths)),
        advantages_N=torch.tensor([sample.advantage for sample in samples], dtype=torch.float64),
        weights_N=torch.tensor([sample.weight for sample in samples], dtype=torch.float64),
        group_N=torch.tensor([sample.group for sample in samples]),
        valid_T=flat([[float(sample.valid)] * len(sample.policy) for sample in samples]),
        reference_T=flat([sample.reference for sample in samples]),
        entropy_T=flat([sample.entropy for sample in samples]).requires_grad_(),
        step=step or {},
    )


def step_of(passes: Sequence[Sequence[Sample]]) -> StepTokens:
    """The tokens of a step of several passes."""
    samples = [sample for drawn in passes for sample in drawn]
    return StepTokens(
        logprobs_T=flat([sample.policy for sample in samples]),
        anchor_T=flat([sample.anchor for sample in samples]),
        rollout_T=flat([sample.rollout for sample in samples]),
        advantages_T=flat([[sample.advantage] * len(sample.policy) for sample in samples]),
        entropy_T=flat([sample.entropy for sample in samples]),
    )


def error(value: torch.Tensor, tokens: Tokens, samples: Sequence[Sample], total: Total) -> float:
    """The larger of the distances of a scalar, and of its gradient, from the formula, relative to their sizes above 1.

    Args:
        value: the scalar, computed from ``tokens``; its gradient is by their log-probabilities and entropies.
        tokens: the samples as one pass.
        samples: the same samples, as the arguments of the formula.
        total: the formula.
    """
    inputs = [source for source in (tokens.logprobs_T, tokens.entropy_T) if source is not None]
    slopes = torch.autograd.grad(value, inputs, allow_unused=True) if value.requires_grad else [None] * len(inputs)
    expected = complex(total(samples)).real
    worst = abs(value.item() - expected) / max(1.0, abs(expected))
    for tensor, slope, lists in zip(
        inputs, slopes, ([sample.policy for sample in samples], [sample.entropy for sample in samples]), strict=False
    ):
        wanted = derivatives(samples, lists, total)
        got = torch.zeros_like(tensor) if slope is None else slope
        size = max([1.0, *map(abs, wanted)])
        worst = max([worst, *(abs(a - b) / size for a, b in zip(got.tolist(), wanted, strict=True))])
    return worst


def derivatives(samples: Sequence[Sample], lists: Sequence[list[complex]], total: Total) -> list[float]:
    """The derivative of the formula by each number of these lists, which are attributes of the samples."""
    slopes = []
    for values in lists:
        for at, value in enumerate(values):
            values[at] = value + 1j * STEP
            slopes.append(complex(total(samples)).imag / STEP)
            values[at] = value
    return slopes


def loss_error(loss: PolicyLoss, formula: Formula, samples: Sequence[Sample]) -> float:
    """The `error` of a policy loss on one pass, which is the whole step."""
    tokens = tokens_of(samples, Objective(policy=loss).measure(step_of([samples])))
    # Weighted by position, so that two wrong tokens cannot cancel out.
    weights = [1.0 + 0.1 * at for at in range(len(tokens.logprobs_T))]

    def total(drawn: Sequence[Sample]) -> complex:
        losses = [token_loss for sample in drawn for token_loss in formula(sample)]
        return sum((weight * token_loss for weight, token_loss in zip(weights, losses, strict=True)), 0j)

    loss_T, _ = loss(tokens)
    return error((loss_T * torch.tensor(weights, dtype=torch.float64)).sum(), tokens, samples, total)


def k3(delta: complex) -> complex:
    """exp(delta) - delta - 1, by its power series near 0."""
    return (
        cmath.exp(delta) - delta - 1 if abs(delta) > 1e-2 else sum(delta**n / math.factorial(n) for n in range(2, 12))
    )


def estimate(name: KlEstimator, policy: complex, reference: float, rollout: float) -> complex:
    """A KL estimate of one token, in nats (joschu.net/blog/kl-approx.html; unbiased: arXiv 2512.02556, section 3.1)."""
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


def estimates(name: KlEstimator, sample: Sample) -> list[complex]:
    """The KL estimates of a sample's tokens."""
    triples = zip(sample.policy, sample.reference, sample.rollout, strict=True)
    return [estimate(name, policy, reference, rollout) for policy, reference, rollout in triples]


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


def drifts(sample: Sample) -> list[float]:
    """log(policy / rollout) of a sample's tokens, without gradient, clamped to +-LIMIT."""
    return [sg(clamp(sg(p) - r, -LIMIT, LIMIT)) for p, r in zip(sample.policy, sample.rollout, strict=True)]


def kept(sample: Sample, rejection: Rejection) -> bool:
    """Whether a sample is not rejected."""
    drift = sg(mean(drifts(sample)))
    in_band = rejection.low <= math.exp(drift) <= rejection.high
    pairs = zip(sample.rollout, sample.policy, strict=True)
    in_band &= sg(mean([bernoulli_kl(math.exp(q), math.exp(sg(p))) for q, p in pairs])) <= rejection.binary_kl
    return in_band and (sample.advantage >= 0 or -drift <= rejection.negative_kl)


def second_moment_threshold(rule: SecondMoment, samples: Sequence[Sample]) -> float:
    """The largest squared log ratio of a step that the rule keeps (M2PO, arXiv 2510.01161)."""
    squares = sorted(drift * drift for sample in samples for drift in drifts(sample))
    threshold, total = -1.0, 0.0
    for count, square in enumerate(squares, 1):
        total += square
        if total / count > rule.tau:
            return threshold
        threshold = square
    return math.inf


def entropy_threshold(rule: Entropy, samples: Sequence[Sample]) -> float:
    """A number below the entropies of all tokens of a step that the rule keeps, and above those of the others."""
    ranked = sorted(sg(value) for sample in samples for value in sample.entropy)
    others = len(ranked) - math.ceil(rule.top * len(ranked))
    return (ranked[others - 1] + ranked[others]) / 2 if others else -math.inf


def aggregated(values: Sequence[complex], aggregation: Aggregation) -> complex:
    """The contribution of a sample's token losses to the sum of a term."""
    match aggregation.style:
        case "token_mean":
            return sum(values, 0j)
        case "sequence_mean":
            return mean(values)
        case "constant":
            return sum(values, 0j) / aggregation.limit


def objective_total(objective: Objective, formula: Formula, step: Sequence[Sample]) -> Total:
    """The formula of the sum of all terms of a pass.

    Args:
        objective: the objective.
        formula: of its policy loss.
        step: all samples of the step, from which the thresholds are computed.
    """
    moment, entropy = objective.second_moment, objective.entropy
    largest_square = math.inf if moment is None else second_moment_threshold(moment, step)
    least_entropy = -math.inf if entropy.top == 1 else entropy_threshold(entropy, step)

    def sample_total(sample: Sample) -> complex:
        weights = corrected(sample, objective.correction)
        whole = sample.weight * sample.valid * (kept(sample, objective.rejection))
        keep_weights = [
            whole * (drift * drift <= largest_square) * (sg(nats) >= least_entropy)
            for drift, nats in zip(drifts(sample), sample.entropy, strict=True)
        ]
        losses = [w * keep * loss for w, keep, loss in zip(weights, keep_weights, formula(sample), strict=True)]
        if objective.kl is not None:
            pairs = zip(losses, estimates(objective.kl.estimator, sample), strict=True)
            losses = [loss + objective.kl.coef * sample.valid * kl for loss, kl in pairs]
        bonus = [-entropy.coef * sample.valid * nats for nats in sample.entropy]
        return aggregated(losses, objective.aggregation) + aggregated(bonus, objective.aggregation)

    return lambda samples: sum((sample_total(sample) for sample in samples), 0j)


def preference_total(beta: float, nll: float) -> Total:
    """The formula of online DPO: -log sigmoid(beta margin) of each group, and ``nll`` times the mean -log policy over
    the tokens of its best sample."""

    def total(samples: Sequence[Sample]) -> complex:
        whole = 0j
        for group in {sample.group for sample in samples}:
            members = [sample for sample in samples if sample.group == group]
            margin = sum(
                member.valid * member.advantage * (sum(member.policy) - sum(member.reference)) for member in members
            )
            logit = beta * margin
            whole += (
                cmath.log(1 + cmath.exp(-logit)) if complex(logit).real > 0 else cmath.log(1 + cmath.exp(logit)) - logit
            )
            for member in members:
                if member.advantage > 0 and member.policy:
                    whole -= nll * member.valid * sum(member.policy) / len(member.policy)
        return whole

    return total


CORRECTIONS = [
    Correction(level="off"),
    *(Correction(level=level, high=2.0) for level in ("token", "sequence", "geometric")),
    Correction(low=0.5, high=5.0),
    *(Correction(level=level, mode="mask", low=0.5, high=5.0) for level in ("token", "sequence", "geometric")),
]
