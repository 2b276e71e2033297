"""A fixed training step of GPT-2 in float64, and its gradient, by an engine or by a loop over samples.

The model is GPT-2 because the RMSNorm of transformers computes in float32 whatever the model's type.

Shapes: N = samples, T = their response tokens, V = vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from flowrt.algorithms.algorithm import Algorithm, Groups, StepTokens, Tokens
from flowrt.engines.base import TrainEngine, TrainingBatch
from flowrt.engines.hf import set_training_mode
from flowrt.engines.options import TrainOptions

VOCABULARY, LIMIT, TEMPERATURE = 40, 12, 0.7
GROUPS, MEMBERS = 6, 4
LENGTHS = (3, 12, 1, 7, 9, 0, 5, 12)
"""Response lengths of the samples, in tokens, repeated in this order; one is 1, one is 0."""


def make_model() -> Any:
    """A GPT-2 of two layers of width 32 in float64, without dropout; always with the same weights."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    return set_training_mode(GPT2LMHeadModel(config).double())


def save_model(folder: Path) -> None:
    """Save the model of `make_model`, for engines that load a model from files."""
    disable_progress_bar()
    make_model().save_pretrained(folder)


def options(*, forward_tokens: int = 8192, share_prompts: bool = True) -> TrainOptions:
    """Options of a training engine without gradient clipping and warm-up."""
    return TrainOptions(
        lr=1e-3, warmup_steps=0, max_grad_norm=1e9, forward_tokens=forward_tokens, share_prompts=share_prompts
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """The samples of whole groups: token ids [T] of prompts and responses, recorded log-probabilities [T], rewards."""

    prompts: list[Tensor]
    responses: list[Tensor]
    rollout: list[Tensor]
    reference: list[Tensor]
    groups: Groups

    def batch(self, algorithm: Algorithm) -> TrainingBatch:
        """The samples of all groups that the algorithm trains, with their advantages; every third has weight 0.5."""
        credit = algorithm.credit(self.groups)
        rows = credit.trained_N.nonzero().flatten().tolist()
        return TrainingBatch(
            prompts=[self.prompts[row] for row in rows],
            responses=[self.responses[row] for row in rows],
            rollout_logprobs=[self.rollout[row] for row in rows],
            reference_logprobs=[self.reference[row] for row in rows] if algorithm.needs.reference else None,
            advantages_N=credit.advantages_N[rows],
            weights_N=torch.tensor([1.0 if row % 3 else 0.5 for row in rows], dtype=torch.float64),
            groups_N=self.groups.group_N[rows],
        )


def make_step(model: Any, *, longer_by: int = 2) -> Step:
    """A step whose recorded log-probabilities are those of the model plus noise of 0.2 nats, as of older versions.

    Args:
        model: the model.
        longer_by: difference in prompt length between a group and the previous group, in tokens.
    """
    generator = torch.Generator().manual_seed(3)
    prompts, responses, rollout, reference = [], [], [], []
    for group in range(GROUPS):
        prompt = torch.randint(2, VOCABULARY, (3 + longer_by * group,), generator=generator)
        for member in range(MEMBERS):
            length = LENGTHS[(MEMBERS * group + member) % len(LENGTHS)]
            response = torch.randint(2, VOCABULARY, (length,), generator=generator)
            logprobs_T = sample_forward(model, prompt, response)[0].detach()
            noise = 0.2 * torch.randn(2, length, generator=generator, dtype=torch.float64)
            prompts.append(prompt)
            responses.append(response)
            rollout.append((logprobs_T + noise[0]).clamp(max=-1e-6))
            reference.append((logprobs_T + noise[1]).clamp(max=-1e-6))
    lengths_N = torch.tensor([len(response) for response in responses])
    groups = Groups(
        rewards_N=torch.rand(len(responses), generator=generator, dtype=torch.float64),
        group_N=torch.arange(GROUPS).repeat_interleave(MEMBERS),
        lengths_N=lengths_N,
        truncated_N=lengths_N == LIMIT,
        staleness_N=torch.zeros(len(responses), dtype=torch.int64),
        kl_N=torch.stack([(a - b).sum() for a, b in zip(rollout, reference, strict=True)]),
    )
    return Step(prompts, responses, rollout, reference, groups)


def sample_forward(model: Any, prompt: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [T] of the response of one sample, by a forward pass of this sample alone."""
    tokens = torch.cat([prompt, response]).unsqueeze(0)
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logprobs_TV = logits.log_softmax(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, response.unsqueeze(1)).squeeze(1), entropy_T


def plain_gradient(algorithm: Algorithm) -> tuple[Tensor, float]:
    """The flat gradient of the step's first update, by a loop over samples, and its loss.

    One forward pass per sample, then all terms at once, each divided by its count; no packing, padding or accumulation.
    """
    model = make_model()
    batch = make_step(model).batch(algorithm)
    pairs = [sample_forward(model, *sample) for sample in zip(batch.prompts, batch.responses, strict=True)]
    logprobs_T, entropy_T = (torch.cat(column) for column in zip(*pairs, strict=True))
    rollout_T = torch.cat(list(batch.rollout_logprobs))
    sample_T = torch.arange(len(pairs)).repeat_interleave(torch.tensor([len(response) for response in batch.responses]))
    tokens = Tokens(
        logprobs_T=logprobs_T,
        anchor_T=rollout_T if algorithm.plan.anchor == "rollout" else logprobs_T.detach(),
        rollout_T=rollout_T,
        sample_T=sample_T,
        advantages_N=batch.advantages_N,
        weights_N=batch.weights_N,
        group_N=batch.groups_N,
        valid_T=torch.ones_like(rollout_T),
        reference_T=None if batch.reference_logprobs is None else torch.cat(list(batch.reference_logprobs)),
        entropy_T=entropy_T if algorithm.needs.entropy else None,
    )
    if algorithm.needs.scope == "step":
        tokens = dataclasses.replace(tokens, step=algorithm.measure(detached(tokens)))
    counts = {"token": len(logprobs_T), "sample": len(pairs), "group": len(batch.groups_N.unique())}
    loss = torch.stack([term.loss_sum / counts[term.per] for term in algorithm.terms(tokens)]).sum()
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([slope.flatten() for slope in slopes]), float(loss.detach())


def detached(tokens: Tokens) -> StepTokens:
    """The tokens of a pass as those of a whole step, without gradients."""
    return StepTokens(
        logprobs_T=tokens.logprobs_T.detach(),
        anchor_T=tokens.anchor_T.detach(),
        rollout_T=tokens.rollout_T,
        advantages_T=tokens.advantages_T,
        entropy_T=None if tokens.entropy_T is None else tokens.entropy_T.detach(),
    )


def select_groups(batch: TrainingBatch, groups: Sequence[int]) -> TrainingBatch:
    """The samples of these groups, by group id."""
    return batch.only([row for row, group in enumerate(batch.groups_N.tolist()) if group in groups])


def run_step(engine: TrainEngine, batch: TrainingBatch, cuts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Train one step with a micro-batch for each list of group ids in ``cuts``. Returns the metrics of the step."""
    for cut in cuts:
        engine.accumulate(select_groups(batch, cut))
    return engine.step()
