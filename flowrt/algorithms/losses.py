"""Policy losses per token, and their sum over the tokens of a micro-batch.

- Losses and metrics are sums over tokens, never means. The trainer adds the gradients of all micro-batches of a step on
  all ranks and divides once by the global count (see `aggregation`), so the gradient does not depend on the cut.
- Log ratios are clamped to +-20 before exp; beyond that a token has no gradient.

Shapes: N = samples of the micro-batch, T = their response tokens, flattened; sample_T is the index into N of
each token's sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrt.algorithms.kl import kl_k3_T
from flowrt.algorithms.ratios import clamped_log_ratio_T, require_flat


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """Parameters of the GRPO loss. Raises ValueError for a value out of range."""

    clip_low: float = 0.2
    """How far the ratio may fall below 1 before a token with negative advantage has no gradient."""
    clip_high: float = 0.28
    """How far it may rise above 1 before a token with positive advantage has no gradient."""
    kl_coef: float = 1e-3
    """Weight of the k3 estimate of the KL from the reference policy; 0 needs no reference."""
    dual_clip: float | None = None
    """Upper bound of the loss of a token with negative advantage, in multiples of |advantage|; 3 is common."""

    def __post_init__(self) -> None:
        _require_clip(self.clip_low, self.clip_high, self.dual_clip)
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef is {self.kl_coef}; it must be 0 or more")


@dataclass(frozen=True, slots=True, eq=False)
class ClipStatistics:
    """Detached sums over tokens; scalar tensors, so that no device synchronisation is needed."""

    clipped_low_sum: Tensor
    clipped_high_sum: Tensor
    clipped_dual_sum: Tensor
    ratio_sum: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLossSum:
    """The loss of one micro-batch, summed over its tokens, and metrics summed in the same way."""

    loss_sum: Tensor
    """Scalar with gradient."""
    tokens: int
    clips: ClipStatistics
    kl_sum: Tensor | None
    """KL from the reference in nats, unweighted; None without a reference."""
    entropy_sum: Tensor | None

    def metric_sums(self) -> dict[str, Tensor]:
        """Detached scalars by name, to be added over the step.

        The divisor at its end is the global token count; for `loss_sum` it is that of the aggregation.
        """
        sums = {
            "loss_sum": self.loss_sum.detach(),
            "clipped_low_sum": self.clips.clipped_low_sum,
            "clipped_high_sum": self.clips.clipped_high_sum,
            "clipped_dual_sum": self.clips.clipped_dual_sum,
            "ratio_sum": self.clips.ratio_sum,
        }
        optional = {"kl_sum": self.kl_sum, "entropy_sum": self.entropy_sum}
        return sums | {name: value for name, value in optional.items() if value is not None}


def policy_loss_T(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, ClipStatistics]:
    """max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -dual_clip A.

    PPO (arXiv 1707.06347, equation 7), with separate bounds (DAPO, arXiv 2503.14476, section 3.1) and the dual clip
    (arXiv 1912.09729). Only `logprobs_T` has a gradient. A token counts as clipped if the clip has removed its
    gradient. Log-probabilities are in nats.

    Raises ValueError if a bound is out of range or shapes differ.
    """
    ratio_T = clamped_log_ratio_T(logprobs_T, old_logprobs_T.detach()).exp()
    return _clipped_T(ratio_T, advantages_T.detach(), clip_low, clip_high, dual_clip)


def gspo_loss_T(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_N: Tensor,
    sample_T: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, ClipStatistics]:
    """The clipped loss with one ratio per sample, exp(mean of its log ratios), for each of its tokens.

    GSPO (arXiv 2507.18071, section 4.1); its objective is the mean over samples, so aggregate with
    `sequence_mean_weights_T`. All tokens of a sample must be in the call. Raises ValueError if a bound is out of range
    or shapes differ.
    """
    require_flat(logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, sample_T=sample_T)
    token_T = clamped_log_ratio_T(logprobs_T, old_logprobs_T.detach())
    zeros_N = token_T.new_zeros(advantages_N.shape[0])
    lengths_N = zeros_N.index_add(0, sample_T, torch.ones_like(token_T))
    mean_N = zeros_N.index_add(0, sample_T, token_T) / lengths_N.clamp(min=1)
    return _clipped_T(mean_N.exp()[sample_T], advantages_N.detach()[sample_T], clip_low, clip_high, None)


def cispo_loss_T(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_high: float,
    clip_low: float = 1.0,
) -> tuple[Tensor, ClipStatistics]:
    """-clip(ratio, 1 - clip_low, 1 + clip_high) A log pi, ratio detached: every token keeps its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1), which has no lower bound: `clip_low=1`. A token counts as clipped
    if its ratio is out of bounds, for either sign of its advantage. Raises ValueError if a bound is out of range or
    shapes differ.
    """
    require_flat(logprobs_T=logprobs_T, advantages_T=advantages_T)
    _require_clip(clip_low, clip_high, None)
    ratio_T = clamped_log_ratio_T(logprobs_T.detach(), old_logprobs_T.detach()).exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    statistics = _clip_statistics(ratio_T, ratio_T < low, ratio_T > high, torch.zeros_like(ratio_T))
    return -ratio_T.clamp(low, high) * advantages_T.detach() * logprobs_T, statistics


def token_loss_sum(
    policy_T: Tensor,
    clips: ClipStatistics,
    *,
    rollout_weights_T: Tensor | None = None,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
    aggregation_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> TokenLossSum:
    """Sum over tokens of aggregation x (rollout weight x policy + kl_coef x KL).

    Args:
        policy_T: any policy loss of this module.
        clips: its statistics.
        rollout_weights_T: importance weights (see `correction`), for the policy term only, as is usual; the KL term
            still acts on tokens whose weight is 0. Detached.
        kl_T: KL estimates in nats, with gradient.
        kl_coef: their weight.
        aggregation_T: weights of `aggregation`, 1 per token by default. Detached.
        entropy_T: entropies in nats, for the metric only.

    Raises:
        ValueError: if shapes differ, or kl_coef > 0 without `kl_T`.
    """
    if kl_coef > 0 and kl_T is None:
        raise ValueError(f"kl_coef is {kl_coef} but there is no reference; pass its log-probabilities or kl_coef=0")
    optional = {
        "rollout_weights_T": rollout_weights_T,
        "kl_T": kl_T,
        "aggregation_T": aggregation_T,
        "entropy_T": entropy_T,
    }
    require_flat(policy_T=policy_T, **{name: value for name, value in optional.items() if value is not None})
    loss_T = policy_T if rollout_weights_T is None else rollout_weights_T.detach() * policy_T
    if kl_T is not None and kl_coef > 0:
        loss_T = loss_T + kl_coef * kl_T
    if aggregation_T is not None:
        loss_T = aggregation_T.detach() * loss_T
    return TokenLossSum(
        loss_sum=loss_T.sum(),
        tokens=policy_T.numel(),
        clips=clips,
        kl_sum=None if kl_T is None else kl_T.detach().sum(),
        entropy_sum=None if entropy_T is None else entropy_T.detach().sum(),
    )


def grpo_token_loss_sum(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_N: Tensor,
    sample_T: Tensor,
    *,
    loss: GrpoLoss,
    rollout_weights_T: Tensor | None = None,
    reference_T: Tensor | None = None,
    aggregation_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> TokenLossSum:
    """The GRPO loss of one micro-batch: clipped policy term plus k3 to the reference, summed over tokens.

    DeepSeekMath (arXiv 2402.03300, equation 3), aggregated by `aggregation_T`. Log-probabilities are in nats.

    Args:
        logprobs_T: under the policy being trained, with gradient.
        old_logprobs_T: under the policy that the ratio is relative to.
        advantages_N: advantage of each sample.
        sample_T: sample of each token.
        loss: parameters. With `kl_coef=0` the KL from a reference is a metric only.
        rollout_weights_T: see `token_loss_sum`; so are the other weights and metrics.
        reference_T: under the reference policy.
        aggregation_T: weights of `aggregation`.
        entropy_T: entropies in nats.

    Raises:
        ValueError: like `token_loss_sum`.
    """
    require_flat(logprobs_T=logprobs_T, sample_T=sample_T)
    policy_T, clips = policy_loss_T(
        logprobs_T,
        old_logprobs_T,
        advantages_N[sample_T],
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
    )
    return token_loss_sum(
        policy_T,
        clips,
        rollout_weights_T=rollout_weights_T,
        kl_T=None if reference_T is None else kl_k3_T(logprobs_T, reference_T),
        kl_coef=loss.kl_coef,
        aggregation_T=aggregation_T,
        entropy_T=entropy_T,
    )


def _clipped_T(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, ClipStatistics]:
    require_flat(ratio_T=ratio_T, advantages_T=advantages_T)
    _require_clip(clip_low, clip_high, dual_clip)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss_T = torch.maximum(-ratio_T * advantages_T, -ratio_T.clamp(low, high) * advantages_T)
    dual_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    if dual_clip is not None:
        dual_T = (advantages_T < 0) & (ratio_T > dual_clip)
        loss_T = torch.where(dual_T, -dual_clip * advantages_T, loss_T)
    low_T = (advantages_T < 0) & (ratio_T < low)
    high_T = (advantages_T > 0) & (ratio_T > high)
    return loss_T, _clip_statistics(ratio_T, low_T, high_T, dual_T)


def _clip_statistics(ratio_T: Tensor, low_T: Tensor, high_T: Tensor, dual_T: Tensor) -> ClipStatistics:
    ratio_T = ratio_T.detach()
    return ClipStatistics(
        clipped_low_sum=low_T.to(ratio_T.dtype).sum(),
        clipped_high_sum=high_T.to(ratio_T.dtype).sum(),
        clipped_dual_sum=dual_T.to(ratio_T.dtype).sum(),
        ratio_sum=ratio_T.sum(),
    )


def _require_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}; they must be in [0, 1] and >= 0")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1 (3 is common) or None")
