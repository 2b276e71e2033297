"""Importance correction for tokens that one policy sampled and another one trains on.

The rollout engine and the trainer assign slightly different probabilities to the same token (kernels, precision, older
weights). Each function returns a detached weight per token for the policy term of the loss: trainer probability over
rollout probability, truncated or masked.

Log ratios are clamped to +-20 before exp. Equal log-probabilities give a weight of exactly 1 everywhere.

Shapes: N = samples, T = response tokens of all samples, flattened.
"""

import torch
from torch import Tensor

from flowrt.algorithms.ratios import LOG_RATIO_LIMIT, clamped_log_ratio_T, require_flat


def truncated_importance(trainer_T: Tensor, rollout_T: Tensor, *, cap: float) -> Tensor:
    """min(trainer / rollout, cap) per token: truncated importance sampling (TIS).

    Both arguments are log-probabilities in nats. `cap=inf` is plain importance sampling: unbiased, with a
    heavy tail. Source: Ionides, "Truncated importance sampling" (2008); for rollout engines,
    fengyao.notion.site/off-policy-rl, where cap = 2. Raises ValueError if cap < 1 or shapes differ.
    """
    _require_cap(cap)
    return clamped_log_ratio_T(trainer_T.detach(), rollout_T.detach()).exp().clamp(max=cap)


def masked_importance(trainer_T: Tensor, rollout_T: Tensor, *, low: float, high: float) -> Tensor:
    """trainer / rollout per token inside [low, high], 0 outside: such tokens are dropped, not capped.

    IcePop (Ring-1T, arXiv 2510.18855), where the band is [0.5, 5]. Raises ValueError unless
    0 <= low <= 1 <= high, or if shapes differ.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"the importance band is [{low}, {high}]; it must contain 1 and start at 0 or above")
    ratio_T = clamped_log_ratio_T(trainer_T.detach(), rollout_T.detach()).exp()
    return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, 0.0)


def sequence_truncated_importance(
    trainer_T: Tensor, rollout_T: Tensor, sample_T: Tensor, n_samples: int, *, cap: float
) -> Tensor:
    """min(product of the ratios of the token's whole sample, cap), the same for all tokens of a sample.

    This is the importance weight of the whole response, where `truncated_importance` has one per token; its variance
    grows with the length. Source: verl, docs/algo/rollout_corr.md.

    Args:
        trainer_T: log-probabilities of the trainer, in nats.
        rollout_T: those of the rollout engine.
        sample_T: sample index of each token, below `n_samples`. All tokens of a sample must be in the call.
        n_samples: number of samples.
        cap: largest weight, at least 1.

    Raises:
        ValueError: if cap < 1 or shapes differ.
    """
    _require_cap(cap)
    require_flat(trainer_T=trainer_T, rollout_T=rollout_T, sample_T=sample_T)
    token_T = clamped_log_ratio_T(trainer_T.detach(), rollout_T.detach())
    total_N = token_T.new_zeros(n_samples).index_add_(0, sample_T, token_T)
    weight_N = total_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    return weight_N[sample_T]


def mismatch_statistics(trainer_T: Tensor, rollout_T: Tensor, weights_T: Tensor) -> dict[str, float]:
    """Statistics of the mismatch between trainer and rollout policy, and of the weights that correct it.

    - `kl_k1`, `kl_k3`: two estimates of KL(rollout || trainer) in nats per token, both unbiased; k1 can be
      negative, k3 cannot and varies less (joschu.net/blog/kl-approx.html).
    - `max_abs_delta`: largest |trainer - rollout| in nats, not clamped.
    - `effective_sample_fraction`: (sum w)^2 / (T sum w^2), 1 for equal weights, 1/T if one outweighs all.
    - `capped_fraction`: share of tokens whose weight is above 0 but below their own ratio. Meaningless for
      sequence weights, which do not derive from a token's ratio.
    - `masked_fraction`: share of tokens whose weight is 0.

    The effective sample fraction of a step is not the mean over its micro-batches: concatenate the (detached) tensors
    of the step and call this once. Raises ValueError if there are no tokens or shapes differ.
    """
    require_flat(trainer_T=trainer_T, rollout_T=rollout_T, weights_T=weights_T)
    if trainer_T.numel() == 0:
        raise ValueError("mismatch_statistics got 0 tokens; call it for a step with tokens")
    delta_T = clamped_log_ratio_T(trainer_T.detach(), rollout_T.detach())
    weights_T = weights_T.detach()
    squares = weights_T.square().sum() * weights_T.numel()
    # If all weights are 0 the fraction is 0, not NaN.
    effective = weights_T.sum().square() / squares.clamp(min=torch.finfo(squares.dtype).tiny)
    capped_T = (weights_T > 0) & (weights_T < delta_T.exp())
    return {
        "kl_k1": -delta_T.mean().item(),
        "kl_k3": (delta_T.expm1() - delta_T).mean().item(),
        "max_abs_delta": (trainer_T - rollout_T).detach().abs().max().item(),
        "effective_sample_fraction": effective.item(),
        "capped_fraction": capped_T.double().mean().item(),
        "masked_fraction": (weights_T == 0).double().mean().item(),
    }


def _require_cap(cap: float) -> None:
    # Below 1 the cap would also cut tokens on which both policies agree.
    if not cap >= 1:
        raise ValueError(f"the importance cap is {cap}; it must be at least 1 (2 is common, inf never caps)")
