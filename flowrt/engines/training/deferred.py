"""Steps whose backward passes wait for the last sample: several updates per step, step statistics, mixed counts.

- Samples are kept on the CPU as they arrive. If the algorithm needs log-probabilities under the policy before the first
  update, they are computed then, so that this forward pass overlaps with generation.
- At the end of the step the ranks exchange the inputs of the algorithm's statistics, and count the tokens, samples and
  groups of each mini-batch. Every term is divided by its global count before the backward pass.
- A mini-batch is a range of the step's groups, in the order of their ids, over all ranks. So neither the order in which
  samples arrive nor the number of ranks changes it.

Shapes: N = samples of this rank, T = tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrt.algorithms.algorithm import Groups, StepTokens
from flowrt.engines.base import TrainingBatch
from flowrt.engines.training.loss_passes import LossPasses, rank, ranks, recorded_logprobs

COUNTED = ("tokens", "samples", "groups")


@dataclass(frozen=True, slots=True)
class DeferredPass:
    """The inputs of a deferred backward pass besides its samples.

    Attributes:
        before: N tensors [T], log-probabilities in nats under the policy before the first update; empty if not needed.
        statistics: statistics of the whole step by name, from `Algorithm.measure`.
        counts: numbers of tokens, samples and groups of the mini-batch, over all ranks.
    """

    before: Sequence[Tensor]
    statistics: Mapping[str, float]
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimiser update: this rank's samples of a mini-batch, by their rows in the step's batch."""

    rows: Sequence[int]
    context: DeferredPass


class DeferredStep:
    """The samples of a step on this rank, and their updates once all have arrived."""

    def __init__(self, passes: LossPasses) -> None:
        self._passes = passes
        self._algorithm = passes.algorithm
        self._batches: list[TrainingBatch] = []
        self._before: list[Tensor] = []
        self._entropies: list[Tensor] = []

    def add(self, model: Any, batch: TrainingBatch, before_pass: Callable[[], object] = lambda: None) -> None:
        """Keep the samples of a micro-batch, and compute the log-probabilities that are needed before the first update.

        Args:
            model: with the weights before the first update.
            batch: on the CPU.
            before_pass: called before each forward pass.
        """
        before: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}
        if self._passes.needs_forward:
            for rows in self._passes.cut(model, batch):
                before_pass()
                logprobs, entropy = self._passes.forward(model, batch, rows)
                before |= dict(zip(rows, logprobs, strict=True))
                entropies |= dict(zip(rows, entropy, strict=False))
        self._batches.append(batch)
        self._before.extend(before[row] for row in sorted(before))
        self._entropies.extend(entropies[row] for row in sorted(entropies))

    def clear(self) -> None:
        """Discard all samples."""
        self._batches.clear()
        self._before.clear()
        self._entropies.clear()

    def complete(self) -> tuple[TrainingBatch, list[Update]]:
        """Compute advantages and statistics of the step and cut it into mini-batches. Collective.

        Returns:
            All trained samples of this rank, and the updates of all epochs in order, without updates for which no
            rank has a token. The number of updates is the same on all ranks.

        Raises:
            ValueError: if the algorithm cannot compare the groups of the step.
        """
        batch = TrainingBatch.joined(self._batches)
        plan = self._algorithm.plan
        if self._algorithm.needs.scope == "step":
            batch = self._with_credit(batch)
        statistics: Mapping[str, float] = {}
        if self._algorithm.needs.token_statistics:
            statistics = self._algorithm.measure(self._step_tokens(batch))
        parts = _mini_batches(batch, plan.updates)
        counted = _global_counts(batch, parts)
        updates = [
            Update(rows, DeferredPass(self._before, statistics, counts))
            for rows, counts in zip(parts, counted, strict=True)
            if counts["tokens"]
        ]
        return batch, updates * plan.epochs

    def _with_credit(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with advantages over all groups of the step, without the samples that are not trained."""
        own = batch.credit or _no_groups()
        columns: dict[str, Any] = {}
        mine = slice(0, 0)
        for field in fields(Groups):
            value = getattr(own, field.name)
            if field.name == "kl_N" and not _any_rank(value is not None):
                columns[field.name] = None
                continue
            parts = gather_rows(torch.zeros(0, dtype=torch.float64) if value is None else value)
            start = sum(len(part) for part in parts[: rank()])
            mine = slice(start, start + len(parts[rank()]))
            columns[field.name] = torch.cat(parts)
        everything = Groups(**columns)
        if not len(everything):
            return batch
        credit = self._algorithm.credit(everything)
        batch = replace(batch, advantages_N=credit.advantages_N[mine].float(), credit=None)
        for row, capture in enumerate(batch.captures or ()):
            if capture is not None:
                capture.advantage = float(batch.advantages_N[row])
        rows = credit.trained_N[mine].nonzero().flatten().tolist()
        self._before = [self._before[row] for row in rows] if self._before else []
        self._entropies = [self._entropies[row] for row in rows] if self._entropies else []
        return batch.only(rows)

    def _step_tokens(self, batch: TrainingBatch) -> StepTokens:
        """The detached numbers of all tokens of the step, in the order of the ranks."""
        nothing = torch.zeros(0)
        rollout = []
        for row, before in enumerate(self._before):
            usable = recorded_logprobs(batch, row)
            rollout.append(before if usable is None else usable[0])
        lengths = torch.tensor([len(response) for response in batch.responses], dtype=torch.int64)
        advantages = batch.advantages_N.repeat_interleave(lengths)
        present_T, rollout_T, advantages_T = (
            torch.cat(gather_rows(samples))
            for samples in (torch.cat(self._before or [nothing]), torch.cat(rollout or [nothing]), advantages)
        )
        entropy_T = None
        if self._algorithm.needs.entropy:
            entropy_T = torch.cat(gather_rows(torch.cat(self._entropies or [nothing])))
        anchor_T = rollout_T if self._algorithm.plan.anchor == "rollout" else present_T
        return StepTokens(
            logprobs_T=present_T,
            anchor_T=anchor_T,
            rollout_T=rollout_T,
            advantages_T=advantages_T,
            entropy_T=entropy_T,
        )


def gather_rows(values_N: Tensor) -> list[Tensor]:
    """The values [N] of every rank, in the order of the ranks; N may differ. Collective, over the CPU's backend."""
    if ranks() == 1:
        return [values_N]
    exact = values_N.to(torch.float64)  # exact for float32, booleans, and integers below 2^53
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks())]
    dist.all_gather(sizes, torch.tensor([len(exact)]))
    padded = exact.new_zeros(max(int(size) for size in sizes))
    padded[: len(exact)] = exact
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [rows[: int(size)].to(values_N.dtype) for rows, size in zip(gathered, sizes, strict=True)]


def _mini_batches(batch: TrainingBatch, updates: int) -> list[list[int]]:
    """Rows of this rank in each of the mini-batches, by group id and order within the group. Collective."""
    groups_N = batch.groups_N.long()
    ids = torch.cat(gather_rows(groups_N)).unique().tolist()
    part_of = {group: index * updates // len(ids) for index, group in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(updates)]
    own = groups_N.tolist()
    for row in sorted(range(len(own)), key=own.__getitem__):
        parts[part_of[own[row]]].append(row)
    return parts


def _global_counts(batch: TrainingBatch, parts: Sequence[Sequence[int]]) -> list[dict[str, float]]:
    """Tokens, samples and groups of each mini-batch over all ranks. Collective."""
    counts = torch.zeros(len(parts), len(COUNTED), dtype=torch.float64)
    for index, rows in enumerate(parts):
        if rows:
            tokens = sum(len(batch.responses[row]) for row in rows)
            counts[index] = torch.tensor([tokens, len(rows), len(batch.groups_N[list(rows)].unique())])
    if ranks() > 1:
        dist.all_reduce(counts)
    return [dict(zip(COUNTED, row, strict=True)) for row in counts.tolist()]


def _no_groups() -> Groups:
    none = torch.zeros(0, dtype=torch.int64)
    return Groups(
        rewards_N=torch.zeros(0, dtype=torch.float64),
        group_N=none,
        lengths_N=none,
        truncated_N=none.bool(),
        staleness_N=none,
    )


def _any_rank(here: bool) -> bool:
    """Whether ``here`` is true on any rank. Collective."""
    flag = torch.tensor([int(here)])
    if ranks() > 1:
        dist.all_reduce(flag)
    return bool(flag)
