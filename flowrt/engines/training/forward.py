"""Forward passes of the trainer and the reference: log-probabilities of given responses, and optimisations."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrt.algorithms import PackedBatch, Padded, cut_by_tokens, cut_packed
from flowrt.algorithms.support import Support
from flowrt.engines.options import TrainOptions
from flowrt.engines.training.fused_head import enable_fused_head
from flowrt.engines.training.shared_prefix import (
    enable_packing,
    is_packing_enabled,
    packed_predictions,
    padded_predictions,
)


def apply_optimizations(model: Any, options: TrainOptions) -> Any:
    """Apply the enabled optimisations. Returns the model. Collective for a sharded model."""
    if options.share_prompts:
        enable_packing(model)
    enable_fused_head(model)
    if options.compile:
        for layer in decoder_layers(model):
            for module in layer.modules():
                # Otherwise integer attributes of an FSDP2 module, such as the head width, are compiled as dynamic. Its
                # parameters are gathered when it runs, and FSDP2 itself does not read this flag.
                module._is_fsdp_managed_module = False
            layer.compile(dynamic=True)
    return model


def decoder_layers(model: Any) -> list[Any]:
    """Modules that transformers marks as not to be split over devices: usually the decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 replaces the class of sharded modules by FSDP<class>.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def response_logprobs(
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    *,
    supports: Sequence[Support] | None = None,
) -> tuple[torch.Tensor, Padded | PackedBatch]:
    """Log-probabilities of all response tokens, differentiable if gradients are enabled.

    As `response_predictions`, without entropies.
    """
    logprobs_T, _, samples = response_predictions(model, prompts, responses, temperature, supports=supports)
    return logprobs_T, samples


def response_predictions(
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    *,
    entropy: bool = False,
    supports: Sequence[Support] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Padded | PackedBatch]:
    """The predictions of all response tokens, differentiable if gradients are enabled.

    Args:
        model: a causal LM; after `enable_packing`, each distinct prompt is computed once; after `enable_fused_head`,
            large logits are never whole.
        prompts: [L] int each.
        responses: [T] int each.
        temperature: divides the logits.
        entropy: whether entropies are returned.
        supports: of each response, over which log-probabilities are renormalised; None: over the whole vocabulary.

    Returns:
        [T] log-probabilities in nats, sample after sample; [T] entropy in nats of the distribution that each token was
        predicted with, None unless requested; and the batch they were computed from.
    """
    predictions = packed_predictions if is_packing_enabled(model) else padded_predictions
    return predictions(model, prompts, responses, temperature, entropy=entropy, supports=supports)


def cut_into_passes(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], budget_tokens: int
) -> list[list[int]]:
    """Indices of the samples of each forward pass of at most ``budget_tokens`` tokens (packed or padded, by model)."""
    if not prompts:
        return []
    if is_packing_enabled(model):
        return cut_packed(prompts, responses, budget_tokens)
    # Sorted by length, since each pass pads to its longest sample.
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
    """Log-probabilities [T] float32 of each response, in passes of ``budget_tokens`` tokens (1: one sample each)."""
    scored: dict[int, torch.Tensor] = {}
    for rows in cut_into_passes(model, prompts, responses, budget_tokens):
        flat_T, _ = response_logprobs(
            model, [prompts[row] for row in rows], [responses[row] for row in rows], temperature
        )
        scored |= dict(zip(rows, flat_T.float().split([len(responses[row]) for row in rows]), strict=True))
    return [scored[row] for row in range(len(responses))]
