"""Advantages: from the rewards of complete groups to one advantage per sample, and which samples are trained.

- Each rule maps `Groups` to `Credit`. Samples that are not trained are excluded from all sums and counts of the step.
- Rewards are centred within the group first, so a group whose rewards are all equal gets exactly 0 with every scale.
- A sample weight says how much a stale sample counts in the policy loss. Staleness is in policy versions; it is 0 for a
  sample generated with the weights that are trained.
- Constructors raise ValueError for parameters outside their range.

Shapes: N = samples, G = groups (in the order of their ids).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flowrt.algorithms.algorithm import Credit, Groups

CreditRule = Callable[[Groups], Credit]
Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "batch_mean", "none"]
Scale = Literal["none", "group_std", "batch_std", "group_mean"]


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Soft penalty on long responses: 0 up to limit - cache tokens, then linearly down to -1 at the limit.

    DAPO (arXiv 2503.14476, equation 13), added to the reward. Maps lengths [N] in tokens to penalties [N], float64.

    Args:
        limit: the response limit in tokens.
        cache: length in tokens of the interval in which the penalty grows, from 1 to ``limit``.
    """

    limit: int
    cache: int

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.limit:
            raise ValueError(f"cache is {self.cache}; it must be 1 to {self.limit}, the response limit in tokens")

    def __call__(self, lengths_N: Tensor) -> Tensor:
        return (self.limit - self.cache - lengths_N).double().div(self.cache).clamp(-1.0, 0.0)


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """(reward - baseline) / scale, and optionally whitened over the step.

    Args:
        baseline: "group_mean" (GRPO, arXiv 2402.03300); "leave_one_out", the mean of the other samples (RLOO, arXiv
            2402.14740); "length_weighted", sum(l r) / sum(l) over the group (OPO, arXiv 2505.23585); "batch_mean", of
            all rewards of the step (FlashREINFORCE); "none" (Williams).
        scale: "group_std" (GRPO); "none" (Dr. GRPO, arXiv 2503.20783); "batch_std" of all rewards of the step
            (Lite-PPO, arXiv 2508.08221); "group_mean" (MaxRL, arXiv 2602.02710), advantages of 0 where the mean is not
            above eps: a negative divisor would turn their signs. Standard deviations divide by n - 1, and eps is added
            to them.
        whiten: subtract the step's mean of the advantages and divide by their standard deviation plus eps
            (REINFORCE++, arXiv 2501.03262).
        kl_coef: times the sample's summed log(rollout / reference), subtracted from the reward.
        overlong: penalty on long responses, added to the reward.
        mask_truncated: do not train samples that were cut at the length limit.

    Where samples of the step are compared, the advantage of a step of one sample is 0.

    Raises ValueError when called, for a group of one where the baseline or the scale compares samples of a group, for
    rewards that are not finite, and for ``kl_coef`` without `Groups.kl_N`.
    """

    baseline: Baseline = "group_mean"
    scale: Scale = "group_std"
    eps: float = 1e-6
    whiten: bool = False
    kl_coef: float = 0.0
    overlong: OverlongPenalty | None = None
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if self.scale == "group_mean" and self.baseline != "group_mean":
            raise ValueError(
                f"scale 'group_mean' divides by the baseline; use baseline 'group_mean', not {self.baseline!r}"
            )

    @property
    def scope(self) -> Literal["group", "step"]:
        """`Needs.scope` of this rule."""
        compares_step = self.whiten or self.scale == "batch_std" or self.baseline == "batch_mean"
        return "step" if compares_step else "group"

    def __call__(self, groups: Groups) -> Credit:
        rewards_N = self._rewards(groups)
        grouped = center_in_groups(rewards_N, groups.group_N)
        if self.baseline not in ("batch_mean", "none"):
            grouped.require_pairs("baseline none (algorithm reinforce)")
        sizes_N = grouped.sizes_G[grouped.index_N]
        match self.baseline:
            case "group_mean":
                advantages_N = grouped.centred_N
            case "leave_one_out":
                advantages_N = grouped.centred_N * (sizes_N / (sizes_N - 1))
            case "length_weighted":
                lengths_N = groups.lengths_N.to(rewards_N)
                shift_G = grouped.sum_G(lengths_N * grouped.centred_N) / grouped.sum_G(lengths_N).clamp(min=1)
                advantages_N = grouped.centred_N - shift_G[grouped.index_N]
            case "batch_mean":
                advantages_N = _centred(rewards_N)
            case "none":
                advantages_N = rewards_N
        match self.scale:
            case "group_std":
                grouped.require_pairs("scale none")
                std_G = (grouped.sum_G(grouped.centred_N.square()) / (grouped.sizes_G - 1)).sqrt()
                advantages_N = advantages_N / (std_G[grouped.index_N] + self.eps)
            case "batch_std":
                advantages_N = advantages_N / (_std(rewards_N) + self.eps) if len(groups) > 1 else 0.0 * advantages_N
            case "group_mean":
                mean_N = rewards_N - grouped.centred_N
                advantages_N = torch.where(mean_N > self.eps, advantages_N / mean_N, 0.0)
            case "none":
                pass
        if self.whiten:
            advantages_N = _centred(advantages_N)
            advantages_N = advantages_N / (_std(advantages_N) + self.eps)
        trained_N = ~groups.truncated_N if self.mask_truncated else torch.ones(len(groups), dtype=torch.bool)
        return Credit(advantages_N, trained_N)

    def _rewards(self, groups: Groups) -> Tensor:
        rewards_N = groups.rewards_N.to(torch.promote_types(groups.rewards_N.dtype, torch.float32))
        if self.overlong is not None:
            rewards_N = rewards_N + self.overlong(groups.lengths_N).to(rewards_N.dtype)
        if self.kl_coef:
            if groups.kl_N is None:
                raise ValueError("a KL penalty in the reward needs a reference; the groups have no kl_N")
            rewards_N = rewards_N - self.kl_coef * groups.kl_N.to(rewards_N.dtype)
        return rewards_N


@dataclass(frozen=True, slots=True)
class BestOfGroup:
    """Advantage 1 for the best samples of each group; the others are not trained. RAFT (arXiv 2304.06767).

    Args:
        keep: maximum number of samples kept in a group; of samples with equal rewards, the earlier.
        above: only samples with a reward above it are kept.
    """

    keep: int = 1
    above: float = float("-inf")

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be 1 or more")

    def __call__(self, groups: Groups) -> Credit:
        trained_N = torch.zeros(len(groups), dtype=torch.bool)
        for group in groups.group_N.unique():
            rows = (groups.group_N == group).nonzero().flatten()
            order = rows[groups.rewards_N[rows].argsort(descending=True, stable=True)][: self.keep]
            trained_N[order] = groups.rewards_N[order] > self.above
        return Credit(trained_N.to(groups.rewards_N.dtype), trained_N)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Advantage 1 for the best sample of each group and -1 for the worst; the others are not trained.

    A group whose rewards are all equal has no pair. Among equal rewards the earlier sample is taken.
    """

    def __call__(self, groups: Groups) -> Credit:
        advantages_N = torch.zeros_like(groups.rewards_N)
        for group in groups.group_N.unique():
            rows = (groups.group_N == group).nonzero().flatten()
            rewards = groups.rewards_N[rows]
            if rewards.max() > rewards.min():
                advantages_N[rows[rewards.argmax()]] = 1.0
                advantages_N[rows[rewards.argmin()]] = -1.0
        return Credit(advantages_N, advantages_N != 0)


def _centred(values_N: Tensor) -> Tensor:
    """The values less their mean; exactly 0 where all are equal."""
    # Relative to the lowest value, equal ones are exact zeros before the mean, as in `center_in_groups`.
    above_N = values_N - values_N.min()
    return above_N - above_N.mean()


def _std(values_N: Tensor) -> Tensor:
    """Standard deviation with divisor n - 1; 0 of one value."""
    return values_N.std() if len(values_N) > 1 else values_N.new_zeros(())


@dataclass(frozen=True, slots=True, eq=False)
class CenteredRewards:
    """Rewards less the mean of their group (centred_N), with the index of each sample's group among the ids [G].

    sizes_G is the number of samples of each group, in the dtype of the rewards.
    """

    ids_G: Tensor
    index_N: Tensor
    sizes_G: Tensor
    centred_N: Tensor

    def sum_G(self, values_N: Tensor) -> Tensor:
        """[G], sum of the values of each group's samples."""
        return torch.zeros_like(self.sizes_G).index_add_(0, self.index_N, values_N)

    def require_pairs(self, alternative: str) -> None:
        """Raise ValueError if a group has only one sample; ``alternative`` is a setting that the error suggests."""
        single_G = self.ids_G[self.sizes_G == 1]
        if single_G.numel():
            raise ValueError(
                f"group {single_G[0].item()} has 1 sample, so it has no spread to compare with "
                f"({single_G.numel()} such groups); raise --group-size, or use {alternative}"
            )


def center_in_groups(rewards_N: Tensor, groups_N: Tensor) -> CenteredRewards:
    """Rewards less the mean of their group; exactly 0 where all rewards of a group are equal.

    Raises ValueError for rewards that are not finite, and shapes that are not [N] both.
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
