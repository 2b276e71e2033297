"""Groups of samples, and advantages, for tests of algorithms."""

from typing import Any

import torch
from torch import Tensor

from flowrt.algorithms.advantages import GroupAdvantages
from flowrt.algorithms.algorithm import Groups


def groups_of(
    rewards: list[float],
    group: list[int],
    lengths: list[int] | None = None,
    truncated: list[bool] | None = None,
    kl: list[float] | None = None,
) -> Groups:
    """Groups of these samples in float64; by default all have one token and are not truncated."""
    count = len(rewards)
    return Groups(
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        group_N=torch.tensor(group),
        lengths_N=torch.tensor(lengths or [1] * count),
        truncated_N=torch.tensor(truncated or [False] * count),
        staleness_N=torch.zeros(count, dtype=torch.int64),
        kl_N=None if kl is None else torch.tensor(kl, dtype=torch.float64),
    )


def group_advantages(rewards_N: Tensor, group_N: Tensor, **fields: Any) -> Tensor:
    """advantages_N of samples of one token each, by `GroupAdvantages` with these fields."""
    count = len(rewards_N)
    groups = Groups(
        rewards_N=rewards_N,
        group_N=group_N,
        lengths_N=torch.ones(count, dtype=torch.int64),
        truncated_N=torch.zeros(count, dtype=torch.bool),
        staleness_N=torch.zeros(count, dtype=torch.int64),
    )
    return GroupAdvantages(**fields)(groups).advantages_N
