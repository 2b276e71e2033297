"""Every preset, as a run builds it, against the formula of its paper; metrics against their definitions.

A case is a step of groups with rewards, in two passes. Compared is the gradient of the step's loss by every token's
log-probability, which is what is trained: from rewards to advantages, losses, weights, masks, averages and counts. The
formulas are written on Python numbers, from the papers (docs/objectives.md has the sources and where flowrt differs),
and take nothing from a preset's table.
"""

import cmath
import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from flowrt.algorithms.algorithm import Algorithm, Groups, StepTokens, Tokens
from flowrt.recipes.algorithms import PRESETS
from tests.proofs import formulas as forms
from tests.proofs.comparisons import dice
from tests.proofs.formulas import Formula, Sample, k3, mean, sg
from tests.proofs.metrics import wrong_metrics
from tests.proofs.presets import presets

CASES, QUICK_CASES = 300, 20
LIMIT = 8
"""Response limit in tokens."""
EPS = 1e-6


@dataclass(frozen=True)
class DrawnStep:
    """A step: the samples of all groups, the reward of each, and whether it was cut. `Sample.group` is the group."""

    samples: list[Sample]
    rewards: list[float]

    def members(self, at: int) -> list[int]:
        """The samples of the group of sample ``at``."""
        return [other for other, sample in enumerate(self.samples) if sample.group == self.samples[at].group]


def draw_step(rng: random.Random, anchor: str) -> DrawnStep:
    """2 or 3 groups of 2 to 4 samples of 1 to 8 tokens, with log ratios of up to 0.02 to 2 nats.

    Args:
        rng: source of randomness.
        anchor: of the preset: "present", "rollout" or "step".
    """
    spread = rng.choice((0.02, 0.1, 0.5, 2.0))
    kinds: tuple[Callable[[], float], ...] = (
        lambda: float(rng.random() < 0.5),
        lambda: rng.gauss(0, 1),
        lambda: rng.uniform(0.1, 1),
    )
    make = rng.choice(kinds)
    samples, rewards = [], []
    for group in range(rng.randint(2, 3)):
        for _ in range(rng.randint(2, 4)):
            policy: list[complex] = [-rng.expovariate(1.0) - 1e-3 for _ in range(rng.randint(1, LIMIT))]
            noisy = [[min(log.real + rng.uniform(-spread, spread), -1e-4) for log in policy] for _ in range(3)]
            anchors = {"present": [log.real for log in policy], "rollout": noisy[1], "step": noisy[0]}
            samples.append(
                Sample(policy, [0.0] * len(policy), anchors[anchor], noisy[1], noisy[2], math.nan, 1.0, group)
            )
            rewards.append(make())
    return DrawnStep(samples, rewards)


# ---- advantages: from a step and the index of a sample to its advantage

Credit = Callable[[DrawnStep, int], float]


def of_group(step: DrawnStep, at: int) -> list[float]:
    """The rewards of the group of sample ``at``."""
    return [step.rewards[other] for other in step.members(at)]


def average(values: Sequence[float]) -> Fraction:
    """The exact mean."""
    return sum((Fraction(value) for value in values), Fraction()) / len(values)


def less_group_mean(step: DrawnStep, at: int) -> float:
    """r - m_G."""
    return float(Fraction(step.rewards[at]) - average(of_group(step, at)))


def grpo(step: DrawnStep, at: int) -> float:
    """(r - m_G) / s_G (GRPO, arXiv 2402.03300)."""
    return less_group_mean(step, at) / (statistics.stdev(map(Fraction, of_group(step, at))) + EPS)


def leave_one_out(step: DrawnStep, at: int) -> float:
    """The penalised reward less the mean of the others' (RLOO, arXiv 2402.14740)."""
    others = [penalised(step, other) for other in step.members(at) if other != at]
    return float(Fraction(penalised(step, at)) - average(others))


def penalised(step: DrawnStep, at: int) -> float:
    """r - 0.001 sum log(rollout / reference)."""
    sample = step.samples[at]
    return step.rewards[at] - 1e-3 * math.fsum(a - b for a, b in zip(sample.rollout, sample.reference, strict=True))


def optimal(step: DrawnStep, at: int) -> float:
    """r - sum(l r) / sum(l) over the group (OPO, arXiv 2505.23585)."""
    members = step.members(at)
    lengths = [len(step.samples[other].policy) for other in members]
    total = sum((n * Fraction(step.rewards[other]) for n, other in zip(lengths, members, strict=True)), Fraction())
    return float(Fraction(step.rewards[at]) - total / sum(lengths))


def over_mean(step: DrawnStep, at: int) -> float:
    """(r - m_G) / m_G; 0 without a positive mean (MaxRL, arXiv 2602.02710)."""
    level = float(average(of_group(step, at)))
    return less_group_mean(step, at) / level if level > EPS else 0.0


def over_step_deviation(step: DrawnStep, at: int) -> float:
    """(r - m_G) / s of the rewards of the step (Lite-PPO, arXiv 2508.08221)."""
    return less_group_mean(step, at) / (statistics.stdev(map(Fraction, step.rewards)) + EPS)


def whitened(inner: Credit) -> Credit:
    """The advantages less their mean over the step, over their standard deviation (REINFORCE++, arXiv 2501.03262)."""

    def credit(step: DrawnStep, at: int) -> float:
        values = [inner(step, index) for index in range(len(step.rewards))]
        return float(Fraction(values[at]) - average(values)) / (statistics.stdev(map(Fraction, values)) + EPS)

    return credit


def less_step_mean(step: DrawnStep, at: int) -> float:
    """r less the mean of all rewards of the step (FlashREINFORCE)."""
    return float(Fraction(step.rewards[at]) - average(step.rewards))


# ---- losses of the tokens of a sample that `formulas` has not


def weighted_reinforce(weights: Callable[[Sample], list[float]]) -> Formula:
    """-w A log policy, with these weights of the tokens."""

    def losses(sample: Sample) -> list[complex]:
        return [-w * sample.advantage * policy for w, policy in zip(weights(sample), sample.policy, strict=True)]

    return losses


def token_weights(sample: Sample) -> list[float]:
    """min(anchor / rollout, 2) of each token."""
    return [min(math.exp(a - b), 2.0) for a, b in zip(sample.anchor, sample.rollout, strict=True)]


def sample_weights(sample: Sample) -> list[float]:
    """min(product of anchor / rollout, 2) for each token."""
    whole = math.fsum(a - b for a, b in zip(sample.anchor, sample.rollout, strict=True))
    return [min(math.exp(whole), 2.0)] * len(sample.policy)


def corrected(losses: Formula) -> Formula:
    """The losses of a sample times the weights of its tokens."""
    return lambda sample: [w * loss for w, loss in zip(token_weights(sample), losses(sample), strict=True)]


def with_kl(losses: Formula, divergence: Callable[[complex], complex]) -> Formula:
    """The losses plus 0.001 times a function of log(reference / policy) of each token."""

    def total(sample: Sample) -> list[complex]:
        logs = [reference - policy for policy, reference in zip(sample.policy, sample.reference, strict=True)]
        return [loss + 1e-3 * divergence(log) for loss, log in zip(losses(sample), logs, strict=True)]

    return total


def ppo(high: float = 0.2) -> Formula:
    """The clipped ratio (arXiv 1707.06347)."""
    return lambda sample: forms.ppo(sample, 0.2, high)


def flash(sample: Sample) -> list[complex]:
    """-rho A, 0 for a sample whose mean KL(Bernoulli(rollout) || Bernoulli(policy)) exceeds 0.003 (FlashREINFORCE)."""
    pairs = zip(sample.rollout, sample.policy, strict=True)
    distances = [forms.bernoulli_kl(math.exp(old), math.exp(sg(new))) for old, new in pairs]
    kept = math.fsum(distances) / len(distances) <= 3e-3
    return [kept * loss for loss in forms.surrogate(sample)]


def m2po(step: DrawnStep) -> Formula:
    """-rho A of the tokens that are left when the largest squared log ratios are masked (M2PO, arXiv 2510.01161)."""
    squares = sorted((drift**2 for sample in step.samples for drift in forms.drifts(sample)), reverse=True)
    while squares and math.fsum(squares) / len(squares) > 0.04:
        squares.pop(0)
    largest = squares[0] if squares else -1.0

    def losses(sample: Sample) -> list[complex]:
        return [
            loss if drift**2 <= largest else 0.0
            for drift, loss in zip(forms.drifts(sample), forms.surrogate(sample), strict=True)
        ]

    return losses


# ---- averages: from the losses of the tokens of each sample to the loss of a step

Average = Callable[[list[list[complex]]], complex]


def over_tokens(losses: list[list[complex]]) -> complex:
    """The mean over all tokens of the step (DAPO)."""
    return sum(map(sum, losses), 0j) / sum(map(len, losses))


def over_samples(losses: list[list[complex]]) -> complex:
    """The mean over samples of the mean over tokens (GRPO, equation 3)."""
    return mean([mean(sample_losses) for sample_losses in losses])


def over_limit(losses: list[list[complex]]) -> complex:
    """The sum over tokens over samples times the response limit (Dr. GRPO, arXiv 2503.20783)."""
    return sum(map(sum, losses), 0j) / (len(losses) * LIMIT)


@dataclass(frozen=True)
class Paper:
    """The formula of a preset: credit, losses (or a function of the step that gives them), and the average."""

    credit: Credit
    losses: Formula | None = None
    average: Average = over_tokens
    of_step: Callable[[DrawnStep], Formula] | None = None

    def loss(self, step: DrawnStep) -> complex:
        """The loss of a step."""
        losses = self.losses or (self.of_step and self.of_step(step))
        assert losses is not None
        return self.average([losses(sample) for sample in step.samples])

    def advantages(self, step: DrawnStep) -> list[float]:
        """The advantages of the samples of a step."""
        return [self.credit(step, at) for at in range(len(step.samples))]


def preference(step: DrawnStep) -> complex:
    """-log sigmoid(0.1 margin) plus the mean -log policy of the best sample, over groups (2402.04792, 2404.19733)."""
    losses: list[complex] = []
    for group in {sample.group for sample in step.samples}:
        members = [at for at, sample in enumerate(step.samples) if sample.group == group]
        best = max(members, key=lambda at: (step.rewards[at], -at))
        worst = min(members, key=lambda at: (step.rewards[at], at))
        if step.rewards[best] > step.rewards[worst]:
            gains = [sum(step.samples[at].policy) - sum(step.samples[at].reference) for at in (best, worst)]
            losses.append(cmath.log(1 + cmath.exp(-0.1 * (gains[0] - gains[1]))) - mean(step.samples[best].policy))
    return mean(losses)


def best_likelihood(step: DrawnStep) -> complex:
    """The mean -log policy over the tokens of the best sample of each group (RAFT, arXiv 2304.06767)."""
    tokens: list[complex] = []
    for group in {sample.group for sample in step.samples}:
        members = [at for at, sample in enumerate(step.samples) if sample.group == group]
        tokens += step.samples[max(members, key=lambda at: (step.rewards[at], -at))].policy
    return -mean(tokens)


WEIGHTED = weighted_reinforce(token_weights)
PAPERS: dict[str, Paper | Callable[[DrawnStep], complex]] = {
    "reinforce": Paper(grpo, with_kl(WEIGHTED, k3)),
    "grpo": Paper(grpo, with_kl(ppo(), k3), over_samples),
    "dr_grpo": Paper(less_group_mean, ppo(), over_limit),
    "dapo": Paper(grpo, ppo(0.28)),
    "rloo": Paper(leave_one_out, weighted_reinforce(sample_weights), over_limit),
    "opo": Paper(optimal, WEIGHTED),
    "max_rl": Paper(over_mean, WEIGHTED),
    "lite_ppo": Paper(over_step_deviation, ppo()),
    "reinforce++": Paper(whitened(penalised), ppo()),
    "reinforce++_baseline": Paper(whitened(less_group_mean), with_kl(ppo(), lambda log: log * log / 2)),
    "cispo": Paper(grpo, forms.cispo),
    "gspo": Paper(grpo, corrected(forms.gspo), over_samples),
    "luspo": Paper(grpo, corrected(forms.luspo), over_samples),
    "gmpo": Paper(grpo, forms.gmpo, over_samples),
    "sapo": Paper(grpo, forms.sapo, over_samples),
    "dppo": Paper(less_group_mean, lambda sample: forms.dppo(sample, "tv")),
    "vespo": Paper(grpo, forms.vespo),
    "topr": Paper(less_group_mean, lambda sample: forms.topr(sample, "sequence")),
    "aspo": Paper(grpo, forms.aspo),
    "decoupled": Paper(grpo, corrected(ppo())),
    "m2po": Paper(grpo, of_step=m2po),
    "sat": Paper(grpo, of_step=lambda step: forms.formula_of("sat", step.samples), average=over_samples),
    "flash_reinforce": Paper(less_step_mean, flash, over_samples),
    "dpo_online": preference,
    "best_of_n": best_likelihood,
}
"""The loss of a step by preset: of the tokens of all its samples, with their rewards."""


def wanted_gradient(name: str, step: DrawnStep) -> list[float]:
    """The derivative of a paper's loss by the log-probability of each token of a step, by complex steps."""
    paper = PAPERS[name]
    if isinstance(paper, Paper):
        scored = zip(step.samples, paper.advantages(step), strict=True)
        step = DrawnStep([dataclasses.replace(sample, advantage=value) for sample, value in scored], step.rewards)

    def total(samples: Sequence[Sample]) -> complex:
        whole = DrawnStep(list(samples), step.rewards)
        return paper.loss(whole) if isinstance(paper, Paper) else paper(whole)

    return forms.derivatives(step.samples, [sample.policy for sample in step.samples], total)


def gradient(algorithm: Algorithm, step: DrawnStep) -> list[float]:
    """The gradient of an objective's loss by the log-probability of each token of a step, in two passes."""
    samples = step.samples
    credit = algorithm.credit(_groups(step))
    advantages, trained = credit.advantages_N.tolist(), credit.trained_N.tolist()
    scored = [dataclasses.replace(sample, advantage=value) for sample, value in zip(samples, advantages, strict=True)]
    kept = [sample for sample, is_trained in zip(scored, trained, strict=True) if is_trained]
    statistics_: Mapping[str, float] = {}
    if algorithm.needs.token_statistics:
        measured: StepTokens = forms.step_of([kept])
        statistics_ = algorithm.measure(measured)
    groups = sorted({sample.group for sample in kept})
    counts = {"token": sum(len(sample.policy) for sample in kept), "sample": len(kept), "group": len(groups)}
    slopes: dict[int, list[float]] = {}
    for members in (groups[:1], groups[1:]):
        rows = [at for at, sample in enumerate(scored) if trained[at] and sample.group in members]
        if not rows:
            continue
        tokens: Tokens = forms.tokens_of([scored[at] for at in rows], dict(statistics_))
        if not algorithm.needs.entropy:
            tokens = dataclasses.replace(tokens, entropy_T=None)
        loss = torch.stack([term.loss_sum / counts[term.per] for term in algorithm.terms(tokens)]).sum()
        (slope_T,) = torch.autograd.grad(loss, tokens.logprobs_T)
        parts = slope_T.split([len(scored[at].policy) for at in rows])
        slopes |= {at: part.tolist() for at, part in zip(rows, parts, strict=True)}
    return [value for at, sample in enumerate(samples) for value in slopes.get(at, [0.0] * len(sample.policy))]


def _groups(step: DrawnStep) -> Groups:
    kl = [math.fsum(a - b for a, b in zip(sample.rollout, sample.reference, strict=True)) for sample in step.samples]
    count = len(step.samples)
    return Groups(
        rewards_N=torch.tensor(step.rewards, dtype=torch.float64),
        group_N=torch.tensor([sample.group for sample in step.samples]),
        lengths_N=torch.tensor([len(sample.policy) for sample in step.samples]),
        truncated_N=torch.zeros(count, dtype=torch.bool),
        staleness_N=torch.zeros(count, dtype=torch.int64),
        kl_N=torch.tensor(kl, dtype=torch.float64),
    )


def worst_paper(name: str, cases: int) -> float:
    """The largest distance of a preset's gradient from its paper's, relative to the largest element above 1."""
    rng, worst = dice(name), 0.0
    algorithm = presets(LIMIT)[name]
    for _ in range(cases):
        step = draw_step(rng, algorithm.plan.anchor)
        if name == "best_of_n" or len(set(step.rewards)) > 1:
            got, wanted = gradient(algorithm, step), wanted_gradient(name, step)
            size = max([1.0, *map(abs, wanted)])
            worst = max(worst, *(abs(a - b) / size for a, b in zip(got, wanted, strict=True)))
    return worst


def measure(quick: bool) -> dict[str, float]:
    """The largest distance of any preset from its paper, and the number of metrics that are ever wrong."""
    cases = QUICK_CASES if quick else CASES
    assert PAPERS.keys() == PRESETS.keys()
    return {
        "paper_max": max(worst_paper(name, cases) for name in PAPERS),
        "paper_presets": float(len(PAPERS)),
        "metrics_wrong": float(len(wrong_metrics(10 * cases))),
    }
