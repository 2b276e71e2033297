"""Estimates of KL(policy || reference) from the log-probabilities of tokens that the policy sampled.

All in nats per token, after joschu.net/blog/kl-approx.html. All keep the gradient of the policy and detach
the reference. As a *loss* they differ more than as an estimate: on-policy, the gradient of k2 is that of
the true divergence, that of k3 is close while the policies are, and that of k1 is 0 on average.

Shapes: T = response tokens of all samples, flattened.
"""

from torch import Tensor

from flowrt.algorithms.ratios import clamped_log_ratio_T, require_flat


def kl_k1_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """log(policy / reference): unbiased, negative for some tokens. Fit for rewards, not for a loss."""
    require_flat(logprobs_T=logprobs_T, reference_T=reference_T)
    return logprobs_T - reference_T.detach()


def kl_k2_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Half the squared log ratio: never negative, biased, with the gradient of the true divergence."""
    return kl_k1_T(logprobs_T, reference_T).square() / 2


def kl_k3_T(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(reference / policy): never negative, unbiased. The estimate GRPO takes.

    d is clamped to +-20 before exp; beyond that a token has no gradient.
    """
    delta_T = clamped_log_ratio_T(reference_T.detach(), logprobs_T)
    # expm1 keeps the digits that exp(d) - 1 loses near equality, where most tokens are.
    return delta_T.expm1() - delta_T
