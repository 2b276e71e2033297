"""Attention over folded samples, in any transformers decoder whose attention is a function that can be exchanged."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowrt.algorithms import Folded, Padded, fold_samples, pad_samples, predicted_logprobs, selected_logprobs

NAME = "flowrt_folded"
NO_MASK = (1, 1, 1, 1)
"""Shape of a mask that transformers hands on as it is, where it would make one of all tokens by all tokens."""
LAYERS = frozenset({"full_attention", "sliding_attention"})
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
NOISE, MOST_NOISE = 4.0, 0.5
"""Log-probabilities may differ between the two ways by so many nats; or by NOISE times what they differ between padded
samples together and each alone, if that is at most MOST_NOISE nats. A model that mixes samples is off by far more."""
NARROW = frozenset({torch.bfloat16, torch.float16})
"""On a CPU, attention over folded samples of these types is computed in float32 if gradients are wanted: PyTorch's own
backward pass of them takes several times as long."""
WIDEST = 1024
"""A sliding window is believed when a sample that is longer has shown it; of a wider one none is made."""


def folds(model: Any) -> bool:
    """Whether `folded_logprobs` can be asked of this model: `use_folded` was called and found it so."""
    config: Any = getattr(model, "config", None)
    return hasattr(config, "get_text_config") and bool(config.get_text_config()._attn_implementation == NAME)


def folded_logprobs(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], temperature: float = 1.0
) -> tuple[torch.Tensor, Folded]:
    """Log-probabilities [T] of all response tokens, sample after sample; each prompt is computed once."""
    folded = fold_samples(prompts, responses).to(next(model.parameters()).device)
    out = model(
        input_ids=folded.tokens_F.unsqueeze(0),
        position_ids=folded.positions_F.unsqueeze(0),
        attention_mask=torch.ones(NO_MASK, dtype=torch.bool, device=folded.tokens_F.device),
        use_cache=False,
        logits_to_keep=folded.predicts_U,
        folded=folded,
    )
    logits_UV = out.logits[0]
    return predicted_logprobs(logits_UV, folded.prediction_T, folded.target_T, temperature), folded


def padded_logprobs(
    model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], temperature: float = 1.0
) -> tuple[torch.Tensor, Padded]:
    """The same of padded samples. Right padding needs no mask: no real token can see what comes after it."""
    padded = pad_samples([p.long() for p in prompts], [r.long() for r in responses], pad_id=0)
    padded = padded.to(next(model.parameters()).device)
    # Logits are wanted at the positions that predict responses, but a rectangle of them is what models give.
    logits_BLV = model(input_ids=padded.tokens_BL, use_cache=False).logits
    return padded.response_T(selected_logprobs(logits_BLV, padded.tokens_BL, temperature)), padded


@torch.no_grad()
def use_folded(model: Any) -> bool:
    """Let a model take folded samples from here on, if it can; whether it can.

    It can when SDPA is its attention, in every layer, and log-probabilities of a few random samples are what they are
    for padded ones. All ranks of a sharded model call this together.
    """
    if folds(model):
        return True
    if not getattr(model, "_supports_attention_backend", False):
        return False
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or LAYERS)
    window = getattr(config, "sliding_window", None) or 0
    if config._attn_implementation != "sdpa" or not layers <= LAYERS or window > WIDEST:
        return False
    if not _agrees(model, config, window):
        return False
    config._attn_implementation = NAME
    return True


def _agrees(model: Any, config: Any, window: int) -> bool:
    dice = torch.Generator().manual_seed(0)
    prompt, other = (torch.randint(config.vocab_size, (length,), generator=dice) for length in (5, 3))
    prompts = [prompt, other, prompt, prompt]
    responses = [torch.randint(config.vocab_size, (length,), generator=dice) for length in (4, window + 7, 1, 6)]
    together = padded_logprobs(model, prompts, responses)[0]
    each = [padded_logprobs(model, [one], [response])[0] for one, response in zip(prompts, responses, strict=True)]
    noise = float((torch.cat(each) - together).abs().max())
    config._attn_implementation = NAME
    try:
        folded = folded_logprobs(model, prompts, responses)[0]
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, AssertionError):
        return False  # its layers want what folded samples have not
    finally:
        config._attn_implementation = "sdpa"
    computed_in = model(input_ids=prompt.unsqueeze(0).to(folded.device), use_cache=False).logits.dtype
    return folded.shape == together.shape and bool((folded - together).abs().max() <= allowed_nats(computed_in, noise))


def allowed_nats(dtype: torch.dtype, noise: float) -> float:
    """How far log-probabilities may be apart that are computed in two ways, when two plain ways differ by ``noise``."""
    return max(TOLERANCES.get(dtype, 0.0), min(NOISE * noise, MOST_NOISE))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    folded: Folded | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `sdpa_attention_forward`; with folded samples, over the sheets on which they are whole."""
    if folded is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    if attention_mask is None or attention_mask.shape != NO_MASK:
        raise ValueError("a layer has a mask of its own, which folded samples do not go through")
    spread = [folded.spread(one[0].transpose(0, 1).flatten(1)) for one in (query, key, value)]
    heads = [one.shape[1] for one in (query, key, value)]
    window = kwargs.get("sliding_window")
    wanted = any(one.requires_grad for one in (query, key, value))
    if wanted and query.device.type == "cpu" and query.dtype in NARROW:
        spread = [one.float() for one in spread]
    # Of one sheet nothing is cut: the gradient of a cut is as much memory again, to be filled with zeros.
    places = [sheet.places for sheet in folded.sheets]
    cut = [one.split(places) if len(places) > 1 else (one,) for one in spread]
    attended = []
    for sheet, *parts in zip(folded.sheets, *cut, strict=True):
        whole = [
            one.view(sheet.rows, sheet.length, count, -1).transpose(1, 2)
            for one, count in zip(parts, heads, strict=True)
        ]
        mask = _band(sheet.length, window, query.device) if window and window < sheet.length else None
        out, _ = sdpa_attention_forward(module, *whole, mask, **kwargs)
        attended.append(out.reshape(sheet.places, -1))
    attended_ND = torch.cat(attended) if len(attended) > 1 else attended[0]
    collected = folded.collect(attended_ND.to(query.dtype))
    return collected.view(1, len(collected), heads[0], -1), None


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Each token sees itself and what is less than ``window`` before it."""
    square = torch.ones(length, length, dtype=torch.bool, device=device)
    return (square.tril() & square.triu(1 - window))[None, None]


# Not compiled with the layer around it, which would be compiled again for each number of sheets.
AttentionInterface.register(NAME, torch.compiler.disable(_attend))
AttentionMaskInterface.register(NAME, sdpa_mask)
