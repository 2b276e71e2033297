"""Draws from a distribution, or from a truncated one (top-k, top-p, min-p), with its support.

Shapes: R rows, V vocabulary, K candidates a row, most likely first.
"""

import torch

from flowrt.algorithms.support import Support
from flowrt.engines.options import Truncation


def draw(logprobs_RV: torch.Tensor, uniform_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token a row by inverse transform sampling, with a number in [0, 1) for each row.

    Returns tokens_R1, int64, and their log-probabilities [R, 1].
    """
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1)
    draws_R1 = uniform_R1 * cumulative_RV[:, -1:]
    chosen_R1 = torch.searchsorted(cumulative_RV, draws_R1, right=True).clamp_(max=logprobs_RV.shape[1] - 1)
    return chosen_R1, logprobs_RV.gather(1, chosen_R1)


def draw_truncated(
    logprobs_RV: torch.Tensor, uniform_R1: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor, list[Support]]:
    """Draw a token a row by inverse transform sampling.

    Args:
        logprobs_RV: of the whole distribution, in nats, at the sampling temperature.
        uniform_R1: a number in [0, 1) for each row.
        truncation: limits of the support. The most likely token is always in it.

    Returns:
        tokens_R1, int64; their log-probabilities [R, 1], renormalised over the support; the support of each row.
    """
    vocabulary = logprobs_RV.shape[1]
    logprobs_RK, tokens_RK = logprobs_RV.topk(min(truncation.top_k or vocabulary, vocabulary), dim=-1)
    probabilities_RK = logprobs_RK.exp()
    kept_RK = torch.ones_like(tokens_RK, dtype=torch.bool)
    if truncation.top_p < 1:
        more_likely_RK = torch.nn.functional.pad(probabilities_RK.cumsum(-1)[:, :-1], (1, 0))
        kept_RK &= more_likely_RK < truncation.top_p
    if truncation.min_p > 0:
        kept_RK &= probabilities_RK >= truncation.min_p * probabilities_RK[:, :1]
    kept_RK[:, 0] = True
    renormalised_RK = logprobs_RK.masked_fill(~kept_RK, -torch.inf).log_softmax(-1)
    cumulative_RK = renormalised_RK.exp().cumsum(-1)
    counts_R1 = kept_RK.sum(-1, keepdim=True)  # the kept ones come first
    place_R1 = torch.searchsorted(cumulative_RK, uniform_R1 * cumulative_RK[:, -1:], right=True)
    place_R1 = torch.minimum(place_R1, counts_R1 - 1)
    kept = tokens_RK[kept_RK].to(torch.int32).split(counts_R1[:, 0].tolist())
    counts = counts_R1.to(torch.int32).unbind()
    supports = [Support(tokens, count) for tokens, count in zip(kept, counts, strict=True)]
    return tokens_RK.gather(1, place_R1), renormalised_RK.gather(1, place_R1), supports
