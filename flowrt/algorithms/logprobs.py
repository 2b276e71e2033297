"""Log-probabilities and entropy from logits, without a second tensor of the vocabulary's size.

Logits are the largest tensor of a training step. They are read a slice of positions at a time, in float32,
and the backward pass recomputes a slice's softmax instead of keeping it: beside the logits and their
gradient, which exist anyway, no more than CHUNK_ELEMENTS floats are alive (a few times over).

Shapes: B = rows, L = padded length, M = L - 1 predictions, V = vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""64 MiB of float32 per slice: large enough that launch overhead is lost in the work."""


def selected_logprobs(logits_BLV: Tensor, tokens_BL: Tensor, temperature: float = 1.0) -> Tensor:
    """logprobs_BM in nats, where [b, m] is that of tokens_BL[b, m + 1] under logits_BLV[b, m] / temperature.

    The shift by one happens here and only here: pass logits and tokens of the same positions. Computed in
    float32 (float64 logits stay float64) as selected logit minus logsumexp. `temperature` is the one the
    rollout sampled with, so that both sides mean the same distribution. Raises ValueError if it isn't
    positive or shapes differ.
    """
    _require_temperature(temperature)
    if logits_BLV.dim() != 3 or logits_BLV.shape[:2] != tokens_BL.shape:
        raise ValueError(
            f"logits_BLV {list(logits_BLV.shape)} and tokens_BL {list(tokens_BL.shape)} must agree in rows "
            "and positions; pass the logits of every token, the last one included"
        )
    apply: Callable[[Tensor, Tensor, float], Tensor] = _SelectedLogprobs.apply
    return apply(logits_BLV, tokens_BL, temperature)


@torch.no_grad()
def prediction_entropy(logits_BLV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of each next-token distribution, entropy_BM: a detached metric.

    Aligned with `selected_logprobs`. Raises ValueError if `temperature` isn't positive.
    """
    _require_temperature(temperature)
    chunks = [
        torch.special.entr(_centred(logits_BLV, span, temperature).softmax(-1)).sum(-1) for span in _spans(logits_BLV)
    ]
    return torch.cat(chunks, dim=1) if chunks else logits_BLV.new_empty(logits_BLV.shape[0], 0)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BLV: Tensor, tokens_BL: Tensor, temperature: float) -> Tensor:
        rows, length, _ = logits_BLV.shape
        dtype = torch.promote_types(logits_BLV.dtype, torch.float32)
        normaliser_BM = logits_BLV.new_empty(rows, max(length - 1, 0), dtype=dtype)
        logprobs_BM = torch.empty_like(normaliser_BM)
        next_BM1 = tokens_BL[:, 1:].unsqueeze(-1)
        for span in _spans(logits_BLV):
            centred = _centred(logits_BLV, span, temperature)
            normaliser_BM[:, span] = centred.logsumexp(-1)
            logprobs_BM[:, span] = centred.gather(-1, next_BM1[:, span]).squeeze(-1) - normaliser_BM[:, span]
        ctx.save_for_backward(logits_BLV, next_BM1, normaliser_BM)
        ctx.temperature = temperature
        return logprobs_BM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BM: Tensor) -> tuple[Tensor, None, None]:
        logits_BLV, next_BM1, normaliser_BM = ctx.saved_tensors
        # Zeros, because the last position predicts nothing and must get no gradient.
        logits_gradient_BLV = torch.zeros_like(logits_BLV)
        for span in _spans(logits_BLV):
            upstream = gradient_BM[:, span].unsqueeze(-1)
            centred = _centred(logits_BLV, span, ctx.temperature)
            # d logprob / d scaled logit = one-hot of the token minus softmax.
            slope = (centred - normaliser_BM[:, span].unsqueeze(-1)).exp_().mul_(-upstream)
            slope.scatter_add_(-1, next_BM1[:, span], upstream)
            logits_gradient_BLV[:, span] = slope.div_(ctx.temperature)
        return logits_gradient_BLV, None, None


def _spans(logits_BLV: Tensor) -> Iterator[slice]:
    rows, length, vocabulary = logits_BLV.shape
    width = max(1, CHUNK_ELEMENTS // max(1, rows * vocabulary))
    return (slice(start, min(start + width, length - 1)) for start in range(0, length - 1, width))


def _centred(logits_BLV: Tensor, span: slice, temperature: float) -> Tensor:
    chunk = logits_BLV[:, span]
    scaled = chunk.to(torch.promote_types(chunk.dtype, torch.float32)) / temperature
    # Softmax does not mind a common offset, but the digits of logit - logsumexp do when logits are large.
    return scaled.sub_(scaled.amax(-1, keepdim=True))


def _require_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy rollouts have no log-probability)")
