"""Sample weights by staleness: power 0 equals the uniform default, and older samples never weigh more."""

import pytest
import torch

from flowrt.algorithms.advantages import PolynomialAge, UniformWeight

STALENESS_N = torch.tensor([0, 1, 2, 7])


def test_power_zero_gives_uniform_weights() -> None:
    assert torch.equal(PolynomialAge(0.0)(STALENESS_N), UniformWeight()(STALENESS_N))


def test_the_weight_is_a_negative_power_of_one_plus_staleness() -> None:
    torch.testing.assert_close(PolynomialAge(0.5)(STALENESS_N), torch.tensor([1.0, 2**-0.5, 3**-0.5, 8**-0.5]))


def test_a_negative_power_is_refused() -> None:
    with pytest.raises(ValueError, match="older samples would count more"):
        PolynomialAge(-1.0)
