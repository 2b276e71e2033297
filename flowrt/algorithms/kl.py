"""Estimators of KL(policy || reference) from the log-probabilities of tokens that the policy sampled.

In nats per token, after joschu.net/blog/kl-approx.html. All keep the gradient of the policy and detach the reference.
As a *loss* they differ more than as an estimate: on-policy, the gradient of k2 is that of the true divergence, that of
k3 is close to it if the policies are close, and that of k1 is 0 on average.

Shapes: T = response tokens of all samples, flattened.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flowrt.algorithms.ratios import clamped_log_ratio_T, require_flat


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
    """The value of k3 with the gradient of k2, which on-policy is that of the true divergence."""
    k2_T = kl_k2_T(logprobs_T, reference_T)
    return k2_T + (kl_k3_T(logprobs_T, reference_T) - k2_T).detach()


def kl_unbiased_T(logprobs_T: Tensor, reference_T: Tensor, rollout_T: Tensor) -> Tensor:
    """k3 times policy / rollout, with the gradient of both factors: unbiased in value and gradient off-policy.

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
"""Bound of the relative error that an adaptive coefficient follows in a step (arXiv 1909.08593, section 2.2)."""


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A coefficient of the divergence that follows a target: a log-space proportional controller.

    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon, Ziegler et al. (arXiv 1909.08593, section 2.2).

    Args:
        target: of the divergence, in nats a token (the paper's is of whole samples).
        horizon: samples after which the coefficient has changed by a factor of about 1.2, at most.
    """

    target: float
    horizon: int

    def __post_init__(self) -> None:
        if not self.target > 0 or self.horizon < 1:
            raise ValueError(f"target is {self.target} and horizon {self.horizon}; both must be above 0")

    def next_coef(self, coef: float, kl: float, samples: float) -> float:
        """The coefficient after a step.

        Args:
            coef: of the step.
            kl: mean divergence over the step's tokens, in nats; the coefficient stays where it is not finite.
            samples: trained in the step, n.
        """
        if not math.isfinite(kl):
            return coef
        error = min(max(kl / self.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        return coef * (1.0 + error * samples / self.horizon)
