"""The fused LM head against log-softmax of whole logits, in float64, for several slice widths of the vocabulary."""

import pytest
import torch

from flowrt.algorithms import lm_head
from flowrt.algorithms.lm_head import fused_logprobs


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    hidden_UD = torch.randn(6, 5, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = (3 * torch.randn(23, 5, generator=rng, dtype=torch.float64)).to(dtype).requires_grad_()
    prediction_T = torch.tensor([0, 0, 1, 3, 5, 5, 5])
    target_T = torch.tensor([22, 0, 7, 8, 1, 1, 13])
    return hidden_UD, weight_VD, prediction_T, target_T


def whole_logits(
    hidden_UD: torch.Tensor, weight_VD: torch.Tensor, prediction_T: torch.Tensor, target_T: torch.Tensor, t: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_UV = (hidden_UD @ weight_VD.T / t).log_softmax(-1)
    return logprobs_UV[prediction_T, target_T], -(logprobs_UV.exp() * logprobs_UV).sum(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.7])
@pytest.mark.parametrize("slice_width", [1, 2, 7, 22, 23, 100])
@pytest.mark.parametrize("parts", ["logprobs", "entropy", "both"])
def test_values_and_gradients_equal_those_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, temperature: float, slice_width: int, parts: str
) -> None:
    monkeypatch.setattr(lm_head, "SLICE_ELEMENTS", 6 * slice_width)
    weights_T = torch.linspace(-1, 2, 7, dtype=torch.float64)
    weights_U = torch.linspace(2, -1, 6, dtype=torch.float64)
    gradients = []
    values = []
    for function in (fused_logprobs, whole_logits):
        hidden_UD, weight_VD, prediction_T, target_T = inputs()
        logprobs_T, entropy_U = function(hidden_UD, weight_VD, prediction_T, target_T, temperature)
        values.append((logprobs_T.detach(), entropy_U.detach()))
        loss = torch.zeros((), dtype=torch.float64)
        if parts != "entropy":
            loss = loss + (weights_T * logprobs_T).sum()
        if parts != "logprobs":
            loss = loss + (weights_U * entropy_U).sum()
        loss.backward()
        gradients.append((hidden_UD.grad, weight_VD.grad))
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-12)


def test_large_logits_neither_overflow_nor_lose_precision() -> None:
    hidden_UD, weight_VD, prediction_T, target_T = inputs()
    got, entropy_U = fused_logprobs(hidden_UD * 300, weight_VD, prediction_T, target_T)
    expected, expected_U = whole_logits(hidden_UD * 300, weight_VD, prediction_T, target_T, 1.0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(entropy_U, expected_U, rtol=1e-9, atol=1e-9)


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    hidden_UD, weight_VD, prediction_T, target_T = inputs(torch.bfloat16)
    got, _ = fused_logprobs(hidden_UD, weight_VD, prediction_T, target_T)
    rounded_UV = (hidden_UD @ weight_VD.T).detach().double()
    expected = rounded_UV.log_softmax(-1)[prediction_T, target_T]
    assert got.dtype == torch.float32
    assert float((got.detach().double() - expected).abs().max()) < 1e-5


def test_empty_inputs_give_empty_results_and_zero_gradients() -> None:
    hidden_UD, weight_VD, _, _ = inputs()
    none = torch.zeros(0, dtype=torch.int64)
    logprobs_T, entropy_U = fused_logprobs(hidden_UD[:0], weight_VD, none, none)
    assert (len(logprobs_T), len(entropy_U)) == (0, 0)
    (logprobs_T.sum() + entropy_U.sum()).backward()
    assert weight_VD.grad is not None
    assert not weight_VD.grad.any()


def test_zero_temperature_and_unequal_widths_are_refused() -> None:
    hidden_UD, weight_VD, prediction_T, target_T = inputs()
    with pytest.raises(ValueError, match="temperature is 0"):
        fused_logprobs(hidden_UD, weight_VD, prediction_T, target_T, 0.0)
    with pytest.raises(ValueError, match="equal width"):
        fused_logprobs(hidden_UD, weight_VD[:, :2], prediction_T, target_T)
