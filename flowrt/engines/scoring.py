"""Log-probabilities of given responses: the trainer's and the reference's forward pass."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrt.algorithms import (
    Folded,
    Padded,
    cut_by_tokens,
    cut_folded,
    fold_samples,
    pad_samples,
    predicted_logprobs,
    selected_logprobs,
)
from flowrt.engines.folded_attention import folded_logits, folds


def response_logprobs(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], temperature: float
) -> tuple[torch.Tensor, Padded | Folded]:
    """Log-probabilities [T] of all response tokens, sample after sample, and the batch they came from.

    Gradients flow when they are enabled. With a model that takes folded samples (`use_folded`), a prompt that several
    samples have is computed once.
    """
    device = next(model.parameters()).device
    if folds(model):
        folded = fold_samples(prompts, responses).to(device)
        logits_UV = folded_logits(model, folded)
        return predicted_logprobs(logits_UV, folded.prediction_T, folded.target_T, temperature), folded
    # Right padding needs no mask: no real token can see what comes after it.
    padded = pad_samples([p.long() for p in prompts], [r.long() for r in responses], pad_id=0).to(device)
    # Logits are wanted at the positions that predict responses, but a rectangle of them is what models give.
    logits_BLV = model(input_ids=padded.tokens_BL, use_cache=False).logits
    return padded.response_T(selected_logprobs(logits_BLV, padded.tokens_BL, temperature)), padded


def cut_into_passes(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], budget_tokens: int
) -> list[list[int]]:
    """The samples of each forward pass of at most so many tokens, folded or padded, as the model takes them."""
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
