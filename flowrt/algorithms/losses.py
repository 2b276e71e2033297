"""Policy losses and estimators of the KL divergence: one value per token, before weights, masks and aggregation.

Every loss is a frozen value that is called with the tokens of a pass, and returns losses [T]. Notation: rho = policy /
anchor (log ratios are clamped to +-20 before exp, without a gradient beyond), A = advantage, sg = stop-gradient. A loss
that is defined on whole samples gives each token of a sample the sample's value, so that the mean over a sequence is
the loss of the paper. Losses with a ratio also return metrics as sums over tokens: ``ratio``, and the numbers of tokens
that were clipped or masked. Constructors raise ValueError for parameters outside their range.

KL(policy || reference) is estimated from the log-probabilities of tokens that the policy sampled, in nats per token,
after joschu.net/blog/kl-approx.html. All estimators keep the gradient of the policy and detach the reference. As a
*loss* they differ more than as an estimate: on-policy, the gradient of k2 is that of the true divergence, that of k3 is
close to it if the policies are close, and that of k1 is 0 on average.

Shapes: T = response tokens of all samples, flattened.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrt.algorithms.algorithm import StepTokens, Tokens

LOG_RATIO_LIMIT = 20.0
"""exp(20) is about 5e8: far above any useful ratio, and its square fits in float32."""


def require_flat(**tensors: Tensor) -> None:
    """Raise ValueError unless all `tensors` are 1-D and equally long.

    Otherwise [T, 1] would broadcast with [T] into a [T, T] loss, without an error.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"per-token tensors must be 1-D and equally long, but got {listed}; flatten them alike")


def clamped_log_ratio_T(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """log(numerator / denominator) per token, float32 or wider, clamped to +-LOG_RATIO_LIMIT."""
    require_flat(numerator_T=numerator_T, denominator_T=denominator_T)
    dtype = torch.promote_types(torch.promote_types(numerator_T.dtype, denominator_T.dtype), torch.float32)
    return (numerator_T.to(dtype) - denominator_T.to(dtype)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


Metrics = dict[str, Tensor]
PolicyLoss = Callable[[Tokens], tuple[Tensor, Metrics]]
"""Maps the tokens of a pass to their losses [T], with gradient, and sums of metrics."""


def log_ratio_T(tokens: Tokens) -> Tensor:
    """[T], log(policy / anchor) in nats, clamped to +-LOG_RATIO_LIMIT, with the gradient of the policy."""
    return clamped_log_ratio_T(tokens.logprobs_T, tokens.anchor_T.detach())


def _sums(**masks: Tensor) -> Metrics:
    return {name: mask.detach().double().sum() for name, mask in masks.items()}


@dataclass(frozen=True, slots=True)
class Reinforce:
    """-A log policy, computed as -A policy / sg(policy): its value is -A, its gradient -A grad log policy.

    Williams (1992). At anchor "present" the losses of PPO, GSPO, CISPO, SAPO and GMPO have this gradient.
    """

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T = clamped_log_ratio_T(tokens.logprobs_T, tokens.logprobs_T.detach()).exp()
        return -ratio_T * tokens.advantages_T, {}


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """-A log policy: with A = 1, supervised training on the samples. RAFT (arXiv 2304.06767)."""

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantages_T * tokens.logprobs_T, {}


@dataclass(frozen=True, slots=True)
class Surrogate:
    """-rho A without a bound: the surrogate objective (arXiv 1707.06347, equation 6), of M2PO and FlashREINFORCE."""

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T = log_ratio_T(tokens).exp()
        return -ratio_T * tokens.advantages_T, _sums(ratio=ratio_T)


@dataclass(frozen=True, slots=True)
class Ppo:
    """max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A); for A < 0 at most -dual_clip A.

    PPO (arXiv 1707.06347, equation 7); two bounds (DAPO, arXiv 2503.14476, section 3.1); dual clip (arXiv 1912.09729),
    off at None; ``delta``: upper bound of the unclipped ratio (INTELLECT-2, arXiv 2505.07291), off at None.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1 (3 is common) or None")
        if self.delta is not None and not self.delta > 1 + self.clip_high:
            raise ValueError(f"delta is {self.delta}; it must be above 1 + clip_high ({1 + self.clip_high}) or None")

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return self.of_ratio(log_ratio_T(tokens).exp(), tokens.advantages_T)

    def of_ratio(self, ratio_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, Metrics]:
        """The clipped loss [T] of ratios [T], of tokens or of their whole samples, and the sums of metrics."""
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        bounded_T = ratio_T if self.delta is None else ratio_T.clamp(max=self.delta)
        loss_T = torch.maximum(-bounded_T * advantages_T, -ratio_T.clamp(low, high) * advantages_T)
        low_T = (advantages_T < 0) & (ratio_T < low)
        high_T = (advantages_T > 0) & (ratio_T > high)
        metrics = _sums(ratio=ratio_T, clipped_low=low_T, clipped_high=high_T)
        if self.dual_clip is not None:
            dual_T = (advantages_T < 0) & (ratio_T > self.dual_clip)
            loss_T = torch.where(dual_T, -self.dual_clip * advantages_T, loss_T)
            metrics |= _sums(clipped_dual=dual_T)
        return loss_T, metrics


@dataclass(frozen=True, slots=True)
class Cispo:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log policy: every token keeps its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1). ``clip_low`` 1 means no lower bound.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T = log_ratio_T(tokens).detach().exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        metrics = _sums(ratio=ratio_T, clipped_low=ratio_T < low, clipped_high=ratio_T > high)
        return -ratio_T.clamp(low, high) * tokens.advantages_T * tokens.logprobs_T, metrics


@dataclass(frozen=True, slots=True)
class Gspo:
    """PPO's clipped loss of the sample's ratio exp(mean of its tokens' log ratios), on each of the tokens.

    GSPO (arXiv 2507.18071, section 4.1). ``length_weighted`` multiplies by the sample's length in tokens: LUSPO (arXiv
    2602.05261).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    length_weighted: bool = False

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_N = tokens.mean_N(log_ratio_T(tokens)).exp()
        clip = Ppo(clip_low=self.clip_low, clip_high=self.clip_high)
        loss_T, metrics = clip.of_ratio(ratio_N[tokens.sample_T], tokens.advantages_T)
        if self.length_weighted:
            loss_T = loss_T * tokens.sum_N(torch.ones_like(loss_T))[tokens.sample_T]
        return loss_T, metrics


@dataclass(frozen=True, slots=True)
class Gmpo:
    """-A exp(mean over tokens of s min(s log rho, s clip(log rho, -clip_low, clip_high))), s the sign of A.

    GMPO, the geometric mean of clipped ratios (arXiv 2507.20673, equation 5 and algorithm 1); bounds are of log ratios.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        if not (self.clip_low >= 0 and self.clip_high >= 0):
            raise ValueError(f"clip_low is {self.clip_low} and clip_high {self.clip_high}; both must be 0 or more")

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        log_T, advantages_T = log_ratio_T(tokens), tokens.advantages_T
        sign_T = _choose(advantages_T >= 0, 1.0, -1.0, log_T)
        clipped_T = log_T.clamp(-self.clip_low, self.clip_high)
        kept_T = sign_T * torch.minimum(sign_T * log_T, sign_T * clipped_T)
        ratio_N = tokens.mean_N(kept_T).exp()
        metrics = _sums(
            ratio=log_T.exp(),
            clipped_low=(sign_T < 0) & (log_T < -self.clip_low),
            clipped_high=(sign_T > 0) & (log_T > self.clip_high),
        )
        return -advantages_T * ratio_N[tokens.sample_T], metrics


@dataclass(frozen=True, slots=True)
class Sapo:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, where tau depends on the sign of A: a soft gate in place of the clip.

    SAPO (arXiv 2511.20347, equations 5 and 6).
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ValueError(f"tau is {self.tau_positive} and {self.tau_negative}; both must be above 0")

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T, advantages_T = log_ratio_T(tokens).exp(), tokens.advantages_T
        tau_T = _choose(advantages_T > 0, self.tau_positive, self.tau_negative, ratio_T)
        return -(4.0 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1.0)) * advantages_T, _sums(ratio=ratio_T)


@dataclass(frozen=True, slots=True)
class Dppo:
    """-sg(min(rho, max_ratio)) A log policy, masked where the update would move a distant probability further away.

    DPPO (arXiv 2602.04879). Distance of the policy from the anchor, on the sampled token alone: "tv", the difference of
    probabilities; "kl", KL(anchor || policy) in nats of the two Bernoulli distributions (this token or another). A
    token is masked where the distance exceeds ``limit``, and either A > 0 and the policy's probability is the higher
    one, or A < 0 and it is the lower one.
    """

    distance: str = "tv"
    limit: float = 0.2
    max_ratio: float = 20.0

    def __post_init__(self) -> None:
        if self.distance not in ("tv", "kl") or not self.limit > 0 or not self.max_ratio >= 1:
            raise ValueError(
                f"distance is {self.distance!r} (tv or kl), limit {self.limit} (above 0), max_ratio {self.max_ratio} "
                "(1 or more)"
            )

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T = log_ratio_T(tokens).detach().exp()
        policy_T = tokens.logprobs_T.detach().to(ratio_T.dtype).exp()
        anchor_T = tokens.anchor_T.detach().to(ratio_T.dtype).exp()
        far_T = (policy_T - anchor_T).abs() if self.distance == "tv" else bernoulli_kl_T(anchor_T, policy_T)
        advantages_T = tokens.advantages_T
        same_way_T = (policy_T - anchor_T) * advantages_T > 0
        masked_T = same_way_T & (far_T > self.limit)
        weight_T = torch.where(masked_T, 0.0, ratio_T.clamp(max=self.max_ratio))
        return -weight_T * advantages_T * tokens.logprobs_T, _sums(ratio=ratio_T, masked=masked_T)


@dataclass(frozen=True, slots=True)
class Vespo:
    """-sg(e^lambda w^k e^(-lambda w)) A log policy, w the ratio of the whole sample.

    VESPO (arXiv 2602.10693); k and lambda depend on the sign of A.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        if not min(self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative) > 0:
            raise ValueError(f"{self}: every exponent and rate must be above 0")

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        token_T = log_ratio_T(tokens).detach()
        log_N = tokens.sum_N(token_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        positive_N = tokens.advantages_N >= 0
        k_N = _choose(positive_N, self.k_positive, self.k_negative, log_N)
        rate_N = _choose(positive_N, self.lambda_positive, self.lambda_negative, log_N)
        weight_N = (rate_N + k_N * log_N - rate_N * log_N.exp()).exp()
        metrics = _sums(ratio=token_T.exp())
        return -weight_N[tokens.sample_T] * tokens.advantages_T * tokens.logprobs_T, metrics


@dataclass(frozen=True, slots=True)
class Topr:
    """A > 0: -A log policy; else -sg(clip(policy / anchor, 0, cap)) A log policy, the ratio of the whole sample.

    TOPR (arXiv 2503.14286, equation 7): positive samples without importance weights, negative ones with truncated ones.
    With ``level`` "token" the ratio is the token's own.
    """

    cap: float = 1.0
    level: str = "sequence"

    def __post_init__(self) -> None:
        if not self.cap > 0 or self.level not in ("sequence", "token"):
            raise ValueError(f"cap is {self.cap} (above 0) and level {self.level!r} (sequence or token)")

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        token_T = log_ratio_T(tokens).detach()
        if self.level == "sequence":
            ratio_T = tokens.sum_N(token_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[tokens.sample_T]
        else:
            ratio_T = token_T.exp()
        negative_T = tokens.advantages_T <= 0
        weight_T = torch.where(negative_T, ratio_T.clamp(max=self.cap), 1.0)
        metrics = _sums(ratio=token_T.exp(), clipped_high=negative_T & (ratio_T > self.cap))
        return -weight_T * tokens.advantages_T * tokens.logprobs_T, metrics


@dataclass(frozen=True, slots=True)
class Aspo:
    """A > 0: inverted ratio, -sg(min(1 / rho, dual_clip)) A log policy; A <= 0: PPO, above dual_clip -dual_clip A log
    policy.

    ASPO (arXiv 2510.06062): tokens with A > 0 and rho above 1 + clip_high are masked, as by PPO's clip; the inverted
    ratio gives unlikely tokens more weight. A weight at the bound dual_clip keeps its gradient (soft dual clip).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)
        if not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1 (3 is common)")

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T, advantages_T = log_ratio_T(tokens).exp(), tokens.advantages_T
        ppo_T, metrics = Ppo(clip_low=self.clip_low, clip_high=self.clip_high).of_ratio(ratio_T, advantages_T)
        value_T, is_positive_T = ratio_T.detach(), advantages_T > 0
        turned_T = torch.where(is_positive_T, 1.0 / value_T, value_T)
        dual_T = (advantages_T != 0) & (turned_T > self.dual_clip)
        weight_T = turned_T.clamp(max=self.dual_clip)
        weight_T = torch.where(is_positive_T & (value_T > 1.0 + self.clip_high), 0.0, weight_T)
        soft_T = -weight_T * advantages_T * tokens.logprobs_T
        return torch.where(is_positive_T | dual_T, soft_T, ppo_T), metrics | _sums(clipped_dual=dual_T)


STALE_LOG_RATIO = "stale_log_ratio"
"""Statistic of a step: the absolute log ratio, policy over rollout, from which `Sat` contracts clip ranges."""


@dataclass(frozen=True, slots=True)
class Sat:
    """PPO's clipped loss whose clip range shrinks for tokens that are far from the policy that sampled them.

    The bounds are 1 - clip_low f and 1 + clip_high f. With d the token's absolute log ratio of policy over rollout
    policy, and q the quantile of d over the tokens of the step: f = 1 for d <= q, and for q = 0; else
    f = 1 / (1 + (d / q - 1)^2). So only the stalest tokens are bounded more narrowly, and `quantile` 1 is `Ppo`.

    After the staleness-adaptive trust region (SAT, arXiv 2607.18722), which has the quantile of a micro-batch, and a
    Hill function of exponent 2 whose exact form is not known to us: q over the whole step, so that the gradient does
    not depend on micro-batches, and this function are flowrt's.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    quantile: float = 0.9

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile is {self.quantile}; it must be 0 to 1 (0.9 is common)")

    def measure(self, step: StepTokens) -> dict[str, float]:
        """q of a step's tokens by name; 0 of none."""
        drift_T = clamped_log_ratio_T(step.logprobs_T, step.rollout_T).double().abs().sort().values
        if not len(drift_T):
            return {STALE_LOG_RATIO: 0.0}
        place = self.quantile * (len(drift_T) - 1)
        low, high = float(drift_T[math.floor(place)]), float(drift_T[math.ceil(place)])
        return {STALE_LOG_RATIO: low + (high - low) * (place - math.floor(place))}

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T, advantages_T = log_ratio_T(tokens).exp(), tokens.advantages_T
        drift_T = clamped_log_ratio_T(tokens.logprobs_T.detach(), tokens.rollout_T.detach()).abs()
        factor_T, stale = torch.ones_like(drift_T), tokens.step[STALE_LOG_RATIO]
        if stale > 0:
            factor_T = 1.0 / (1.0 + (drift_T / stale - 1.0).clamp(min=0.0).square())
        low_T, high_T = 1.0 - self.clip_low * factor_T, 1.0 + self.clip_high * factor_T
        loss_T = torch.maximum(-ratio_T * advantages_T, -ratio_T.clamp(low_T, high_T) * advantages_T)
        return loss_T, _sums(
            ratio=ratio_T,
            clip_range_factor=factor_T,
            clipped_low=(advantages_T < 0) & (ratio_T < low_T),
            clipped_high=(advantages_T > 0) & (ratio_T > high_T),
        )


def _choose(condition: Tensor, if_true: float, if_false: float, like: Tensor) -> Tensor:
    """One of two numbers, in the type of ``like`` (`torch.where` rounds Python numbers to the default type)."""
    return torch.where(condition, like.new_tensor(if_true), like.new_tensor(if_false))


def bernoulli_kl_T(first_T: Tensor, second_T: Tensor) -> Tensor:
    """KL(Bernoulli(first) || Bernoulli(second)) in nats; finite for probabilities of 0 and 1."""
    tiny = torch.finfo(first_T.dtype).eps
    first_T, second_T = first_T.clamp(tiny, 1 - tiny), second_T.clamp(tiny, 1 - tiny)
    return first_T * (first_T / second_T).log() + (1 - first_T) * ((1 - first_T) / (1 - second_T)).log()


def require_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError unless the range [1 - clip_low, 1 + clip_high] contains 1 and nothing below 0."""
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}; they must be in [0, 1] and >= 0")


def kl_k1_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """log(policy / reference): unbiased, negative for some tokens. For rewards, not for a loss."""
    require_flat(logprobs_T=logprobs_T, reference_T=reference_T)
    return logprobs_T - reference_T.detach()


def kl_k2_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Half the squared log ratio: never negative, biased, with the gradient of the true divergence."""
    return kl_k1_T(logprobs_T, reference_T).square() / 2


def kl_k3_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(reference / policy): never negative, unbiased. Used by GRPO.

    d is clamped to +-20 before exp; beyond that a token has no gradient.
    """
    delta_T = clamped_log_ratio_T(reference_T.detach(), logprobs_T)
    # expm1 is precise for small d, which most tokens have; exp(d) - 1 is not.
    return delta_T.expm1() - delta_T


def kl_k3_with_k2_slope_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2, which on-policy is the gradient of the true divergence."""
    k2_T = kl_k2_T(logprobs_T, reference_T)
    return k2_T + (kl_k3_T(logprobs_T, reference_T) - k2_T).detach()


def kl_unbiased_T(logprobs_T: Tensor, reference_T: Tensor, rollout_T: Tensor) -> Tensor:
    """k3 times policy / rollout, with the gradient of both factors: off-policy too, value and gradient are unbiased.

    DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
    """
    return clamped_log_ratio_T(logprobs_T, rollout_T.detach()).exp() * kl_k3_T(logprobs_T, reference_T)


KlEstimator = Literal["k1", "k2", "k3", "k3_with_k2_slope", "unbiased"]
KL_ESTIMATORS: dict[KlEstimator, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda policy_T, reference_T, _: kl_k1_T(policy_T, reference_T),
    "k2": lambda policy_T, reference_T, _: kl_k2_T(policy_T, reference_T),
    "k3": lambda policy_T, reference_T, _: kl_k3_T(policy_T, reference_T),
    "k3_with_k2_slope": lambda policy_T, reference_T, _: kl_k3_with_k2_slope_T(policy_T, reference_T),
    "unbiased": kl_unbiased_T,
}
"""Estimators of the KL term: functions of log-probabilities under policy, reference and rollout policy."""


MAX_KL_ERROR = 0.2
"""Clip of the relative error KL / target - 1 of an adaptive coefficient (arXiv 1909.08593, section 2.2)."""


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A coefficient of the KL term that keeps the divergence near a target: a log-space proportional controller.

    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon, Ziegler et al. (arXiv 1909.08593, section 2.2).

    Args:
        target: target divergence in nats per token (the paper's is per sample).
        horizon: number of samples over which the coefficient changes by a factor of at most about 1.2.
    """

    target: float
    horizon: int

    def __post_init__(self) -> None:
        if not self.target > 0 or self.horizon < 1:
            raise ValueError(f"target is {self.target} and horizon {self.horizon}; both must be above 0")

    def next_coef(self, coef: float, kl: float, samples: float) -> float:
        """The coefficient of the next step.

        Args:
            coef: coefficient of this step.
            kl: mean divergence over the step's tokens, in nats; if it is not finite, the coefficient is unchanged.
            samples: n, the number of samples trained in the step.
        """
        if not math.isfinite(kl):
            return coef
        error = min(max(kl / self.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        return coef * (1.0 + error * samples / self.horizon)
