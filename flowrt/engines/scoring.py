"""Log-probabilities of given responses: the trainer's and the reference's forward pass."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrt.algorithms import Folded, Padded, cut_by_tokens, cut_folded
from flowrt.engines.folded_attention import folded_logprobs, folds, padded_logprobs


def response_logprobs(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], temperature: float
) -> tuple[torch.Tensor, Padded | Folded]:
    """Log-probabilities [T] of all response tokens, sample after sample, and the batch they came from.

    Gradients flow when they are enabled. With a model that takes folded samples (`use_folded`), a prompt that several
    samples have is computed once.
    """
    if folds(model):
        return folded_logprobs(model, prompts, responses, temperature)
    return padded_logprobs(model, prompts, responses, temperature)


def cut_into_passes(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], budget_tokens: int
) -> list[list[int]]:
    """The samples of each forward pass of at most so many tokens, folded or padded, as the model takes them."""
    if not prompts:
        return []
    if folds(model):
        return cut_folded(prompts, responses, budget_tokens)
    # Those of like length together, since short ones are padded to the longest.
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    passes = cut_by_tokens([lengths[row] for row in order], budget_tokens)
    return [[order[place] for place in places] for places in passes]


@torch.inference_mode()
def score(
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    budget_tokens: int,
) -> list[torch.Tensor]:
    """Log-probabilities of each response, at most ``budget_tokens`` tokens in a pass (1: each sample alone)."""
    scored: dict[int, torch.Tensor] = {}
    for rows in cut_into_passes(model, prompts, responses, budget_tokens):
        flat_T, _ = response_logprobs(
            model, [prompts[row] for row in rows], [responses[row] for row in rows], temperature
        )
        scored |= dict(zip(rows, flat_T.float().split([len(responses[row]) for row in rows]), strict=True))
    return [scored[row] for row in range(len(responses))]
