"""The extension point for RL objectives: what an algorithm needs, how it assigns credit, what it minimises.

Three policies have fixed names in all modules:

- *rollout* (mu): sampled the token; its log-probability was recorded by the version that generated it.
- *anchor* (pi_prox): the policy that the ratio of the loss is measured from (`Plan.anchor`).
- *policy* (theta): the one being trained.

Invariants:

- `Algorithm.terms` returns sums, each with the kind of count that divides it. The trainer adds the gradients of all
  micro-batches of a step on all ranks, and divides once by the global count. Where terms have different counts, or a
  step has several updates, the trainer waits for the last sample, and divides each term by its global count before the
  backward passes. So the gradient does not depend on how a step was cut into micro-batches, passes or ranks.
- All tokens of a sample are in one pass. With `Needs.whole_groups`, all samples of a group are.

Shapes: N = samples of a pass, T = their response tokens, flattened; sample_T is the index into N of a token's sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Anchor = Literal["present", "rollout", "step"]
"""The policy that ratios are measured from. present: the policy itself, so every ratio is 1 (one update a step only);
rollout: the policy that sampled the token; step: the policy before the first update of the step."""
Scope = Literal["group", "step"]
"""What credit and terms depend on. group: on one group, so samples are trained as they arrive; step: on statistics of
the whole step, so the backward passes wait for its last sample."""
Count = Literal["token", "sample", "group"]
"""The divisor of a term's sum: the global number of trained tokens, samples, or groups of the step."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs that an algorithm needs, from which stages and columns of the dataflow follow."""

    reference: bool = False
    """Log-probabilities under the reference model (column ``ref_logprobs``)."""
    entropy: bool = False
    """Entropy of each prediction, with gradient."""
    whole_groups: bool = False
    """All samples of a group in one forward pass, for losses that compare them."""
    scope: Scope = "group"
    token_statistics: bool = False
    """With scope "step": `Algorithm.measure` reads the tokens of the step, so each sample has an additional forward
    pass when it arrives."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The optimiser steps on the samples of one step.

    Raises ValueError for counts below 1, and for several updates without a fixed anchor.
    """

    anchor: Anchor = "present"
    updates: int = 1
    """Mini-batches that an epoch is cut into, each with an optimiser step."""
    epochs: int = 1
    """Passes over the samples of a step."""

    def __post_init__(self) -> None:
        if self.updates < 1 or self.epochs < 1:
            raise ValueError(f"updates is {self.updates} and epochs {self.epochs}; both must be 1 or more")
        if self.anchor == "present" and self.optimizer_steps > 1:
            raise ValueError(
                f"{self.optimizer_steps} updates a step need a fixed anchor: with anchor 'present' every ratio is 1; "
                "use anchor 'step' or 'rollout'"
            )

    @property
    def optimizer_steps(self) -> int:
        """Number of optimiser updates in a step."""
        return self.updates * self.epochs


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Complete groups whose samples are given advantages together. All tensors are detached and on the CPU.

    Attributes:
        rewards_N: [N] floating point, finite; float32 in the trainer role.
        group_N: [N] int64, any ids; groups may be interleaved and of different sizes.
        lengths_N: [N] int64, response lengths in tokens.
        truncated_N: [N] bool, true where the response was cut at the length limit.
        staleness_N: [N] int64, version being trained minus the oldest version that generated a token of the sample.
        kl_N: [N] float64, sum over the sample's tokens of log(rollout / reference) in nats; None without a reference.
    """

    rewards_N: Tensor
    group_N: Tensor
    lengths_N: Tensor
    truncated_N: Tensor
    staleness_N: Tensor
    kl_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rewards_N)


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The advantages of samples, and which samples are trained.

    Attributes:
        advantages_N: [N] floating point.
        trained_N: [N] bool; a sample that is not trained is excluded from every sum and every count.
    """

    advantages_N: Tensor
    trained_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of one forward pass. Log-probabilities are in nats, at the sampling temperature.

    Attributes:
        logprobs_T: under the policy; the only tensor with a gradient, except for entropy_T.
        anchor_T: under the anchor.
        rollout_T: under the policy that sampled the token, as recorded.
        sample_T: int64, index of the token's sample.
        advantages_N: one per sample.
        weights_N: factor of each sample's policy loss.
        group_N: int64, group of each sample.
        valid_T: 1 for tokens whose recorded log-probabilities are usable, else 0; masks losses, not counts.
        reference_T: under the reference; None unless `Needs.reference`.
        entropy_T: of the prediction of the token; None unless `Needs.entropy`.
        step: statistics of the whole step by name, from `Algorithm.measure`; empty without `Needs.token_statistics`.
        numbers: numbers of an `Adaptive` algorithm in this step, by name; empty for other algorithms.
    """

    logprobs_T: Tensor
    anchor_T: Tensor
    rollout_T: Tensor
    sample_T: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    group_N: Tensor
    valid_T: Tensor
    reference_T: Tensor | None = None
    entropy_T: Tensor | None = None
    step: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """N, the number of samples."""
        return len(self.advantages_N)

    @property
    def advantages_T(self) -> Tensor:
        """The advantage of each token's sample."""
        return self.advantages_N[self.sample_T]

    def sum_N(self, values_T: Tensor) -> Tensor:
        """[N], sum of the values of each sample's tokens."""
        return values_T.new_zeros(self.samples).index_add(0, self.sample_T, values_T)

    def mean_N(self, values_T: Tensor) -> Tensor:
        """[N], mean of the values of each sample's tokens; 0 for a sample without tokens."""
        return self.sum_N(values_T) / self.sum_N(torch.ones_like(values_T)).clamp(min=1)


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """Detached numbers of all trained tokens of a step, of all passes and ranks, for statistics with scope "step".

    Attributes:
        logprobs_T, anchor_T, rollout_T, advantages_T: as in `Tokens`.
        entropy_T: None unless `Needs.entropy`.
    """

    logprobs_T: Tensor
    anchor_T: Tensor
    rollout_T: Tensor
    advantages_T: Tensor
    entropy_T: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One summand of the objective, over one forward pass.

    Attributes:
        name: with several terms, the metric of this one is NAME_loss.
        loss_sum: scalar with gradient, to be minimised.
        per: the global count that the sum is divided by.
        metrics: detached sums over the pass's tokens by name, reported as means per token.
        means: detached sums by name, reported divided by the global count of ``per``.
    """

    name: str
    loss_sum: Tensor
    per: Count = "token"
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """An RL objective. A frozen value: it keeps no state between calls, so a run resumes exactly."""

    @property
    def needs(self) -> Needs:
        """The inputs that this algorithm needs."""
        ...

    @property
    def plan(self) -> Plan:
        """The optimiser updates of a step."""
        ...

    def credit(self, groups: Groups) -> Credit:
        """Advantages of complete groups; with scope "step", of all groups of the step on all ranks.

        Raises ValueError for groups that the algorithm cannot compare.
        """
        ...

    def measure(self, step: StepTokens) -> dict[str, float]:
        """Statistics of the whole step by name, under the policy before its first update.

        Called only with `Needs.token_statistics`, with equal arguments on all ranks.
        """
        ...

    def terms(self, tokens: Tokens) -> Sequence[Term]:
        """The summands of the objective over one forward pass; their names and counts are the same in every pass."""
        ...


@runtime_checkable
class Adaptive(Protocol):
    """Optional methods of an algorithm with numbers that change from step to step, such as an adaptive coefficient.

    The engine keeps the numbers: all passes of a step on all ranks read the same ones (`Tokens.numbers`), they are
    metrics of the step, and they are part of the checkpoint.
    """

    def first_numbers(self) -> dict[str, float]:
        """The numbers of the first step, by name; the names never change."""
        ...

    def next_numbers(
        self, numbers: Mapping[str, float], metrics: Mapping[str, float], samples: float
    ) -> dict[str, float]:
        """The numbers of the next step, a function of the arguments alone.

        Args:
            numbers: the numbers of this step.
            metrics: the metrics of this step by name, over all ranks.
            samples: number of samples trained in this step, on all ranks.
        """
        ...
