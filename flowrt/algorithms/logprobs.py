"""Log-probabilities and entropy from logits, without a second tensor of the vocabulary's size.

Logits are the largest tensor of a training step. They are processed in slices of positions, in float32, and the
backward pass recomputes the softmax of a slice instead of keeping it. In addition to the logits and their gradient,
only a few tensors of CHUNK_ELEMENTS floats exist at a time.

Shapes: U = predictions, T = predicted tokens, V = vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""64 MiB of float32 per slice: large enough that the overhead of kernel launches does not matter."""


def predicted_logprobs(logits_UV: Tensor, prediction_T: Tensor, target_T: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of tokens: of target_T[t] under logits_UV[prediction_T[t]] / temperature.

    Several tokens may share a prediction. Returns logprobs_T in nats, float32 or wider: selected logit minus logsumexp.
    Raises ValueError if the temperature is not positive.
    """
    _require_temperature(temperature)
    apply: Callable[[Tensor, Tensor, Tensor, float], Tensor] = _PredictedLogprobs.apply
    return apply(logits_UV, prediction_T, target_T, temperature)


def logits_entropy(logits_UV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of the distribution of each prediction, with gradient: entropy_U in nats, float32 or wider.

    Raises ValueError if `temperature` is not positive.
    """
    _require_temperature(temperature)
    apply: Callable[[Tensor, float], Tensor] = _LogitsEntropy.apply
    return apply(logits_UV, temperature)


@torch.no_grad()
def distribution_logprobs(logits_UV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of all tokens: logprobs_UV in nats, float32 or wider, detached.

    Computed as in `predicted_logprobs`. torch's log_softmax in float32 differs by 2.5e-5 nats at 262k tokens, since it
    adds up all terms one after the other.
    """
    centred_UV, _ = _centred(logits_UV, temperature)
    return centred_UV.sub_(centred_UV.logsumexp(-1, keepdim=True))


class _PredictedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, prediction_T: Tensor, target_T: Tensor, temperature: float) -> Tensor:
        peak_U = logits_UV.new_empty(len(logits_UV), dtype=torch.promote_types(logits_UV.dtype, torch.float32))
        normaliser_U = torch.empty_like(peak_U)
        for span in _spans(logits_UV):
            centred, peak_U[span] = _centred(logits_UV[span], temperature)
            normaliser_U[span] = centred.logsumexp(-1)
        ctx.save_for_backward(logits_UV, prediction_T, target_T, normaliser_U)
        ctx.temperature = temperature
        selected_T = logits_UV[prediction_T, target_T].to(peak_U.dtype) / temperature
        return selected_T - peak_U[prediction_T] - normaliser_U[prediction_T]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_UV, prediction_T, target_T, normaliser_U = ctx.saved_tensors
        upstream_T = gradient_T / ctx.temperature
        upstream_U = torch.zeros_like(normaliser_U).index_put_((prediction_T,), upstream_T, accumulate=True)
        slope_UV = torch.empty_like(logits_UV)
        for span in _spans(logits_UV):
            # d logprob / d scaled logit = one-hot of the token minus softmax.
            centred, _ = _centred(logits_UV[span], ctx.temperature)
            slope = centred.sub_(normaliser_U[span].unsqueeze(-1)).exp_().mul_(-upstream_U[span].unsqueeze(-1))
            # Added before rounding to the dtype of the logits: the sum is nearly 0 for a token with probability near 1.
            # Tokens of other spans add 0: to select by a mask the host would wait for a device.
            is_other_T = (prediction_T < span.start) | (prediction_T >= span.stop)
            where = ((prediction_T - span.start).clamp(0, len(slope) - 1), target_T)
            slope_UV[span] = slope.index_put_(where, upstream_T.masked_fill(is_other_T, 0.0), accumulate=True)
        return slope_UV, None, None, None


class _LogitsEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, temperature: float) -> Tensor:
        normaliser_U = logits_UV.new_empty(len(logits_UV), dtype=torch.promote_types(logits_UV.dtype, torch.float32))
        entropy_U = torch.empty_like(normaliser_U)
        for span in _spans(logits_UV):
            centred, _ = _centred(logits_UV[span], temperature)
            normaliser_U[span] = centred.logsumexp(-1)
            expected = torch.linalg.vecdot((centred - normaliser_U[span].unsqueeze(-1)).exp_(), centred)
            entropy_U[span] = normaliser_U[span] - expected
        ctx.save_for_backward(logits_UV, normaliser_U, entropy_U)
        ctx.temperature = temperature
        return entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_U: Tensor) -> tuple[Tensor, None]:
        logits_UV, normaliser_U, entropy_U = ctx.saved_tensors
        slope_UV = torch.empty_like(logits_UV)
        for span in _spans(logits_UV):
            # d entropy / d scaled logit = -p (log p + entropy).
            centred, _ = _centred(logits_UV[span], ctx.temperature)
            logprobs = centred.sub_(normaliser_U[span].unsqueeze(-1))
            slope = logprobs.exp().mul_(logprobs.add_(entropy_U[span].unsqueeze(-1)))
            slope_UV[span] = slope.mul_(-(gradient_U[span] / ctx.temperature).unsqueeze(-1))
        return slope_UV, None


def _spans(logits_UV: Tensor) -> Iterator[slice]:
    count, vocabulary = logits_UV.shape
    height = max(1, CHUNK_ELEMENTS // max(1, vocabulary))
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


def _centred(chunk_UV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The scaled logits minus the maximum of each prediction, and these maxima."""
    scaled = chunk_UV.to(torch.promote_types(chunk_UV.dtype, torch.float32)) / temperature
    # Softmax is invariant to a common offset, but logit - logsumexp loses precision if logits are large.
    peak = scaled.amax(-1, keepdim=True)
    return scaled.sub_(peak), peak.squeeze(-1)


def _require_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy rollouts have no log-probability)")
