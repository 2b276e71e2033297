"""Fused LM head: log-probabilities and entropy from hidden states, without the logits ever being whole.

The vocabulary is read a slice at a time, in the forward pass (a running log-sum-exp) and again in the backward pass,
which recomputes each slice's logits from the hidden states. Beside the inputs and their gradients no more than
SLICE_ELEMENTS floats are alive, a few times over. Slices are of the vocabulary, not of tokens: then the gradient of
each row of the output matrix is one product over all tokens and is rounded to the matrix's type once.

Logits are products in the type of the hidden states, as a model and a rollout engine compute them, and everything after
them is float32 or wider: a policy that has not moved has log ratios of 0.

Shapes: U = predictions, D = width of the hidden states, V = vocabulary, T = tokens that the predictions are about.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLICE_ELEMENTS = 1 << 23
"""32 MiB of float32 a slice."""


def fused_logprobs(
    hidden_UD: Tensor,
    weight_VD: Tensor,
    prediction_T: Tensor,
    target_T: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and entropy of predictions, both with gradients.

    Args:
        hidden_UD: hidden state of each prediction, the input of the LM head.
        weight_VD: matrix of the LM head, in the type of the hidden states.
        prediction_T: index of the prediction that each token is about; several tokens may be of one prediction.
        target_T: the tokens.
        temperature: divides the logits.

    Returns:
        logprobs_T in nats, and entropy_U in nats; both float32, or float64 for float64 inputs.

    Raises:
        ValueError: if the temperature is not positive, or the shapes do not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy rollouts have no log-probability)")
    if hidden_UD.dim() != 2 or weight_VD.dim() != 2 or hidden_UD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden_UD {list(hidden_UD.shape)} and weight_VD {list(weight_VD.shape)} must be matrices of equal width"
        )
    apply: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = _FusedLogprobs.apply
    return apply(hidden_UD, weight_VD, prediction_T, target_T, temperature)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, prediction_T: Tensor, target_T: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden_UD.dtype, torch.float32)
        peak_U = hidden_UD.new_full((len(hidden_UD),), -torch.inf, dtype=precise)
        total_U = torch.zeros_like(peak_U)  # sum of exp(logit - peak)
        moment_U = torch.zeros_like(peak_U)  # sum of exp(logit - peak) (logit - peak)
        selected_T = torch.zeros(len(target_T), dtype=precise, device=hidden_UD.device)
        for span in _slices(hidden_UD, weight_VD):
            logits = _logits(hidden_UD, weight_VD[span], temperature)
            here_T = (target_T >= span.start) & (target_T < span.stop)
            selected_T[here_T] = logits[prediction_T[here_T], target_T[here_T] - span.start]
            higher_U = torch.maximum(peak_U, logits.amax(-1))
            # Both sums are relative to the peak so far: move them to the new one.
            shift_U = (peak_U - higher_U).nan_to_num(nan=0.0, neginf=0.0)
            decay_U = torch.where(peak_U.isneginf(), 0.0, shift_U.exp())
            centred = logits.sub_(higher_U.unsqueeze(-1))
            weights = centred.exp()
            moment_U = decay_U * (moment_U + shift_U * total_U) + torch.linalg.vecdot(weights, centred)
            total_U = decay_U * total_U + weights.sum(-1)
            peak_U = higher_U
        normalizer_U = peak_U + total_U.log()
        entropy_U = total_U.log() - moment_U / total_U
        ctx.save_for_backward(hidden_UD, weight_VD, prediction_T, target_T, normalizer_U, entropy_U)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return selected_T - normalizer_U[prediction_T], entropy_U

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, slope_T: Tensor | None, slope_U: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_UD, weight_VD, prediction_T, target_T, normalizer_U, entropy_U = ctx.saved_tensors
        upstream_T = torch.zeros(len(target_T), dtype=normalizer_U.dtype) if slope_T is None else slope_T
        upstream_T = upstream_T.to(normalizer_U) / ctx.temperature
        upstream_U = torch.zeros_like(normalizer_U).index_put_((prediction_T,), upstream_T, accumulate=True)
        hidden_slope = torch.zeros_like(hidden_UD, dtype=normalizer_U.dtype)
        weight_slope = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        for span in _slices(hidden_UD, weight_VD):
            logprobs = _logits(hidden_UD, weight_VD[span], ctx.temperature).sub_(normalizer_U.unsqueeze(-1))
            probabilities = logprobs.exp()
            # d logprob / d scaled logit = one-hot of the token minus softmax.
            scale_U1 = -upstream_U.unsqueeze(-1)
            if slope_U is None:
                slope = probabilities.mul_(scale_U1)
            else:
                # d entropy / d scaled logit = -p (log p + entropy).
                rate_U1 = (slope_U / ctx.temperature).to(normalizer_U).unsqueeze(-1)
                inner = logprobs.add_(entropy_U.unsqueeze(-1)).mul_(-rate_U1).add_(scale_U1)
                slope = probabilities.mul_(inner)
            here_T = (target_T >= span.start) & (target_T < span.stop)
            where = (prediction_T[here_T], target_T[here_T] - span.start)
            slope.index_put_(where, upstream_T[here_T], accumulate=True)
            narrow = slope.to(hidden_UD.dtype)
            hidden_slope += narrow @ weight_VD[span]
            if weight_slope is not None:
                torch.mm(narrow.T, hidden_UD, out=weight_slope[span])
        return hidden_slope.to(hidden_UD.dtype), weight_slope, None, None, None


def _slices(hidden_UD: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    words = max(1, SLICE_ELEMENTS // max(1, len(hidden_UD)))
    return (slice(start, min(start + words, len(weight_VD))) for start in range(0, len(weight_VD), words))


def _logits(hidden_UD: Tensor, weight_WD: Tensor, temperature: float) -> Tensor:
    """Logits over temperature of a slice of the vocabulary, in float32 or wider."""
    logits = (hidden_UD @ weight_WD.T).to(torch.promote_types(hidden_UD.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)
