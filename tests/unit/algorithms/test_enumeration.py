"""Expected gradients over all responses, with mixed versions: exact if unbiased, else equal to their own limit."""

import pytest
import torch

from tests.proofs.enumeration import (
    World,
    biased_cases,
    distance,
    divergence_gradient,
    draw_world,
    exact_cases,
    expected_gradient,
    importance,
    true_gradient,
)


@pytest.fixture(scope="module")
def world() -> World:
    torch.set_num_threads(1)
    return draw_world(seed=11, spread=0.3)


def test_expected_gradients_of_unbiased_estimators_are_exact(world: World) -> None:
    errors = {name: distance(*case) for name, case in exact_cases(world).items()}
    assert max(errors.values()) <= 1e-12, errors


def test_biased_expected_gradients_equal_their_own_limits(world: World) -> None:
    errors = {name: distance(*case) for name, case in biased_cases(world).items()}
    assert max(errors.values()) <= 1e-12, errors


def test_the_bias_of_biased_estimators_is_detected(world: World) -> None:
    """An inexact correction cannot pass the test of the exact ones."""
    expected = true_gradient(world)
    biased = {
        name: distance(gradient, expected)
        for name, (gradient, _) in biased_cases(world).items()
        if "-policy" not in name
    }
    assert min(biased.values()) > 0.01, biased


def test_an_importance_ratio_with_a_finite_cap_is_biased(world: World) -> None:
    expected = true_gradient(world)
    assert distance(expected_gradient(importance("sequence"), world), expected) < 1e-12
    assert distance(expected_gradient(importance("sequence", high=1.5), world), expected) > 1e-3


def test_forward_and_reverse_divergences_have_different_gradients(world: World) -> None:
    """So a gradient of k3, which is the forward one, cannot pass as that of KL(policy || reference)."""
    on = world.on_policy()
    forward, reverse = divergence_gradient(on, forward=True), divergence_gradient(on, forward=False)
    assert distance(forward, reverse) > 0.05
