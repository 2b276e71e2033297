"""The composed objective: credit x policy loss x correction x KL x entropy x aggregation, as one `Algorithm`.

Every preset is an `Objective` or `OnlineDpo`. Each part of an `Objective` is a frozen value with an identity setting:

- `Correction` at level "off" gives every token weight 1;
- `Rejection` without bounds keeps every sample;
- coefficients of 0 remove a term from the loss.

Constructors raise ValueError for parameters outside their range.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrt.algorithms.advantages import BestOfGroup, CreditRule, GroupAdvantages, PreferencePair
from flowrt.algorithms.algorithm import Credit, Groups, Needs, Plan, StepTokens, Term, Tokens
from flowrt.algorithms.losses import (
    KL_ESTIMATORS,
    LOG_RATIO_LIMIT,
    AdaptiveKl,
    KlEstimator,
    Metrics,
    PolicyLoss,
    Reinforce,
    Sat,
    bernoulli_kl_T,
    clamped_log_ratio_T,
)

Level = Literal["off", "token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How token losses become the loss of a step.

    Args:
        style: "token_mean", over all tokens of the step (DAPO, arXiv 2503.14476, section 3.3); "sequence_mean", the
            mean over samples of the mean over tokens (GRPO, arXiv 2402.03300, equation 3); "constant", the sum over
            tokens over (samples x limit) (Dr. GRPO, arXiv 2503.20783, section 3.2).
        limit: for "constant": the response limit in tokens, the same in every step.
    """

    style: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    limit: int = 1

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"limit is {self.limit}; give the response limit in tokens")

    def __call__(self, name: str, loss_T: Tensor, tokens: Tokens, metrics: Metrics) -> Term:
        """The term of these token losses [T], with these sums of metrics."""
        match self.style:
            case "token_mean":
                return Term(name, loss_T.sum(), "token", metrics)
            case "sequence_mean":
                return Term(name, tokens.mean_N(loss_T).sum(), "sample", metrics)
            case "constant":
                return Term(name, loss_T.sum() / self.limit, "sample", metrics)


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weight (anchor / rollout policy, detached) of each token's policy loss.

    Args:
        level: "token", each token's own ratio (truncated importance sampling, TIS: Ionides 2008); "sequence", the
            product over the sample, the true weight of a response, with a variance that grows with length;
            "geometric", its geometric mean; "off", 1.
        mode: "truncate" clamps weights to [low, high]; "mask" gives weight 0 outside (IcePop, arXiv 2510.18855).
        low, high: 0 <= low <= 1 <= high.
    """

    level: Level = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                f"the importance band is [{self.low}, {self.high}]; it must contain 1 and start at 0 or above"
            )

    def __call__(self, tokens: Tokens) -> Tensor:
        """[T], the weights."""
        return self.bounded_T(self.ratio_T(tokens))

    def ratio_T(self, tokens: Tokens) -> Tensor:
        """[T], the ratio of the level of each token, before the bounds."""
        log_T = clamped_log_ratio_T(tokens.anchor_T.detach(), tokens.rollout_T.detach())
        match self.level:
            case "off":
                return torch.ones_like(log_T)
            case "token":
                pass
            case "sequence":
                log_T = tokens.sum_N(log_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[tokens.sample_T]
            case "geometric":
                log_T = tokens.mean_N(log_T)[tokens.sample_T]
        return log_T.exp()

    def bounded_T(self, ratio_T: Tensor) -> Tensor:
        """[T], the weights of these ratios: truncated to the bounds, or 0 outside them."""
        if self.level == "off":
            return ratio_T
        if self.mode == "mask":
            return torch.where((ratio_T >= self.low) & (ratio_T <= self.high), ratio_T, 0.0)
        return ratio_T.clamp(max=self.high) if self.low == 0 else ratio_T.clamp(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Mask of the policy loss of samples on which the policy differs too much from the rollout policy.

    Args:
        low, high: interval of the geometric mean of the sample's ratios, policy over rollout, with low <= 1 <= high;
            (0, inf) keeps all.
        negative_kl: masks samples of negative advantage whose mean log(rollout / policy) exceeds it, in nats per token
            (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556); inf keeps all.
        binary_kl: masks samples whose mean KL(rollout || policy) exceeds it, in nats per token, where the divergence of
            a token is that of the two Bernoulli distributions, this token or another (the trust region of
            FlashREINFORCE); inf keeps all.
    """

    low: float = 0.0
    high: float = math.inf
    negative_kl: float = math.inf
    binary_kl: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 <= self.high and self.negative_kl > 0 and self.binary_kl > 0):
            raise ValueError(
                f"the band [{self.low}, {self.high}] must contain 1, and negative_kl and binary_kl be above 0"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether no sample is ever masked."""
        return self.low == 0 and all(math.isinf(limit) for limit in (self.high, self.negative_kl, self.binary_kl))

    def __call__(self, tokens: Tokens) -> Tensor:
        """[T], 1 for tokens of samples that are kept, else 0."""
        mean_N = tokens.mean_N(clamped_log_ratio_T(tokens.logprobs_T.detach(), tokens.rollout_T.detach()))
        ratio_N = mean_N.exp()
        kept_N = (ratio_N >= self.low) & (ratio_N <= self.high)
        kept_N &= (tokens.advantages_N >= 0) | (-mean_N <= self.negative_kl)
        if not math.isinf(self.binary_kl):
            rollout_T, policy_T = (
                logprobs_T.detach().to(mean_N.dtype).exp() for logprobs_T in (tokens.rollout_T, tokens.logprobs_T)
            )
            kept_N &= tokens.mean_N(bernoulli_kl_T(rollout_T, policy_T)) <= self.binary_kl
        return kept_N[tokens.sample_T].to(mean_N.dtype)


@dataclass(frozen=True, slots=True)
class Kl:
    """Divergence from the reference as a term of the loss; with coef 0 it is only measured.

    ``estimator`` names one of `flowrt.algorithms.losses.KL_ESTIMATORS`. With ``adaptive``, ``coef`` is the
    coefficient of the first step.
    """

    coef: float = 0.0
    estimator: KlEstimator = "k3"
    adaptive: AdaptiveKl | None = None

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"kl coef is {self.coef}; it must be 0 or more")
        if self.adaptive is not None and self.coef == 0:
            raise ValueError("kl coef is 0, and stays that, whatever it is multiplied by; give a first coefficient")


@dataclass(frozen=True, slots=True)
class Entropy:
    """Entropy bonus, and restriction of the policy loss to the tokens of highest entropy.

    Args:
        coef: the loss gets -coef times the entropy (nats) of the predictions, aggregated as the policy loss; 0: no
            bonus.
        top: share of the step's tokens, those of highest entropy, whose policy loss is kept (arXiv 2506.01939); 1: all.
    """

    coef: float = 0.0
    top: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.top <= 1:
            raise ValueError(f"the share of top-entropy tokens is {self.top}; it must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """Masks the tokens with the largest squared log ratios until the mean of the rest is at most tau (above 0).

    M2PO (arXiv 2510.01161), over the tokens of the step; log ratios of the policy over the rollout policy.
    """

    tau: float = 0.04

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau is {self.tau}; it must be above 0")

    def threshold(self, step: StepTokens) -> float:
        """Upper bound of the squared log ratios that are kept, in nats squared; inf if all are, -inf if none is."""
        squares = clamped_log_ratio_T(step.logprobs_T, step.rollout_T).double().square().sort().values
        means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=torch.float64)
        kept = int((means <= self.tau).sum())
        return _bound(squares, kept)


def _bound(ascending: Tensor, kept: int) -> float:
    """A number between the ``kept`` smallest values and the others, in the middle, so that rounding moves no token.

    inf if all values are kept, -inf if none is.
    """
    if kept == len(ascending):
        return math.inf
    return float(ascending[kept - 1 : kept + 1].mean()) if kept else -math.inf


KL_COEF = "kl_coef"
M2_THRESHOLD, ENTROPY_THRESHOLD = "m2_threshold", "entropy_threshold"


@dataclass(frozen=True, slots=True)
class Objective:
    """A composed `Algorithm`. Raises ValueError for parts that contradict each other.

    ``policy`` is a loss of `flowrt.algorithms.losses`, ``credit_rule`` a rule of `flowrt.algorithms.advantages`.
    """

    credit_rule: CreditRule = field(default_factory=GroupAdvantages)
    policy: PolicyLoss = field(default_factory=Reinforce)
    plan: Plan = field(default_factory=Plan)
    correction: Correction = field(default_factory=Correction)
    rejection: Rejection = field(default_factory=Rejection)
    second_moment: SecondMoment | None = None
    kl: Kl | None = None
    entropy: Entropy = field(default_factory=Entropy)
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        if self.plan.anchor == "rollout" and self.correction.level != "off":
            raise ValueError(
                "anchor 'rollout' already measures the policy from the one that sampled the tokens; a correction would "
                "count the ratio twice. Use correction level 'off', or anchor 'step'"
            )

    @property
    def needs(self) -> Needs:
        credit_scope = self.credit_rule.scope if isinstance(self.credit_rule, GroupAdvantages) else "group"
        in_reward = isinstance(self.credit_rule, GroupAdvantages) and self.credit_rule.kl_coef > 0
        return Needs(
            reference=self.kl is not None or in_reward,
            entropy=self.entropy.coef != 0 or self.entropy.top < 1,
            scope="step" if credit_scope == "step" or self._measures else "group",
            token_statistics=self._measures,
        )

    @property
    def _measures(self) -> bool:
        return self.second_moment is not None or self.entropy.top < 1 or isinstance(self.policy, Sat)

    def credit(self, groups: Groups) -> Credit:
        return self.credit_rule(groups)

    def measure(self, step: StepTokens) -> dict[str, float]:
        measured = self.policy.measure(step) if isinstance(self.policy, Sat) else {}
        if self.second_moment is not None:
            measured[M2_THRESHOLD] = self.second_moment.threshold(step)
        if self.entropy.top < 1 and step.entropy_T is not None and len(step.entropy_T):
            descending_T = -step.entropy_T.double().sort(descending=True).values
            measured[ENTROPY_THRESHOLD] = -_bound(descending_T, math.ceil(self.entropy.top * len(descending_T)))
        return measured

    def terms(self, tokens: Tokens) -> Sequence[Term]:
        policy_T, metrics = self.policy(tokens)
        weights_T, masks = self._weights(tokens)
        loss_T = weights_T * policy_T
        if self.kl is not None:
            if tokens.reference_T is None:
                raise ValueError(f"the KL term has coefficient {self.kl.coef}, and the tokens have no reference_T")
            kl_T = tokens.valid_T * KL_ESTIMATORS[self.kl.estimator](
                tokens.logprobs_T, tokens.reference_T, tokens.rollout_T
            )
            metrics = metrics | {"kl": kl_T.detach().double().sum()}
            coef = tokens.numbers.get(KL_COEF, self.kl.coef)
            if coef > 0:
                loss_T = loss_T + coef * kl_T
        terms = [self.aggregation("policy", loss_T, tokens, metrics | masks)]
        if tokens.entropy_T is not None:
            measured = {"entropy": tokens.entropy_T.detach().double().sum()}
            bonus_T = self.entropy.coef * tokens.valid_T * tokens.entropy_T
            terms.append(self.aggregation("entropy", -bonus_T, tokens, measured))
        return terms

    def first_numbers(self) -> dict[str, float]:
        return {} if self.kl is None or self.kl.adaptive is None else {KL_COEF: self.kl.coef}

    def next_numbers(
        self, numbers: Mapping[str, float], metrics: Mapping[str, float], samples: float
    ) -> dict[str, float]:
        if self.kl is None or self.kl.adaptive is None:
            return {}
        return {KL_COEF: self.kl.adaptive.next_coef(numbers[KL_COEF], metrics["kl"], samples)}

    def _weights(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Detached weight of each token's policy loss, and the counts of masked tokens."""
        ratio_T = self.correction.ratio_T(tokens)
        importance_T = self.correction.bounded_T(ratio_T)
        masks: Metrics = {
            "importance_truncated": ((importance_T > 0) & (importance_T != ratio_T)).double().sum(),
            "importance_masked": (importance_T == 0).double().sum(),
        }
        weights_T = importance_T * tokens.weights_N[tokens.sample_T].to(importance_T.dtype)
        weights_T = weights_T * tokens.valid_T
        if not self.rejection.keeps_all:
            kept_T = self.rejection(tokens)
            masks["rejected"] = (kept_T == 0).double().sum()
            weights_T = weights_T * kept_T
        if self.second_moment is not None:
            square_T = clamped_log_ratio_T(tokens.logprobs_T.detach(), tokens.rollout_T.detach()).square()
            kept_T = (square_T.double() <= tokens.step[M2_THRESHOLD]).to(weights_T.dtype)
            masks["second_moment_masked"] = (kept_T == 0).double().sum()
            weights_T = weights_T * kept_T
        if self.entropy.top < 1 and tokens.entropy_T is not None:
            kept_T = (tokens.entropy_T.detach().double() >= tokens.step.get(ENTROPY_THRESHOLD, -math.inf)).to(
                weights_T.dtype
            )
            masks["low_entropy_masked"] = (kept_T == 0).double().sum()
            weights_T = weights_T * kept_T
        return weights_T, masks


@dataclass(frozen=True, slots=True)
class OnlineDpo:
    """Direct preference optimisation on the best and the worst sample of each group.

    -log sigmoid(beta (d_best - d_worst)), d = sum over the sample's tokens of log(policy / reference); divided by the
    number of groups. OAIF (arXiv 2402.04792). With ``nll`` above 0, nll times the mean of -log policy over the tokens
    of the best sample is added: without it the likelihood of both samples may fall (Iterative RPO, arXiv 2404.19733,
    equation 2). Sample weights do not apply.
    """

    beta: float = 0.1
    plan: Plan = field(default_factory=Plan)
    nll: float = 0.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be above 0")
        if not self.nll >= 0:
            raise ValueError(f"nll is {self.nll}; it must be 0 or more")

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, whole_groups=True)

    def credit(self, groups: Groups) -> Credit:
        return PreferencePair()(groups)

    def measure(self, step: StepTokens) -> dict[str, float]:  # noqa: ARG002
        return {}

    def terms(self, tokens: Tokens) -> Sequence[Term]:
        if tokens.reference_T is None:
            raise ValueError("online DPO needs the log-probabilities of a reference; its tokens have none")
        difference_T = (tokens.logprobs_T - tokens.reference_T.detach()) * tokens.valid_T
        signed_N = tokens.sum_N(difference_T) * tokens.advantages_N.to(difference_T.dtype)
        groups, group_N = tokens.group_N.unique(return_inverse=True)
        margin_G = signed_N.new_zeros(len(groups)).index_add(0, group_N, signed_N)
        loss_G = -torch.nn.functional.logsigmoid(self.beta * margin_G)
        kl = clamped_log_ratio_T(tokens.reference_T.detach(), tokens.logprobs_T.detach())
        metrics = {"kl": (kl.expm1() - kl).double().sum()}
        loss = loss_G.sum()
        if self.nll:
            best_N = (tokens.advantages_N > 0).to(difference_T.dtype)
            tokens_N = tokens.sum_N(tokens.valid_T.to(difference_T.dtype)).clamp(min=1.0)
            loss = loss - self.nll * (best_N * tokens.sum_N(tokens.logprobs_T * tokens.valid_T) / tokens_N).sum()
        return [Term("preference", loss, "group", metrics, means={"margin": margin_G.detach().double().sum()})]


__all__ = [
    "Aggregation",
    "BestOfGroup",
    "Correction",
    "Entropy",
    "GroupAdvantages",
    "Kl",
    "Objective",
    "OnlineDpo",
    "PreferencePair",
    "Rejection",
    "SecondMoment",
]
