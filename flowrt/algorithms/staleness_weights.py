"""Sample weights by staleness: how much a stale sample counts in the policy loss.

Staleness is in policy versions; it is 0 for a sample generated with the weights that are trained.

Shapes: N = samples.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SampleWeight(Protocol):
    """A factor on each sample's policy loss."""

    def __call__(self, staleness_N: Tensor) -> Tensor:
        """Weights [N], float, for staleness [N] in whole versions."""
        ...


@dataclass(frozen=True, slots=True)
class UniformWeight:
    """Weight 1 for every sample."""

    def __call__(self, staleness_N: Tensor) -> Tensor:
        return torch.ones(len(staleness_N))


@dataclass(frozen=True, slots=True)
class PolynomialAge:
    """(1 + staleness)^-power, the polynomial discount of FedAsync (arXiv 1903.03934); power 0 is `UniformWeight`."""

    power: float

    def __post_init__(self) -> None:
        if not self.power >= 0:
            raise ValueError(f"power is {self.power}: older samples would count more; use 0 or more")

    def __call__(self, staleness_N: Tensor) -> Tensor:
        return (1.0 + staleness_N.float()) ** -self.power
