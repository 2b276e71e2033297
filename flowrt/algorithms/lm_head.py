"""Fused LM head: log-probabilities and entropy from hidden states, without a tensor of all logits.

The vocabulary is read a slice at a time, in the forward pass (a running log-sum-exp) and again in the backward pass,
which recomputes each slice's logits from the hidden states. In addition to the inputs, their gradients, and wider
copies of narrow hidden states, only a few tensors of SLICE_ELEMENTS floats exist at a time. The vocabulary is sliced,
not the tokens: then the gradient of each row of the output matrix is one product over all tokens and is rounded to the
matrix's type once.

Logits are rounded to the type of the hidden states, as in a model and a rollout engine, and everything after them is
float32 or wider: an unchanged policy has log ratios of 0.

Shapes: U = predictions, D = width of the hidden states, V = vocabulary, W = vocabulary entries of a slice,
T = predicted tokens, E = entries of all their supports.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowrt.algorithms.support import Support, normalise_over_support

SLICE_ELEMENTS = 1 << 24
"""64 MiB of float32 a slice."""
BLOCK_ELEMENTS = 1 << 17
"""On a CPU, what follows the product is computed in blocks of rows of this size, which stay in the cache of a core."""


@dataclass(frozen=True, slots=True)
class LogitChange:
    """What a model does with the logits of its head: scales them, then caps them.

    Attributes:
        factor: multiplies them (Cohere: ``logit_scale``).
        divisor: divides them (Granite: ``logits_scaling``).
        cap: x becomes cap * tanh(x / cap) (Gemma 2: ``final_logit_softcapping``); 0: x.
    """

    factor: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0

    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits, rounded after each operation as in the models."""
        if self.factor != 1:
            logits = logits * self.factor
        if self.divisor != 1:
            logits = logits / self.divisor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def slope(self, changed: Tensor) -> Tensor | float:
        """Derivative of the changed logits with respect to those of the head."""
        scale = self.factor / self.divisor
        return (1 - (changed / self.cap).square_()).mul_(scale) if self.cap else scale


UNCHANGED = LogitChange()


def fused_logprobs(
    hidden_UD: Tensor,
    weight_VD: Tensor,
    prediction_T: Tensor,
    target_T: Tensor,
    temperature: float = 1.0,
    *,
    bias_V: Tensor | None = None,
    change: LogitChange = UNCHANGED,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and entropy of predictions, both with gradients.

    Args:
        hidden_UD: hidden state of each prediction, the input of the LM head.
        weight_VD: matrix of the LM head, in the type of the hidden states.
        prediction_T: index into the U predictions of each token's prediction; several tokens may share one.
        target_T: the token ids, int64.
        temperature: divides the logits.
        bias_V: added to the logits.
        change: what the model does with the logits, before the division by the temperature.

    Returns:
        logprobs_T in nats, and entropy_U in nats; both float32, or float64 for float64 inputs.

    Raises:
        ValueError: if the temperature is not positive, or the shapes or types do not fit.
    """
    _check(hidden_UD, weight_VD, temperature)
    apply: Callable[..., tuple[Tensor, Tensor]] = _FusedLogprobs.apply
    return apply(hidden_UD, weight_VD, bias_V, prediction_T, target_T, temperature, change)


def fused_support_logprobs(
    hidden_UD: Tensor,
    weight_VD: Tensor,
    prediction_T: Tensor,
    target_T: Tensor,
    support: Support,
    temperature: float = 1.0,
    *,
    bias_V: Tensor | None = None,
    change: LogitChange = UNCHANGED,
) -> Tensor:
    """Log-probabilities of tokens, renormalised over their supports, with gradient.

    Computes the logits of the supports alone, from their rows of the matrix, SLICE_ELEMENTS elements at a time.

    Args:
        support: of all tokens, on the device of the hidden states. The other arguments are those of `fused_logprobs`.

    Returns:
        logprobs_T in nats, as in `flowrt.algorithms.support.support_logprobs`.

    Raises:
        ValueError: if the temperature is not positive, a token is not in its support, or shapes or types do not fit.
    """
    _check(hidden_UD, weight_VD, temperature)
    apply: Callable[..., Tensor] = _SelectedLogits.apply
    logits_E = apply(hidden_UD, weight_VD, bias_V, prediction_T[support.position_E], support.tokens_E.long())
    changed_E = change.apply(logits_E).to(torch.promote_types(logits_E.dtype, torch.float32))
    return normalise_over_support(changed_E / temperature, target_T, support)


def _check(hidden_UD: Tensor, weight_VD: Tensor, temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy rollouts have no log-probability)")
    if hidden_UD.dim() != 2 or weight_VD.dim() != 2 or hidden_UD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden_UD {list(hidden_UD.shape)} and weight_VD {list(weight_VD.shape)} must be matrices of equal width"
        )
    if hidden_UD.dtype != weight_VD.dtype:
        raise ValueError(f"hidden_UD is {hidden_UD.dtype} and weight_VD {weight_VD.dtype}; convert one of them")


class _SelectedLogits(torch.autograd.Function):
    """Single logits, rounded to the type of the hidden states: the products of pairs of rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, row_E: Tensor, token_E: Tensor
    ) -> Tensor:
        precise = torch.promote_types(hidden_UD.dtype, torch.float32)
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V, row_E, token_E)
        logits_E = hidden_UD.new_empty(len(row_E), dtype=precise)
        for part in _parts(hidden_UD, len(row_E)):
            products = hidden_UD[row_E[part]].to(precise).mul_(weight_VD[token_E[part]])
            logits_E[part] = products.sum(-1)
        if bias_V is not None:
            logits_E += bias_V[token_E]
        return logits_E.to(hidden_UD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_E: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_UD, weight_VD, bias_V, row_E, token_E = ctx.saved_tensors
        precise = torch.promote_types(hidden_UD.dtype, torch.float32)
        slope_E = slope_E.to(precise)
        hidden_slope = torch.zeros_like(hidden_UD, dtype=precise)
        for part in _parts(hidden_UD, len(row_E)):
            hidden_slope.index_add_(0, row_E[part], weight_VD[token_E[part]].to(precise) * slope_E[part, None])
        bias_slope = None
        if ctx.needs_input_grad[2]:
            bias_slope = torch.zeros_like(bias_V, dtype=precise).index_add_(0, token_E, slope_E).to(bias_V.dtype)
        weight_slope = _weight_slope(hidden_UD, weight_VD, row_E, token_E, slope_E) if ctx.needs_input_grad[1] else None
        return hidden_slope.to(hidden_UD.dtype), weight_slope, bias_slope, None, None


def _weight_slope(hidden_UD: Tensor, weight_VD: Tensor, row_E: Tensor, token_E: Tensor, slope_E: Tensor) -> Tensor:
    """Gradient of the matrix, summed in ``slope_E``'s type and rounded once; a slice of the vocabulary at a time."""
    order_E = token_E.argsort(stable=True)
    row_E, token_E, slope_E = row_E[order_E], token_E[order_E], slope_E[order_E]
    height = max(1, SLICE_ELEMENTS // max(1, weight_VD.shape[1]))
    starts = list(range(0, len(weight_VD), height))
    bounds = [*torch.searchsorted(token_E, token_E.new_tensor(starts)).tolist(), len(token_E)]
    weight_slope = torch.empty_like(weight_VD)
    for start, begin, end in zip(starts, bounds, bounds[1:], strict=False):
        rows = weight_slope[start : start + height]
        total = rows.zero_() if rows.dtype == slope_E.dtype else torch.zeros_like(rows, dtype=slope_E.dtype)
        for part in _parts(hidden_UD, end - begin):
            entries = slice(begin + part.start, begin + part.stop)
            products = hidden_UD[row_E[entries]].to(slope_E.dtype) * slope_E[entries, None]
            total.index_add_(0, token_E[entries] - start, products)
        if total is not rows:
            rows.copy_(total)
    return weight_slope


def _parts(hidden_UD: Tensor, entries: int) -> Iterator[slice]:
    height = max(1, SLICE_ELEMENTS // max(1, hidden_UD.shape[1]))
    return (slice(start, min(start + height, entries)) for start in range(0, entries, height))


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        prediction_T: Tensor,
        target_T: Tensor,
        temperature: float,
        change: LogitChange,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden_UD.dtype, torch.float32)
        peak_U = hidden_UD.new_full((len(hidden_UD),), -torch.inf, dtype=precise)
        total_U = torch.zeros_like(peak_U)  # sum of exp(logit - peak)
        moment_U = torch.zeros_like(peak_U)  # sum of exp(logit - peak) (logit - peak)
        selected_T = torch.zeros(len(target_T), dtype=precise, device=hidden_UD.device)
        wide_UD = hidden_UD.to(_product_dtype(hidden_UD))
        slices = _TokensBySlice(target_T, len(weight_VD), _slice_words(len(hidden_UD), len(weight_VD)))
        for span, _, logits_UW in _slices(wide_UD, weight_VD, bias_V):
            here_T = slices.tokens_of(span)
            where = prediction_T[here_T], target_T[here_T] - span.start
            selected_T[here_T] = _changed(logits_UW[where], hidden_UD.dtype, change) / temperature
            for rows in _blocks(logits_UW):
                logits = _over(_changed(logits_UW[rows], hidden_UD.dtype, change), temperature)
                peak, total, moment = peak_U[rows], total_U[rows], moment_U[rows]
                higher = torch.maximum(peak, logits.amax(-1))
                # Both sums are relative to the peak so far: move them to the new one.
                shift = (peak - higher).nan_to_num(nan=0.0, neginf=0.0)
                decay = torch.where(peak.isneginf(), 0.0, shift.exp())
                centred = logits.sub_(higher.unsqueeze(-1))
                weights = centred.exp()
                moment_U[rows] = decay * (moment + shift * total) + torch.linalg.vecdot(weights, centred)
                total_U[rows] = decay * total + weights.sum(-1)
                peak_U[rows] = higher
        normalizer_U = peak_U + total_U.log()
        entropy_U = total_U.log() - moment_U / total_U
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V, prediction_T, target_T, normalizer_U, entropy_U)
        ctx.temperature = temperature
        ctx.change = change
        ctx.slices = slices
        ctx.set_materialize_grads(False)
        return selected_T - normalizer_U[prediction_T], entropy_U

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, slope_T: Tensor | None, slope_U: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        hidden_UD, weight_VD, bias_V, prediction_T, target_T, normalizer_U, entropy_U = ctx.saved_tensors
        upstream_T = normalizer_U.new_zeros(len(target_T)) if slope_T is None else slope_T.to(normalizer_U)
        upstream_T = upstream_T / ctx.temperature
        upstream_U = torch.zeros_like(normalizer_U).index_put_((prediction_T,), upstream_T, accumulate=True)
        rate_U = None if slope_U is None else slope_U.to(normalizer_U) / ctx.temperature
        wide_UD = hidden_UD.to(_product_dtype(hidden_UD))
        hidden_slope = torch.zeros_like(hidden_UD, dtype=normalizer_U.dtype)
        weight_slope = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        bias_slope = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        # Several tokens may have the same logit: its slope has the sum over them.
        same_T = _same_pairs(prediction_T, target_T, len(weight_VD))
        shared_T = torch.zeros_like(upstream_T).index_put_((same_T,), upstream_T, accumulate=True)[same_T]
        for span, weight_WD, logits_UW in _slices(wide_UD, weight_VD, bias_V):
            here_T = ctx.slices.tokens_of(span)
            where = prediction_T[here_T], target_T[here_T] - span.start
            changed_T = _changed(logits_UW[where], hidden_UD.dtype, ctx.change)
            steepness_T = ctx.change.slope(changed_T)
            selected_T = changed_T / ctx.temperature
            for rows in _blocks(logits_UW):
                logits = _changed(logits_UW[rows], hidden_UD.dtype, ctx.change)
                steepness = ctx.change.slope(logits)
                logits = _over(logits, ctx.temperature)
                rate = None if rate_U is None else rate_U[rows].unsqueeze(-1)
                softmax_slope = _softmax_slope(
                    logits,
                    upstream_U[rows].unsqueeze(-1),
                    normalizer_U[rows].unsqueeze(-1),
                    entropy_U[rows].unsqueeze(-1),
                    rate,
                )
                logits_UW[rows] = softmax_slope if ctx.change == UNCHANGED else softmax_slope.mul_(steepness)
            # d logprob / d scaled logit = one-hot of the token minus softmax. Added before rounding: the sum is nearly
            # 0 for a token with probability near 1.
            of_T = where[0]
            own_T = _softmax_slope(
                selected_T,
                upstream_U[of_T],
                normalizer_U[of_T],
                entropy_U[of_T],
                None if rate_U is None else rate_U[of_T],
            )
            logits_UW[where] = ((shared_T[here_T] + own_T) * steepness_T).to(logits_UW.dtype)
            if hidden_slope.dtype == logits_UW.dtype:
                hidden_slope.addmm_(logits_UW, weight_WD)
            else:
                hidden_slope += logits_UW @ weight_WD
            if weight_slope is not None and weight_slope.dtype == logits_UW.dtype:
                torch.mm(logits_UW.T, wide_UD, out=weight_slope[span])
            elif weight_slope is not None:
                weight_slope[span] = logits_UW.T @ wide_UD
            if bias_slope is not None:
                bias_slope[span] = logits_UW.sum(0)
        return hidden_slope.to(hidden_UD.dtype), weight_slope, bias_slope, None, None, None, None


def _softmax_slope(
    logits: Tensor, upstream: Tensor, normalizer: Tensor, entropy: Tensor, rate: Tensor | None
) -> Tensor:
    """Slope of scaled logits through the softmax alone; overwrites ``logits``.

    Through log-probabilities it is -p times ``upstream``, through the entropy -p (log p + entropy) times ``rate``.
    """
    logprobs = logits.sub_(normalizer)
    if rate is None:
        return logprobs.exp_().mul_(-upstream)
    probabilities = logprobs.exp()
    return probabilities.mul_(logprobs.add_(entropy).mul_(-rate).sub_(upstream))


def _slice_words(count: int, size: int) -> int:
    """Words of a slice of a vocabulary of this size, with this number of predictions."""
    return min(max(1, SLICE_ELEMENTS // max(1, count)), max(1, size))


def _slices(wide_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the vocabulary, their rows of the matrix, and their logits, in the type of the product.

    The next slice overwrites the logits; the caller may overwrite them too.
    """
    count = len(wide_UD)
    words = _slice_words(count, len(weight_VD))
    buffer = wide_UD.new_empty(count * words)
    for start in range(0, len(weight_VD), words):
        span = slice(start, min(start + words, len(weight_VD)))
        weight_WD = weight_VD[span].to(wide_UD.dtype)
        logits_UW = buffer[: count * len(weight_WD)].view(count, len(weight_WD))
        if bias_V is None:
            torch.mm(wide_UD, weight_WD.T, out=logits_UW)
        else:
            torch.addmm(bias_V[span].to(wide_UD.dtype), wide_UD, weight_WD.T, out=logits_UW)
        yield span, weight_WD, logits_UW


def _blocks(logits_UW: Tensor) -> Iterator[slice]:
    count, words = logits_UW.shape
    height = max(1, BLOCK_ELEMENTS // max(1, words)) if logits_UW.device.type == "cpu" else max(1, count)
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


class _TokensBySlice:
    """Which tokens are in each slice of the vocabulary; the host waits for the device once to find them.

    Args:
        target_T: the token ids.
        size: of the vocabulary.
        words: of a slice, at most.
    """

    def __init__(self, target_T: Tensor, size: int, words: int) -> None:
        self._order_T = target_T.argsort(stable=True)
        self._words = words
        starts = torch.tensor([*range(0, size, words), size], dtype=target_T.dtype).to(target_T.device)
        self._bounds: list[int] = torch.searchsorted(target_T[self._order_T], starts).tolist()

    def tokens_of(self, span: slice) -> Tensor:
        """Indices of the tokens of a slice; those with the same id in order."""
        place = span.start // self._words
        return self._order_T[self._bounds[place] : self._bounds[place + 1]]


def _same_pairs(prediction_T: Tensor, target_T: Tensor, size: int) -> Tensor:
    """A number below T for each token, which is that of other tokens with the same prediction and the same id."""
    sorted_T, order_T = (prediction_T * size + target_T).sort(stable=True)
    is_new_T = torch.zeros_like(order_T)
    is_new_T[1:] = sorted_T[1:] != sorted_T[:-1]
    return torch.empty_like(order_T).index_copy_(0, order_T, is_new_T.cumsum(0))


def _changed(logits: Tensor, rounded: torch.dtype, change: LogitChange) -> Tensor:
    """Logits, ``rounded`` to the type of the hidden states and changed by the model, in float32 or wider."""
    return change.apply(logits.to(rounded)).to(torch.promote_types(rounded, torch.float32))


def _over(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature; may overwrite."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _product_dtype(hidden_UD: Tensor) -> torch.dtype:
    """Type in which products are computed: float32 on a CPU that has no instructions for narrower types.

    PyTorch's own products of narrow types are ten times slower there, and are summed in float32 and rounded as well.
    """
    narrow = hidden_UD.dtype in (torch.bfloat16, torch.float16)
    if narrow and hidden_UD.device.type == "cpu" and not (hidden_UD.dtype == torch.bfloat16 and _cpu_has_bfloat16()):
        return torch.float32
    return hidden_UD.dtype


@functools.cache
def _cpu_has_bfloat16() -> bool:
    capabilities: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.8 lacks it
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
