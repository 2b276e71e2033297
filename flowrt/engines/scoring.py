"""Log-probabilities of given responses: the trainer's and the reference's forward pass."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrt.algorithms import Padded, cut_by_tokens, pad_samples, selected_logprobs


def response_logprobs(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], temperature: float
) -> tuple[torch.Tensor, Padded]:
    """Log-probabilities [T] of all response tokens, sample after sample, and the padded batch they came from.

    Gradients flow when they are enabled. Right padding needs no mask: no real token can see what comes after it.
    """
    padded = pad_samples([p.long() for p in prompts], [r.long() for r in responses], pad_id=0)
    padded = padded.to(next(model.parameters()).device)
    # Logits are wanted at the positions that predict responses, but a rectangle of them is what models give.
    logits_BLV = model(input_ids=padded.tokens_BL, use_cache=False).logits
    return padded.response_T(selected_logprobs(logits_BLV, padded.tokens_BL, temperature)), padded


@torch.inference_mode()
def score(
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    budget_tokens: int,
) -> list[torch.Tensor]:
    """Log-probabilities of each response, at most ``budget_tokens`` padded tokens at a time (1: each sample alone)."""
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    scored: list[torch.Tensor] = []
    for rows in cut_by_tokens(lengths, budget_tokens):
        flat_T, _ = response_logprobs(
            model, [prompts[row] for row in rows], [responses[row] for row in rows], temperature
        )
        scored += flat_T.float().split([len(responses[row]) for row in rows])
    return scored
