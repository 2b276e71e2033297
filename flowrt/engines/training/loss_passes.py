"""Forward passes with the terms of an algorithm, and the metrics of a step's passes.

A pass returns the *sum* of its losses; only the step divides, by the global count of all passes of all ranks (tokens,
samples or groups, as the algorithm's terms say). So the gradient does not depend on how the step was split.

A sample whose recorded log-probabilities cannot be those of its tokens (not finite, above 0, or of probability 0), or
do not match its response in number, is masked: its loss is 0, its tokens still count, ``invalid_samples`` counts it.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flowrt.algorithms.algorithm import Algorithm, Count, Term, Tokens
from flowrt.algorithms.ratios import clamped_log_ratio_T
from flowrt.algorithms.support import Support, singletons
from flowrt.engines.base import TrainingBatch
from flowrt.engines.training.forward import cut_into_passes, response_logprobs
from flowrt.errors import EngineError

log = logging.getLogger("flowrt")
COUNTS = ("tokens", "samples", "groups", "invalid_samples")
MEANS = ("nll", "mismatch_kl_k1", "mismatch_kl_k3")
"""Summed over the passes and ranks of a step, and reported as means per token."""
DENOMINATORS: dict[Count, str] = {"token": "tokens", "sample": "samples", "group": "groups"}
DIVERGENCE = "divergence_"
AGES = 8
"""Staleness values (versions) with a divergence metric of their own; the last one includes all staler tokens."""
K3_OF_AGE = [f"k3_of_age_{age}" for age in range(AGES)]
TOKENS_OF_AGE = [f"tokens_of_age_{age}" for age in range(AGES)]
MIN_LOGPROB = -87.0
"""Below it a probability is 0 in float32: no such token can have been sampled."""
MAX_LOGPROB = 1e-2
"""Above it a log-probability is no rounding of 0."""


class LossPasses:
    """Computes the loss of one pass at a time, and accumulates the metrics of a step.

    Raises EngineError if the algorithm needs what a streaming trainer does not compute.
    """

    def __init__(self, algorithm: Algorithm, *, temperature: float, forward_tokens: int) -> None:
        self._algorithm = algorithm
        self._temperature = temperature
        self._forward_tokens = forward_tokens
        terms = algorithm.terms(_example(algorithm))
        counts = {term.per for term in terms}
        if len(counts) != 1:
            raise EngineError(f"the terms of {algorithm} are divided by {sorted(counts)}: let all have the same count")
        self.denominator = DENOMINATORS[counts.pop()]
        self._terms = tuple(f"{term.name}_loss" for term in terms) if len(terms) > 1 else ()
        self._metrics = tuple(dict.fromkeys(name for term in terms for name in term.metrics))
        self._sums: dict[str, float] = defaultdict(float)
        self._of_age = torch.zeros(2, AGES, dtype=torch.float64)  # sums of k3, counts of tokens

    def cut(self, model: Any, batch: TrainingBatch) -> list[list[int]]:
        """Indices of the samples of each pass."""
        if not self._algorithm.needs.whole_groups:
            return cut_into_passes(model, batch.prompts, batch.responses, self._forward_tokens)
        groups_N = batch.groups_N.tolist()
        return [[row for row, one in enumerate(groups_N) if one == group] for group in dict.fromkeys(groups_N)]

    def loss_sum(self, model: Any, batch: TrainingBatch, rows: list[int]) -> torch.Tensor:
        """Scalar sum of the losses of these samples, differentiable."""
        responses = [batch.responses[row] for row in rows]
        recorded = [_recorded(batch, row) for row in rows]
        logprobs_T, samples = response_logprobs(
            model,
            [batch.prompts[row] for row in rows],
            responses,
            self._temperature,
            supports=_supports(batch, rows, recorded),
        )
        device = logprobs_T.device
        valid_N = torch.tensor([one is not None for one in recorded])
        present_T = logprobs_T.detach()
        valid_T = valid_N.repeat_interleave(torch.tensor([len(one) for one in responses]))
        rollout_T, reference_T = _columns(recorded, responses, present_T, batch.reference_logprobs is not None)
        anchor_T = rollout_T if self._algorithm.plan.anchor == "rollout" else present_T
        tokens = Tokens(
            logprobs_T=logprobs_T,
            anchor_T=anchor_T,
            rollout_T=rollout_T,
            sample_T=samples.sample_T,
            advantages_N=batch.advantages_N[rows].to(device),
            weights_N=batch.weights_N[rows].to(device),
            group_N=batch.groups_N[rows].to(device),
            valid_T=valid_T.to(device, logprobs_T.dtype),
            reference_T=reference_T,
        )
        terms = self._algorithm.terms(tokens)
        loss_sum = terms[0].loss_sum if len(terms) == 1 else torch.stack([term.loss_sum for term in terms]).sum()
        if batch.ages is not None:
            self._measure_divergence(present_T, rollout_T, torch.cat([batch.ages[row] for row in rows]))
        self._add(tokens, terms, loss_sum, int((~valid_N).sum()))
        return loss_sum

    def _add(self, tokens: Tokens, terms: Sequence[Term], loss_sum: torch.Tensor, invalid: int) -> None:
        present_T = tokens.logprobs_T.detach()
        delta_T = clamped_log_ratio_T(present_T, tokens.rollout_T)
        self._sums["tokens"] += len(present_T)
        self._sums["samples"] += tokens.samples
        self._sums["groups"] += len(tokens.group_N.unique())
        self._sums["invalid_samples"] += invalid
        self._sums["loss"] += float(loss_sum.detach())
        self._sums["nll"] -= float(present_T.sum())
        self._sums["mismatch_kl_k1"] -= float(delta_T.sum())
        self._sums["mismatch_kl_k3"] += float((delta_T.expm1() - delta_T).sum())
        for term in terms:
            if self._terms:
                self._sums[f"{term.name}_loss"] += float(term.loss_sum.detach())
            for name, value in term.metrics.items():
                self._sums[name] += float(value)

    def _measure_divergence(self, trainer_T: torch.Tensor, rollout_T: torch.Tensor, ages_T: torch.Tensor) -> None:
        ratio_T = clamped_log_ratio_T(trainer_T, rollout_T).cpu().double()
        k3_T = ratio_T.expm1() - ratio_T
        self._of_age.index_add_(1, ages_T.long().clamp(max=AGES - 1), torch.stack([k3_T, torch.ones_like(k3_T)]))

    def reset(self) -> None:
        """Start a new step."""
        self._sums.clear()
        self._of_age.zero_()

    def global_sums(self) -> dict[str, float]:
        """The step's sums over all ranks, by name. Collective; a rank without micro-batches adds zeros."""
        names = (*COUNTS, "loss", *self._terms, *MEANS, *self._metrics)
        totals = torch.cat([torch.tensor([self._sums[name] for name in names], dtype=torch.float64), *self._of_age])
        if ranks() > 1:
            dist.all_reduce(totals)
        return dict(zip((*names, *K3_OF_AGE, *TOKENS_OF_AGE), totals.tolist(), strict=True))

    def step_metrics(self, sums: dict[str, float], grad_norm: float, lr: float) -> dict[str, float]:
        """Metrics of a step, from its global sums.

        ``loss`` and the loss of each term are divided by the count of the terms, all others are means per token.
        ``divergence_AGE`` is the k3 estimate of KL(rollout || trainer) over tokens of staleness AGE (versions).
        """
        tokens, samples, invalid = sums["tokens"], sums["samples"], sums["invalid_samples"]
        metrics = {name: sums[name] / sums[self.denominator] for name in ("loss", *self._terms)}
        metrics |= {name: sums[name] / tokens for name in (*MEANS, *self._metrics)}
        for age, (k3, count) in enumerate(zip(K3_OF_AGE, TOKENS_OF_AGE, strict=True)):
            if sums[count]:
                metrics[f"{DIVERGENCE}{age}"] = sums[k3] / sums[count]
        if invalid:
            log.warning("%d of %d samples have unusable log-probabilities and were not trained", invalid, samples)
        return {
            **metrics,
            "invalid_samples": invalid,
            "grad_norm": grad_norm,
            "lr": lr,
            "response_length": tokens / samples,
        }


Recorded = tuple[torch.Tensor, torch.Tensor | None]


def _supports(batch: TrainingBatch, rows: Sequence[int], recorded: Sequence[Recorded | None]) -> list[Support] | None:
    """The support of each sample; of an unusable one, its tokens alone. None without truncated sampling."""
    if batch.supports is None:
        return None
    return [
        batch.supports[row] if one is not None else singletons(batch.responses[row])
        for row, one in zip(rows, recorded, strict=True)
    ]


def _recorded(batch: TrainingBatch, row: int) -> Recorded | None:
    """Recorded log-probabilities of a sample under the rollout policy and the reference; None if they are unusable."""
    rollout = batch.rollout_logprobs[row]
    reference = None if batch.reference_logprobs is None else batch.reference_logprobs[row]
    length = len(batch.responses[row])
    if batch.supports is not None and not batch.supports[row].fits(batch.responses[row]):
        return None
    if len(rollout) != length or not bool(((rollout > MIN_LOGPROB) & (rollout < MAX_LOGPROB)).all()):
        return None
    if reference is not None and (len(reference) != length or not bool(reference.isfinite().all())):
        return None
    return rollout, reference


def _columns(
    recorded: Sequence[tuple[torch.Tensor, torch.Tensor | None] | None],
    responses: Sequence[torch.Tensor],
    present_T: torch.Tensor,
    has_reference: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recorded columns [T] of a pass; for samples that are not valid, the present policy's own values."""
    device = present_T.device
    if all(one is not None for one in recorded):
        usable = [one for one in recorded if one is not None]
        rollout_T = torch.cat([rollout for rollout, _ in usable]).to(device)
        reference_T = torch.cat([one for _, one in usable if one is not None]).to(device) if has_reference else None
        return rollout_T, reference_T
    present = present_T.split([len(response) for response in responses])
    rollout_T = torch.cat([own if one is None else one[0].to(own) for one, own in zip(recorded, present, strict=True)])
    if not has_reference:
        return rollout_T, None
    pairs = zip(recorded, present, strict=True)
    return rollout_T, torch.cat([own if one is None or one[1] is None else one[1].to(own) for one, own in pairs])


def _example(algorithm: Algorithm) -> Tokens:
    """Two tokens of two samples of a group, to learn the names of the terms and their metrics."""
    logprobs_T = torch.full((2,), -1.0, requires_grad=True)
    return Tokens(
        logprobs_T=logprobs_T,
        anchor_T=logprobs_T.detach(),
        rollout_T=logprobs_T.detach(),
        sample_T=torch.tensor([0, 1]),
        advantages_N=torch.tensor([1.0, -1.0]),
        weights_N=torch.ones(2),
        group_N=torch.zeros(2, dtype=torch.int64),
        valid_T=torch.ones(2),
        reference_T=logprobs_T.detach() if algorithm.needs.reference else None,
        entropy_T=torch.ones(2, requires_grad=True) if algorithm.needs.entropy else None,
    )


def ranks() -> int:
    """Number of data-parallel ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1
