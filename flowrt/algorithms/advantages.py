"""Advantages of rollouts relative to the other rollouts of their group.

Rewards are centred within the group first, so a group whose rewards are all equal gets exactly 0 with every scale.

Shapes: N = samples, G = groups (in the order of their ids).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group_std", "none", "batch_std"]


def group_advantages(rewards_N: Tensor, groups_N: Tensor, *, scale: Scale = "group_std", eps: float = 1e-6) -> Tensor:
    """Reward minus the mean reward of its group, divided by a standard deviation plus `eps`.

    - "group_std": std of the sample's group. GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    - "none": no division. Dr. GRPO (arXiv 2503.20783, section 3.2).
    - "batch_std": std of all N rewards. Lite-PPO (arXiv 2508.08221). N must be the whole step: rewards of one
      micro-batch would make the advantage depend on how the step was cut.

    The std divides by n - 1 (the default of `torch.std`). The papers leave the choice open; the widely used trainers
    divide by n - 1, and their published learning rates assume it.

    Args:
        rewards_N: reward of each sample.
        groups_N: group id of each sample, any integers. Groups may be interleaved and of different sizes. A sample
            that is the only one of its group gets 0 with "none" and "batch_std".
        scale: what to divide by.
        eps: added to the standard deviation.

    Returns:
        advantages_N in the dtype of the rewards, at least float32.

    Raises:
        ValueError: for a group of one with "group_std", fewer than two samples with "batch_std", rewards that are not
            finite, or different shapes.
    """
    grouped = center_in_groups(rewards_N, groups_N)
    if scale == "none":
        return grouped.centred_N
    if scale == "group_std":
        grouped.require_pairs('scale="none"')
        squares_G = grouped.sum_G(grouped.centred_N.square())
        std_G = (squares_G / (grouped.sizes_G - 1)).sqrt()
        return grouped.centred_N / (std_G[grouped.index_N] + eps)
    if scale == "batch_std":
        if rewards_N.numel() < 2:
            raise ValueError(
                f'the batch holds {rewards_N.numel()} rewards, so its std is undefined; add samples or use scale="none"'
            )
        return grouped.centred_N / (rewards_N.to(grouped.centred_N.dtype).std() + eps)
    raise ValueError(f'scale is {scale!r}; use "group_std", "none" or "batch_std"')


def leave_one_out_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward minus the mean reward of the *other* samples of its group. RLOO (arXiv 2402.14740).

    Computed as n / (n - 1) times the centred reward. Returns advantages_N like `group_advantages`. Raises ValueError
    for a group of one, rewards that are not finite, or different shapes.
    """
    grouped = center_in_groups(rewards_N, groups_N)
    grouped.require_pairs('group_advantages(scale="none")')
    sizes_N = grouped.sizes_G[grouped.index_N]
    return grouped.centred_N * (sizes_N / (sizes_N - 1))


@dataclass(frozen=True, slots=True, eq=False)
class CenteredRewards:
    """Rewards less the mean of their group, with the index of each sample's group among the G ids."""

    ids_G: Tensor
    index_N: Tensor
    sizes_G: Tensor
    centred_N: Tensor

    def sum_G(self, values_N: Tensor) -> Tensor:
        """Sum of the values of each group's samples."""
        return torch.zeros_like(self.sizes_G).index_add_(0, self.index_N, values_N)

    def require_pairs(self, alternative: str) -> None:
        """Raise ValueError if a group has one sample."""
        single_G = self.ids_G[self.sizes_G == 1]
        if single_G.numel():
            raise ValueError(
                f"group {single_G[0].item()} has 1 sample, so it has no spread to compare with "
                f"({single_G.numel()} such groups); raise the group size or use {alternative}"
            )


def center_in_groups(rewards_N: Tensor, groups_N: Tensor) -> CenteredRewards:
    """Rewards less the mean of their group; exactly 0 where all rewards of a group are equal.

    Raises ValueError for rewards that aren't finite and shapes that differ.
    """
    if rewards_N.dim() != 1 or rewards_N.shape != groups_N.shape:
        raise ValueError(
            f"rewards_N {list(rewards_N.shape)} and groups_N {list(groups_N.shape)} must be 1-D and equally "
            "long; give one reward and one group id per sample"
        )
    values_N = rewards_N.detach().to(torch.promote_types(rewards_N.dtype, torch.float32))
    if not bool(values_N.isfinite().all()):
        bad = int((~values_N.isfinite()).nonzero()[0])
        raise ValueError(f"the reward of sample {bad} is {values_N[bad].item()}; drop the sample or fix its reward")
    ids_G, index_N, counts_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    sizes_G = counts_G.to(values_N.dtype)
    # Relative to the lowest reward of the group, equal rewards are exact zeros before any sum. The mean of seven 0.1 is
    # not 0.1 in binary; divided by an equally small std, that rounding error would become an advantage.
    lowest_G = values_N.new_zeros(len(ids_G)).scatter_reduce(0, index_N, values_N, "amin", include_self=False)
    above_N = values_N - lowest_G[index_N]
    mean_G = torch.zeros_like(sizes_G).index_add_(0, index_N, above_N) / sizes_G
    return CenteredRewards(ids_G, index_N, sizes_G, above_N - mean_G[index_N])
