import math

import pytest
import torch

from flowrt.algorithms import kl_k1_T, kl_k2_T, kl_k3_T


def test_estimates_of_one_token() -> None:
    logprobs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.125)])
    assert kl_k1_T(logprobs, reference).item() == pytest.approx(math.log(4))
    assert kl_k2_T(logprobs, reference).item() == pytest.approx(math.log(4) ** 2 / 2)
    assert kl_k3_T(logprobs, reference).item() == pytest.approx(0.25 - 1 + math.log(4))


def test_gradients_of_one_token() -> None:
    # d k1 = 1, d k2 = log ratio, d k3 = 1 - reference / policy
    for estimate, derivative in ((kl_k1_T, 1.0), (kl_k2_T, math.log(4)), (kl_k3_T, 0.75)):
        logprobs = torch.tensor([math.log(0.5)], requires_grad=True)
        reference = torch.tensor([math.log(0.125)], requires_grad=True)
        estimate(logprobs, reference).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(derivative)
        assert reference.grad is None


def test_tensors_of_more_than_one_dimension_are_refused() -> None:
    rows = torch.zeros(2, 3)
    for estimate in (kl_k1_T, kl_k2_T, kl_k3_T):
        with pytest.raises(ValueError, match=r"must be 1-D and equally long.*\[2, 3\]"):
            estimate(rows, rows)


def test_k3_keeps_its_precision_for_nearly_equal_log_probabilities() -> None:
    # d^2 / 2 = 5e-11, far below the float32 rounding of exp(d) near 1.
    estimate = kl_k3_T(torch.tensor([0.0]), torch.tensor([1e-3]))
    assert estimate.item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_k3_of_a_token_with_vanishing_probability_is_finite() -> None:
    logprobs = torch.tensor([-1000.0], requires_grad=True)
    estimate = kl_k3_T(logprobs, torch.tensor([0.0]))
    estimate.sum().backward()
    assert math.isfinite(estimate.item())
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0
