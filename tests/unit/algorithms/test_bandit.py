"""Fixed points of training with a divergence: the expected gradient of an objective is 0 there, and not elsewhere."""

import pytest
import torch
from torch import Tensor

from flowrt.algorithms.algorithm import Tokens
from flowrt.algorithms.objective import Objective
from tests.proofs.bandit import ARMS, COEFFICIENT, METHODS, REWARDS, total_variation


def largest_expected_gradient(algorithm: Objective, reward_kl_coef: float, policy: Tensor, reference: Tensor) -> float:
    """The largest gradient, by logit, of the expected loss of one on-policy sample; a baseline does not change it."""
    logits = policy.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    total = logits.sum() * 0.0
    for arm in range(ARMS):
        logprob_1 = logprobs[arm : arm + 1]
        penalty = reward_kl_coef * (policy[arm].log() - reference[arm].log())
        tokens = Tokens(
            logprobs_T=logprob_1,
            anchor_T=logprob_1.detach(),
            rollout_T=logprob_1.detach(),
            sample_T=torch.zeros(1, dtype=torch.int64),
            advantages_N=(REWARDS[arm] - penalty).reshape(1),
            weights_N=torch.ones(1, dtype=torch.float64),
            group_N=torch.zeros(1, dtype=torch.int64),
            valid_T=torch.ones(1, dtype=torch.float64),
            reference_T=reference[arm : arm + 1].log(),
        )
        total = total + policy[arm] * algorithm.terms(tokens)[0].loss_sum
    (gradient,) = torch.autograd.grad(total, logits)
    return float(gradient.abs().max())


@pytest.mark.parametrize("name", METHODS)
def test_the_expected_gradient_is_zero_only_at_the_fixed_point(name: str) -> None:
    algorithm, fixed_point = METHODS[name]
    reward_kl_coef = COEFFICIENT if "reward" in name else 0.0
    reference = torch.linspace(-1, 1, ARMS, dtype=torch.float64).softmax(-1)
    assert largest_expected_gradient(algorithm, reward_kl_coef, fixed_point(reference), reference) < 1e-12
    assert largest_expected_gradient(algorithm, reward_kl_coef, reference, reference) > 1e-2


def test_the_two_divergences_have_different_fixed_points() -> None:
    reference = torch.linspace(-1, 1, ARMS, dtype=torch.float64).softmax(-1)
    fixed_points = [METHODS[name][1](reference) for name in ("k3 in the loss", "k2 in the loss")]
    assert all(abs(float(fixed_point.sum()) - 1) < 1e-12 for fixed_point in fixed_points)
    assert float((fixed_points[0] - fixed_points[1]).abs().sum() / 2) > 0.02


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_training_converges_towards_the_fixed_point() -> None:
    """Through the engines, with fewer samples and less precision than `bench/objectives.py`."""
    torch.set_num_threads(1)
    initial, final = (total_variation("k2 in the loss", 0, steps=steps) for steps in (1, 40))
    assert final < initial / 2
