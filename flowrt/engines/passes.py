"""Forward passes over a micro-batch with the GRPO loss: what every training engine of ours accumulates.

A pass gives the *sum* of its token losses; only a step divides, by the token count of all passes of all ranks. How
a step was cut therefore cannot change its gradient.
"""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from flowrt.algorithms import GrpoLoss, grpo_token_loss_sum, mismatch_statistics, truncated_importance
from flowrt.algorithms.ratios import clamped_log_ratio_T
from flowrt.engines.protocols import TrainingBatch
from flowrt.engines.scoring import cut_into_passes, response_logprobs
from flowrt.errors import EngineError

SUMS = (
    "tokens",
    "samples",
    "loss",
    "surprise",
    "mismatch_kl_k1",
    "mismatch_kl_k3",
    "mismatch_capped_fraction",
    "kl",
    "ratio",
    "clipped_low",
    "clipped_high",
)
"""What is summed over a step's passes and ranks; all but the first two become means per token."""
DIVERGENCE = "divergence_"
AGES = 8
"""Divergence is measured for tokens of so many ages, in versions; all that are older count as the oldest."""
K3_OF_AGE, TOKENS_OF_AGE = ([f"{what}_of_age_{age}" for age in range(AGES)] for what in ("k3", "tokens"))


class LossPasses:
    """The loss of one pass at a time, and the sums of what the passes of a step say about it."""

    def __init__(self, loss: GrpoLoss, *, correction_cap: float, temperature: float, forward_tokens: int) -> None:
        self._loss = loss
        self._cap = correction_cap
        self._temperature = temperature
        self._forward_tokens = forward_tokens
        self._sums: dict[str, float] = defaultdict(float)
        self._of_age = torch.zeros(2, AGES, dtype=torch.float64)  # sums of k3, and tokens

    def cut(self, model: Any, batch: TrainingBatch) -> list[list[int]]:
        """The rows of each pass."""
        return cut_into_passes(model, batch.prompts, batch.responses, self._forward_tokens)

    def loss_sum(self, model: Any, batch: TrainingBatch, rows: list[int]) -> torch.Tensor:
        """The sum of the token losses of these rows, with its graph."""
        logprobs_T, samples = response_logprobs(
            model,
            [batch.prompts[row] for row in rows],
            [batch.responses[row] for row in rows],
            self._temperature,
        )
        device = logprobs_T.device
        sample_T = samples.sample_T
        old_T = logprobs_T.detach()
        rollout_T = torch.cat([batch.rollout_logprobs[row] for row in rows]).to(device)
        importance_T = truncated_importance(old_T, rollout_T, cap=self._cap)
        reference_T = None
        if batch.reference_logprobs is not None:
            reference_T = torch.cat([batch.reference_logprobs[row] for row in rows]).to(device)
        result = grpo_token_loss_sum(
            logprobs_T,
            old_T,
            batch.advantages_N[rows].to(device),
            sample_T,
            loss=self._loss,
            rollout_weights_T=importance_T * batch.weights_N[rows].to(device)[sample_T],
            reference_T=reference_T,
        )
        if batch.ages is not None:
            self._measure(old_T, rollout_T, torch.cat([batch.ages[row] for row in rows]))
        mismatch = mismatch_statistics(old_T, rollout_T, importance_T)
        self._sums["tokens"] += result.tokens
        self._sums["samples"] += len(rows)
        self._sums["loss"] += float(result.loss_sum.detach())
        self._sums["surprise"] -= float(old_T.sum())
        for name in ("kl_k1", "kl_k3", "capped_fraction"):
            self._sums[f"mismatch_{name}"] += mismatch[name] * result.tokens
        for name, value in result.metric_sums().items():
            self._sums[name.removesuffix("_sum")] += float(value)
        return result.loss_sum

    def _measure(self, trainer_T: torch.Tensor, rollout_T: torch.Tensor, ages_T: torch.Tensor) -> None:
        ratio_T = clamped_log_ratio_T(trainer_T, rollout_T).cpu().double()
        k3_T = ratio_T.expm1() - ratio_T
        self._of_age.index_add_(1, ages_T.long().clamp(max=AGES - 1), torch.stack([k3_T, torch.ones_like(k3_T)]))

    def forget(self) -> None:
        """A new step begins."""
        self._sums.clear()
        self._of_age.zero_()

    def global_sums(self) -> dict[str, float]:
        """The step's sums over all ranks; one that got no micro-batch adds zeros."""
        totals = torch.cat([torch.tensor([self._sums[name] for name in SUMS], dtype=torch.float64), *self._of_age])
        if ranks() > 1:
            dist.all_reduce(totals)
        return dict(zip((*SUMS, *K3_OF_AGE, *TOKENS_OF_AGE), totals.tolist(), strict=True))


def finite(grad_norm: float, steps: int) -> float:
    """The norm, when a step can be made with it. Raises EngineError before anything that is not a number is learned."""
    if math.isfinite(grad_norm):
        return grad_norm
    raise EngineError(
        f"the gradient of step {steps} has norm {grad_norm}: the weights are as they were before it. Look at "
        "the rewards and log-probabilities of its samples; resume from the last checkpoint, with a lower trainer.lr"
    )


def step_metrics(sums: dict[str, float], grad_norm: float, lr: float) -> dict[str, float]:
    """Means per token of a step's global sums, and how the optimiser stepped.

    ``divergence_AGE`` is KL(what generated || what trained), the k3 estimate, over tokens of that age in versions.
    """
    tokens, samples = sums["tokens"], sums["samples"]
    means = {name: sums[name] / tokens for name in SUMS[2:]}
    for age, (k3, count) in enumerate(zip(K3_OF_AGE, TOKENS_OF_AGE, strict=True)):
        if sums[count]:
            means[f"{DIVERGENCE}{age}"] = sums[k3] / sums[count]
    return {**means, "grad_norm": grad_norm, "lr": lr, "response_length": tokens / samples}


def ranks() -> int:
    """How many data-parallel ranks train together."""
    return dist.get_world_size() if dist.is_initialized() else 1
