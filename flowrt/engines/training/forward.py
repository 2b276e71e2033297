"""Forward passes of the trainer and the reference: log-probabilities of given responses, and optimisations.

Packed samples share the prompts of their groups; attention over them works for transformers decoders with pluggable
attention functions, after a trial of the model at the start (`enable_packing`).
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowrt.algorithms import (
    PackedBatch,
    Padded,
    cut_by_tokens,
    cut_packed,
    logits_entropy,
    pack_samples,
    pad_samples,
    predicted_logprobs,
)
from flowrt.algorithms.support import Support, join_supports, support_logprobs
from flowrt.engines.descriptor import MAX_EXPANSION, MAX_PACKED_WINDOW, PACKED_LAYERS
from flowrt.engines.hf import head_on
from flowrt.engines.options import TrainOptions
from flowrt.engines.training.architecture import check_training, is_scaled_by_place
from flowrt.engines.training.fused_head import ResponseTokens, enable_fused_head, fused_pass, uses_fused_head

log = logging.getLogger("flowrt")

NAME = "flowrt_packed"
NO_MASK = (1, 1, 1, 1)
"""Shape of a dummy mask: transformers passes it on unchanged instead of building a mask of all tokens by all tokens."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
NOISE_FACTOR = 4.0
MAX_NOISE_NATS = 0.5
"""Allowed differences of log-probabilities, in nats: TOLERANCES by dtype, or NOISE_FACTOR times the difference between
samples padded together and one by one, at most MAX_NOISE_NATS. A model that mixes samples differs by far more."""
NARROW = frozenset({torch.bfloat16, torch.float16})
"""On a CPU, attention in these dtypes is computed in float32: PyTorch's native backward pass is several times slower.
Passes without gradients do the same, so that a reference with the trainer's weights finds the trainer's values."""
PROBE_PROMPTS = (5, 3)
"""Lengths (tokens) of the prompts in the check of `enable_packing`; the second is longer by a sliding window."""
PROBE_RESPONSES = (4, 7, 1, 6)
"""Lengths (tokens) of the responses, cut to the model's positions; short, as logits are computed for them."""


def is_packing_enabled(model: Any) -> bool:
    """Whether samples of this model are packed: `enable_packing` has succeeded."""
    config: Any = getattr(model, "config", None)
    return hasattr(config, "get_text_config") and bool(config.get_text_config()._attn_implementation == NAME)


def packed_predictions(
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    *,
    entropy: bool = False,
    supports: Sequence[Support] | None = None,
    native_attention: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, PackedBatch]:
    """Log-probability and, on request, entropy [T] (nats) of the prediction of each response token; and the batch.

    With ``supports``, one per response, log-probabilities are renormalised over them; entropies are not. With
    ``native_attention``, attention in half precision is not computed in float32.
    """
    packed = pack_samples(prompts, responses).to(next(model.parameters()).device)
    inputs = {
        "input_ids": packed.tokens_F.unsqueeze(0),
        "position_ids": packed.positions_F.unsqueeze(0),
        "attention_mask": torch.ones(NO_MASK, dtype=torch.bool, device=packed.tokens_F.device),
        "use_cache": False,
        "logits_to_keep": packed.predicts_U,
        "packed": packed,
    } | ({"native_attention": True} if native_attention else {})
    support = None if supports is None else join_supports(supports).to(packed.tokens_F.device)
    if uses_fused_head(model, len(packed.predicts_U)):
        tokens = packed.prediction_T, packed.target_T
        asked = ResponseTokens(None, *tokens, temperature, support=support, entropy=entropy)
        logprobs_T, entropy_T = fused_pass(model, asked, **inputs)
        return logprobs_T, entropy_T if entropy else None, packed
    logits_UV = model(**inputs).logits[0]
    logprobs_T = _logprobs(logits_UV, packed.prediction_T, packed.target_T, support, temperature)
    return logprobs_T, logits_entropy(logits_UV, temperature)[packed.prediction_T] if entropy else None, packed


def _logprobs(
    logits_UV: torch.Tensor,
    prediction_T: torch.Tensor,
    target_T: torch.Tensor,
    support: Support | None,
    temperature: float,
) -> torch.Tensor:
    if support is None:
        return predicted_logprobs(logits_UV, prediction_T, target_T, temperature)
    return support_logprobs(logits_UV, prediction_T, target_T, support, temperature)


def padded_predictions(
    model: Any,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    temperature: float,
    *,
    entropy: bool = False,
    supports: Sequence[Support] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Padded]:
    """As `packed_predictions`, with padded samples; the batch is on the CPU.

    Causal attention needs no mask for right padding.
    """
    padded = pad_samples([p.long() for p in prompts], [r.long() for r in responses], pad_id=0)
    device = next(model.parameters()).device
    # Models call their head at all B x L positions; only positions that predict response tokens are used. They are
    # found on the host, which would wait for a device.
    target_T = padded.tokens_BL[padded.response_mask_BL].to(device)
    prediction_T = torch.arange(len(target_T), device=device)
    predicts_T = (padded.response_mask_BL.flatten().nonzero().squeeze(-1) - 1).to(device)
    support = None if supports is None else join_supports(supports).to(target_T.device)
    inputs = {"input_ids": padded.tokens_BL.to(device), "use_cache": False}
    if uses_fused_head(model, len(target_T)):
        asked = ResponseTokens(predicts_T, prediction_T, target_T, temperature, support=support, entropy=entropy)
        logprobs_T, entropy_T = fused_pass(model, asked, **inputs)
        return logprobs_T, entropy_T if entropy else None, padded
    with head_on(model, lambda hidden_BLD: hidden_BLD.flatten(0, 1).index_select(0, predicts_T).unsqueeze(0)):
        logits_TV = model(**inputs).logits[0]
    logprobs_T = _logprobs(logits_TV, prediction_T, target_T, support, temperature)
    return logprobs_T, logits_entropy(logits_TV, temperature) if entropy else None, padded


@torch.no_grad()
def enable_packing(model: Any) -> bool:
    """Enable packed samples for this model, if the model supports them. Returns whether it does.

    The model must use SDPA in every layer and have more positions than the longest prompt of `PROBE_PROMPTS`, and
    log-probabilities of a few random samples must equal those of padded samples. Collective for a sharded model.
    """
    if is_packing_enabled(model):
        return True
    reason = _why_not_packed(model)
    if reason:
        log.info("samples of %s are padded, each with its own prompt: %s", type(model).__name__, reason)
        return False
    model.config.get_text_config()._attn_implementation = NAME
    return True


def _why_not_packed(model: Any) -> str:
    """Why samples of this model cannot be packed; empty if they can."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or PACKED_LAYERS)
    window = getattr(config, "sliding_window", None) or 0
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention functions cannot be replaced"
    if config._attn_implementation != "sdpa":
        return f"its attention is {config._attn_implementation}, not sdpa"
    if not layers <= PACKED_LAYERS:
        return f"it has layers of type {', '.join(sorted(layers - PACKED_LAYERS))}"
    if is_scaled_by_place(model):
        return "its attention is scaled by the place of a token in the call"
    if window > MAX_PACKED_WINDOW:
        return f"its sliding window of {window} tokens is above {MAX_PACKED_WINDOW}"
    if not _agrees(model, config, window):
        return "log-probabilities of packed samples differ from those of padded ones"
    return ""


def _agrees(model: Any, config: Any, window: int) -> bool:
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if positions <= PROBE_PROMPTS[0]:
        return False  # no room for a response after the prompt of the check
    generator = torch.Generator().manual_seed(0)
    prompt_lengths = PROBE_PROMPTS[0], min(PROBE_PROMPTS[1] + window, positions - 1)
    prompt, other = (torch.randint(config.vocab_size, (length,), generator=generator) for length in prompt_lengths)
    prompts = [prompt, other, prompt, prompt]
    lengths = [min(length, positions - len(prompt)) for prompt, length in zip(prompts, PROBE_RESPONSES, strict=True)]
    responses = [torch.randint(config.vocab_size, (length,), generator=generator) for length in lengths]
    together = response_logprobs(model, prompts, responses, 1.0)[0]
    each = [
        response_logprobs(model, [prompt], [response], 1.0)[0]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    noise = float((torch.cat(each) - together).abs().max())
    config._attn_implementation = NAME
    try:
        # In the model's own precision, like the padded samples of the comparison.
        packed, _, _ = packed_predictions(model, prompts, responses, 1.0, native_attention=True)
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, AssertionError):
        return False  # the layers need inputs that packed samples do not provide
    finally:
        config._attn_implementation = "sdpa"
    with head_on(model, lambda hidden_BLD: hidden_BLD[:, -1:]):
        computed_in = model(input_ids=prompt.unsqueeze(0).to(packed.device), use_cache=False).logits.dtype
    return packed.shape == together.shape and bool((packed - together).abs().max() <= allowed_nats(computed_in, noise))


def allowed_nats(dtype: torch.dtype, noise: float) -> float:
    """Allowed difference (nats) of an optimised computation of log-probabilities from a plain one.

    ``noise`` is the difference (nats) between two plain computations of them, ``dtype`` the dtype of the logits.
    """
    return max(TOLERANCES.get(dtype, 0.0), min(NOISE_FACTOR * noise, MAX_NOISE_NATS))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch | None = None,
    native_attention: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `sdpa_attention_forward`; with packed samples, on the tiles of their batch."""
    if packed is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    if attention_mask is None or attention_mask.shape != NO_MASK:
        raise ValueError("a layer builds its own attention mask, which packed samples do not support")
    scattered = [packed.scatter(states[0].transpose(0, 1).flatten(1)) for states in (query, key, value)]
    heads = [states.shape[1] for states in (query, key, value)]
    window = kwargs.get("sliding_window")
    if query.device.type == "cpu" and query.dtype in NARROW and not native_attention:
        scattered = [states.float() for states in scattered]
    # A single tile is not split: the backward pass of a split allocates a zero-filled copy.
    places = [tile.places for tile in packed.tiles]
    cut = [states.split(places) if len(places) > 1 else (states,) for states in scattered]
    attended = []
    for tile, *parts in zip(packed.tiles, *cut, strict=True):
        whole = [
            part.view(tile.rows, tile.length, count, -1).transpose(1, 2)
            for part, count in zip(parts, heads, strict=True)
        ]
        mask = _band(tile.length, window, query.device) if window and window < tile.length else None
        out, _ = sdpa_attention_forward(module, *whole, mask, **kwargs)
        attended.append(out.reshape(tile.places, -1))
    attended_ND = torch.cat(attended) if len(attended) > 1 else attended[0]
    gathered = packed.gather(attended_ND.to(query.dtype))
    return gathered.view(1, len(gathered), heads[0], -1), None


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Causal mask [1, 1, length, length] with a sliding window of ``window`` tokens."""
    square = torch.ones(length, length, dtype=torch.bool, device=device)
    return (square.tril() & square.triu(1 - window))[None, None]


# Excluded from compilation of the layer, which would be recompiled for each number of tiles.
AttentionInterface.register(NAME, torch.compiler.disable(_attend))
AttentionMaskInterface.register(NAME, sdpa_mask)


def apply_optimizations(model: Any, options: TrainOptions) -> Any:
    """Check the model, and apply the enabled optimisations. Returns the model. Collective for a sharded model.

    Raises ConfigError for a model that cannot be trained (`check_training`); with dropout it is not checked.
    """
    if not options.dropout:
        check_training(model)
    enable_fused_head(model)
    if options.share_prompts:
        enable_packing(model)
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
            large logits are never computed all at once.
        prompts: token ids [L] of each sample, int, on the CPU.
        responses: token ids [T] of each sample, int, on the CPU.
        temperature: divides the logits.
        entropy: whether entropies are returned.
        supports: one per response, over which log-probabilities are renormalised; None: over the whole vocabulary.

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
        return cut_packed(prompts, responses, budget_tokens, MAX_EXPANSION * budget_tokens)
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
    """Log-probabilities [T] of each response in nats, float32, on the device of the model.

    Computed in passes of at most ``budget_tokens`` tokens (1: one sample per pass).
    """
    scored: dict[int, torch.Tensor] = {}
    for rows in cut_into_passes(model, prompts, responses, budget_tokens):
        flat_T, _ = response_logprobs(
            model, [prompts[row] for row in rows], [responses[row] for row in rows], temperature
        )
        scored |= dict(zip(rows, flat_T.float().split([len(responses[row]) for row in rows]), strict=True))
    return [scored[row] for row in range(len(responses))]
