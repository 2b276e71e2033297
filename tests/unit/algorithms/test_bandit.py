"""Fixed points of training with a divergence: the expected gradient of an objective is 0 there, and not elsewhere."""

import pytest
import torch
from objectives_rows.bandit import ARMS, COEFFICIENT, METHODS, REWARDS, total_variation
from torch import Tensor

from flowrt.algorithms.algorithm import Tokens
from flowrt.algorithms.objective import Objective


def expected_slope(algorithm: Objective, in_reward: float, policy: Tensor, reference: Tensor) -> float:
    """The largest slope by a logit of the loss expected of one sample, on-policy; a baseline does not change it."""
    logits = policy.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    total = logits.sum() * 0.0
    for arm in range(ARMS):
        own = logprobs[arm : arm + 1]
        penalty = in_reward * (policy[arm].log() - reference[arm].log())
        tokens = Tokens(
            logprobs_T=own,
            anchor_T=own.detach(),
            rollout_T=own.detach(),
            sample_T=torch.zeros(1, dtype=torch.int64),
            advantages_N=(REWARDS[arm] - penalty).reshape(1),
            weights_N=torch.ones(1, dtype=torch.float64),
            group_N=torch.zeros(1, dtype=torch.int64),
            valid_T=torch.ones(1, dtype=torch.float64),
            reference_T=reference[arm : arm + 1].log(),
        )
        total = total + policy[arm] * algorithm.terms(tokens)[0].loss_sum
    (slope,) = torch.autograd.grad(total, logits)
    return float(slope.abs().max())


@pytest.mark.parametrize("name", METHODS)
def test_the_expected_gradient_is_zero_at_the_fixed_point_alone(name: str) -> None:
    algorithm, point = METHODS[name]
    in_reward = COEFFICIENT if "reward" in name else 0.0
    reference = torch.linspace(-1, 1, ARMS, dtype=torch.float64).softmax(-1)
    assert expected_slope(algorithm, in_reward, point(reference), reference) < 1e-12
    assert expected_slope(algorithm, in_reward, reference, reference) > 1e-2


def test_the_two_divergences_have_different_fixed_points() -> None:
    reference = torch.linspace(-1, 1, ARMS, dtype=torch.float64).softmax(-1)
    points = [METHODS[name][1](reference) for name in ("k3 in the loss", "k2 in the loss")]
    assert all(abs(float(point.sum()) - 1) < 1e-12 for point in points)
    assert float((points[0] - points[1]).abs().sum() / 2) > 0.02


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_training_goes_to_the_fixed_point() -> None:
    """Through the engines; with few samples, so not as near as `bench/objectives.py` goes."""
    torch.set_num_threads(1)
    begun, ended = (total_variation("k2 in the loss", 0, steps=steps) for steps in (1, 40))
    assert ended < begun / 2
