"""Row `lm_head`: the fused LM head against whole logits: memory, time, and the error of bfloat16 against float64.

- Memory of a forward and a backward pass of the fused head at full size, 8,192 predictions of 151,936 words in
  bfloat16, in a separate process.
- Time of both passes at a size at which whole logits fit, in bfloat16 and in float32, alternating between the heads.
  CPU time is measured, so that other processes on the same cores do not count. A CPU without bfloat16 instructions is
  slow with whole logits of that type, so only the float32 metric compares the two heads.
- Values and gradients in bfloat16 against float64 on the same inputs. Logits are sums in float32, rounded to the type
  of the model on both sides, as in rollout engines; with exact sums, about one logit in thousands would be rounded in
  the other direction.
"""

import statistics
import time
from collections.abc import Callable

import torch
from common.memory import begin_peak, in_process, peak_bytes
from torch import Tensor

from flowrt.algorithms import predicted_logprobs
from flowrt.algorithms.lm_head import fused_logprobs

WIDTH = 64
Size = tuple[int, int, torch.dtype]
"""Number of predictions, number of words (vocabulary), dtype."""
FULL: Size = (8192, 151_936, torch.bfloat16)
TIMED: dict[str, Size] = {
    "lm_head_speed_ratio": (512, 151_936, torch.float32),
    "lm_head_speed_ratio_bfloat16": (128, 151_936, torch.bfloat16),
}
QUICK: Size = (512, 40_000, torch.float32)
NARROW = (256, 20_000)
ROUNDS = 5
Head = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def whole(hidden_UD: Tensor, weight_VD: Tensor, prediction_T: Tensor, target_T: Tensor) -> Tensor:
    """Log-probabilities from whole logits."""
    return predicted_logprobs(hidden_UD @ weight_VD.T, prediction_T, target_T)


def fused(hidden_UD: Tensor, weight_VD: Tensor, prediction_T: Tensor, target_T: Tensor) -> Tensor:
    """Log-probabilities from the fused head, without whole logits."""
    return fused_logprobs(hidden_UD, weight_VD, prediction_T, target_T)[0]


HEADS: dict[str, Head] = {"whole": whole, "fused": fused}


def measure(quick: bool) -> dict[str, float]:
    """Metrics of the fused head.

    Args:
        quick: use a small size, at which the bounds of the row do not apply.

    Returns:
        ``lm_head_gb``, peak memory (GB) of both passes beyond hidden states, weights and their gradients,
        ``lm_head_speed_ratio``, time with whole logits over time with the fused head, ``lm_head_value_error`` (nats),
        and ``lm_head_gradient_error``, relative to the norm of each gradient.
    """
    value, gradient = narrow_errors(*NARROW)
    timed = {"lm_head_speed_ratio": QUICK} if quick else TIMED
    return {
        "lm_head_gb": in_process(head_bytes, "fused", QUICK if quick else FULL) / 1e9,
        **{figure: speed_ratio(size, 1 if quick else ROUNDS) for figure, size in timed.items()},
        "lm_head_value_error": value,
        "lm_head_gradient_error": gradient,
    }


def inputs(predictions: int, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [U, D] and weights [V, D], which require gradients, and targets [T], with T = U.

    Logits have a standard deviation of 2, as in a model.
    """
    generator = torch.Generator().manual_seed(0)
    hidden_UD = torch.randn(predictions, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(words, WIDTH, generator=generator) / 4).to(dtype).requires_grad_()
    return hidden_UD, weight_VD, torch.randint(words, (predictions,), generator=generator)


def narrow_errors(predictions: int, words: int, head: Head = fused) -> tuple[float, float]:
    """Errors of a head in bfloat16 against float64, both from logits rounded to bfloat16.

    Returns:
        The largest error of a log-probability (nats), and the larger one of the two gradients', relative to its norm.
    """
    hidden_UD, weight_VD, target_T = inputs(predictions, words, torch.bfloat16)
    rows_T = torch.arange(predictions)
    slope_T = torch.linspace(-1, 1, predictions)
    found_T = head(hidden_UD, weight_VD, rows_T, target_T)
    (slope_T.to(found_T) * found_T).sum().backward()
    exact = hidden_UD.detach().double().requires_grad_(), weight_VD.detach().double().requires_grad_()
    logits_UV = exact[0] @ exact[1].T
    # The value of rounded logits, and the gradient of exact ones: rounding has no slope.
    rounded_UV = (hidden_UD.detach().float() @ weight_VD.detach().float().T).bfloat16()
    logits_UV = logits_UV + (rounded_UV.double() - logits_UV).detach()
    expected_T = logits_UV.log_softmax(-1)[rows_T, target_T]
    (slope_T.double() * expected_T).sum().backward()
    errors = [
        float((tensor.grad.double() - other.grad).norm() / other.grad.norm())
        for tensor, other in zip((hidden_UD, weight_VD), exact, strict=True)
        if tensor.grad is not None and other.grad is not None
    ]
    return float((found_T.detach().double() - expected_T.detach()).abs().max()), max(errors)


def speed_ratio(size: Size, rounds: int) -> float:
    """Median CPU time with whole logits over that of the fused head, measured in alternation."""
    hidden_UD, weight_VD, target_T = inputs(*size)
    spent: dict[str, list[float]] = {name: [] for name in HEADS}
    for _ in range(rounds):
        for name, head in HEADS.items():
            begin_s = time.process_time()
            head(hidden_UD, weight_VD, torch.arange(size[0]), target_T).sum().backward()
            spent[name].append(time.process_time() - begin_s)
    return statistics.median(spent["whole"]) / statistics.median(spent["fused"])


def head_bytes(name: str, size: Size) -> float:
    """Peak memory (bytes) of both passes beyond the inputs and their gradients, of the head "whole" or "fused"."""
    hidden_UD, weight_VD, target_T = inputs(*size)
    warm = torch.randn(8, WIDTH).to(size[2]).requires_grad_()
    HEADS[name](warm, weight_VD, torch.arange(8), target_T[:8]).sum().backward()
    weight_VD.grad = None
    before = begin_peak()
    HEADS[name](hidden_UD, weight_VD, torch.arange(size[0]), target_T).sum().backward()
    return float(peak_bytes() - before - hidden_UD.nbytes - weight_VD.nbytes)
