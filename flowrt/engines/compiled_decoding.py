"""A decode step as one compiled function, in any transformers decoder whose attention is a function to be exchanged.

Of a small model's decode step plain PyTorch spends most outside of matrix products: a thousand small operations, and
an attention that is made for many queries. Compiled, what lies between two products is one loop, and attention reads
each key and value once, for all heads that share it.

Shapes: R sequences, K heads of keys, G heads of queries for each of them, L places, D width of a head, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowrt.engines.folded_attention import NO_MASK
from flowrt.engines.row_cache import RowCache
from flowrt.errors import EngineError

NAME = "flowrt_rows"


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each layer has the keys and values [R, K, capacity, D] of what runs, and where this step's tokens stand."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    positions_R: torch.Tensor
    places: int  # L: all positions are below it


def exchange_attention(model: Any) -> None:
    """Let a model take `Rows`. Raises EngineError when its attention cannot be exchanged for ours."""
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:
        return
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    if not getattr(model, "_supports_attention_backend", False) or config._attn_implementation != "sdpa":
        raise EngineError(refusal(model, "its attention is not PyTorch's"))
    if windows or getattr(config, "sliding_window", None):
        raise EngineError(refusal(model, "it has layers without full attention"))
    config._attn_implementation = NAME


def refusal(model: Any, why: str) -> str:
    return f"a decode step of {type(model).__name__} cannot be compiled: {why}; leave out --rollout.compile"


def decode_step(model: Any, tokens_R: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Logits [R, V] after these tokens, whose keys and values are written where they stand."""
    out = model(
        input_ids=tokens_R.unsqueeze(1),
        position_ids=rows.positions_R.unsqueeze(1),
        attention_mask=torch.ones(NO_MASK, dtype=torch.bool),  # handed on as it is
        use_cache=False,
        decoding=rows,
    )
    logits_RV: torch.Tensor = out.logits[:, 0]
    return logits_RV


_OPTIONS: dict[str, Any] = {
    # In the order in which it is written: moved before the reads of what it overwrites, a write would be to a copy.
    "reorder_for_locality": False,
    # What calls the loops and products of a step is C++ as well: of a small model's step Python takes a tenth.
    "cpp_wrapper": True,
    "size_asserts": False,
}
_compiled = torch.compile(decode_step, dynamic=True, fullgraph=True, options=_OPTIONS)


def step_compiled(model: Any, cache: RowCache, tokens_R: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] after these tokens of the cache's first rows, at the positions that it was given."""
    assert cache.positions_R is not None
    positions_R = cache.positions_R.clone()  # as all else here, of inference mode: or it would be compiled again
    count = len(tokens_R)
    if count == 1 and cache.rows > 1:  # one row would be compiled anew: a free one goes along
        tokens_R, positions_R = tokens_R.repeat(2), positions_R * torch.tensor([1, 0])
    cache.reserve(cache.longest + 1)  # never all that there are: without gaps between rows it would be compiled again
    rows = Rows(*cache.slabs(len(tokens_R)), positions_R, cache.longest)
    logits_RV: torch.Tensor = _compiled(model, tokens_R, rows)
    return logits_RV[:count]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    decoding: Rows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `sdpa_attention_forward`; with rows, of one new token each over what stands before it."""
    if decoding is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    if attention_mask is None or attention_mask.shape != NO_MASK:
        raise ValueError("a layer has a mask of its own")
    keys, values = decoding.keys[module.layer_idx], decoding.values[module.layer_idx]
    positions_R, places = decoding.positions_R, decoding.places
    count, heads, _, width = keys.shape
    keys_RKLD, values_RKLD = keys[:, :, :places], values[:, :, :places]
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = kwargs.get("scaling") or width**-0.5
    query_RKGD = query.view(count, heads, -1, width).to(wide) * scale
    scores_RKGL = (query_RKGD.unsqueeze(3) * keys_RKLD.to(wide).unsqueeze(2)).sum(-1)
    before_RL = torch.arange(places, device=query.device) < positions_R.unsqueeze(1)
    scores_RKGL = torch.where(before_RL[:, None, None], scores_RKGL, -torch.inf)
    own_RKG1 = (query_RKGD * key.to(wide)).sum(-1, keepdim=True)
    highest_RKG1 = torch.maximum(scores_RKGL.amax(-1, keepdim=True), own_RKG1)
    shares_RKGL, own_share = (scores_RKGL - highest_RKG1).exp(), (own_RKG1 - highest_RKG1).exp()
    sum_RKGD = (shares_RKGL.unsqueeze(4) * values_RKLD.to(wide).unsqueeze(2)).sum(3) + own_share * value.to(wide)
    attended = sum_RKGD / (shares_RKGL.sum(-1, keepdim=True) + own_share)
    # Written after it was read: what is read is what stood there before, of which no copy has to be kept.
    rows_R = torch.arange(count, device=query.device)
    keys[rows_R, :, positions_R] = key[:, :, 0]
    values[rows_R, :, positions_R] = value[:, :, 0]
    return attended.to(query.dtype).view(count, 1, -1, width), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
