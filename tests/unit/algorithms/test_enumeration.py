"""Expected gradients over all responses, with mixed versions: exact where theory says so, else equal to their limit."""

import pytest
import torch
from objectives_rows.enumeration import (
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


def test_expected_gradients_are_exact_where_theory_says_so(world: World) -> None:
    errors = {name: distance(*case) for name, case in exact_cases(world).items()}
    assert max(errors.values()) <= 1e-12, errors


def test_biased_gradients_equal_their_own_limits(world: World) -> None:
    errors = {name: distance(*case) for name, case in biased_cases(world).items()}
    assert max(errors.values()) <= 1e-12, errors


def test_the_bias_is_seen(world: World) -> None:
    """So a correction that is not exact could not pass as one."""
    wanted = true_gradient(world)
    biased = {name: distance(got, wanted) for name, (got, _) in biased_cases(world).items() if "-policy" not in name}
    assert min(biased.values()) > 0.01, biased


def test_a_finite_cap_is_no_longer_exact(world: World) -> None:
    wanted = true_gradient(world)
    assert distance(expected_gradient(importance("sequence"), world), wanted) < 1e-12
    assert distance(expected_gradient(importance("sequence", high=1.5), world), wanted) > 1e-3


def test_k3_follows_the_forward_divergence(world: World) -> None:
    """Which is another direction than that of KL(policy || reference)."""
    on = world.on_policy()
    forward, reverse = divergence_gradient(on, forward=True), divergence_gradient(on, forward=False)
    assert distance(forward, reverse) > 0.05
