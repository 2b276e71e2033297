"""A decode step as one compiled function, for transformers decoders with pluggable attention functions.

In eager PyTorch a small model's decode step spends most of its time outside of matrix products: in a thousand small
operations, and in an attention kernel built for many queries. The compiled step fuses the operations between two
products into one loop, and its attention reads each key and value once for all query heads that share it.

`compile_decode_step` compiles the step for a model and compares it with the eager one.

Shapes: R sequences, K key-value heads, G query heads per key-value head, L cache positions, D head width, V vocabulary,
S decode steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowrt.engines.torch.cached_model import GROWTH, CachedModel, Step
from flowrt.engines.torch.graphs import GraphedStep, cuda_capture
from flowrt.engines.training.forward import NO_MASK, allowed_nats
from flowrt.errors import EngineError, first_line

NAME = "flowrt_rows"


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Keys and values [R, K, capacity, D] of each layer, and the position of each sequence's new token."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    positions_R: torch.Tensor
    places: int  # L, an upper bound of all positions


def replace_attention(model: Any) -> None:
    """Make the model's attention accept `DecodeRows`. Raises EngineError if it cannot be replaced."""
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:
        return
    windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    if not getattr(model, "_supports_attention_backend", False) or config._attn_implementation != "sdpa":
        raise EngineError(unsupported(model, "its attention is not SDPA"))
    if windows or getattr(config, "sliding_window", None):
        raise EngineError(unsupported(model, "it has layers without full attention"))
    config._attn_implementation = NAME


def unsupported(model: Any, reason: str) -> str:
    """The error message for a model whose decode step cannot be compiled."""
    return f"a decode step of {type(model).__name__} cannot be compiled: {reason}; leave out --rollout.compile"


def decode_step(model: Any, tokens_R: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
    """Logits [R, V] after these tokens [R] int64, whose keys and values are written to the cache."""
    out = model(
        input_ids=tokens_R.unsqueeze(1),
        position_ids=rows.positions_R.unsqueeze(1),
        attention_mask=torch.ones(NO_MASK, dtype=torch.bool),  # a dummy that is passed on unchanged
        use_cache=False,
        decoding=rows,
    )
    logits_RV: torch.Tensor = out.logits[:, 0]
    return logits_RV


_OPTIONS: dict[str, Any] = {
    # Keep the order of the source: a write that is moved before reads of its target would go to a copy.
    "reorder_for_locality": False,
    # Call kernels from C++: Python takes a tenth of a small model's step.
    "cpp_wrapper": True,
    "size_asserts": False,
}
_compiled = torch.compile(decode_step, dynamic=True, fullgraph=True, options=_OPTIONS)


def step_compiled(cached: CachedModel, tokens_R: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] after these tokens of the cache's first rows, at the positions given to `begin_decode`."""
    model, cache = cached.model, cached.cache
    assert cache.positions_R is not None
    positions_R = cache.positions_R.clone()  # an inference tensor like the other inputs, to avoid a recompilation
    count = len(tokens_R)
    if count == 1 and cache.rows > 1:  # a single row would be recompiled: add a free one
        tokens_R, positions_R = tokens_R.repeat(2), positions_R * torch.tensor([1, 0])
    cache.reserve(cache.longest + 1)  # never the full capacity: without gaps between rows the step is recompiled
    rows = DecodeRows(*cache.slabs(len(tokens_R)), positions_R, cache.longest)
    logits_RV: torch.Tensor = _compiled(model, tokens_R, rows)
    return logits_RV[:count]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    decoding: DecodeRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `sdpa_attention_forward`; with ``decoding``, attention of one new token per row over its cached ones."""
    if decoding is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    if attention_mask is None or attention_mask.shape != NO_MASK:
        raise ValueError("a layer builds its own attention mask")
    keys, values = decoding.keys[module.layer_idx], decoding.values[module.layer_idx]
    positions_R, places = decoding.positions_R, decoding.places
    count, heads, _, width = keys.shape
    keys_RKLD, values_RKLD = keys[:, :, :places], values[:, :, :places]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = kwargs.get("scaling") or width**-0.5
    query_RKGD = query.view(count, heads, -1, width).to(dtype) * scale
    scores_RKGL = (query_RKGD.unsqueeze(3) * keys_RKLD.to(dtype).unsqueeze(2)).sum(-1)
    cached_RL = torch.arange(places, device=query.device) < positions_R.unsqueeze(1)
    scores_RKGL = torch.where(cached_RL[:, None, None], scores_RKGL, -torch.inf)
    own_RKG1 = (query_RKGD * key.to(dtype)).sum(-1, keepdim=True)
    highest_RKG1 = torch.maximum(scores_RKGL.amax(-1, keepdim=True), own_RKG1)
    shares_RKGL = (scores_RKGL - highest_RKG1).exp()
    own_share = (own_RKG1 - highest_RKG1).exp()
    sum_RKGD = (shares_RKGL.unsqueeze(4) * values_RKLD.to(dtype).unsqueeze(2)).sum(3) + own_share * value.to(dtype)
    attended = sum_RKGD / (shares_RKGL.sum(-1, keepdim=True) + own_share)
    # Written after the reads, so that no copy of the old contents is needed.
    rows_R = torch.arange(count, device=query.device)
    keys[rows_R, :, positions_R] = key[:, :, 0]
    values[rows_R, :, positions_R] = value[:, :, 0]
    return attended.to(query.dtype).view(count, 1, -1, width), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


STEPS = 3
UNSUPPORTED_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    RuntimeError,
    AttributeError,
    AssertionError,
    FailOnRecompileLimitHit,
)
"""Errors of a model, or of torch.compile, if the step is unsupported. The last is not a RuntimeError."""


@torch.inference_mode()
def compile_decode_step(model: Any, *, single_row: bool) -> Step:
    """Compile a decode step for this model, on a CPU in 10 s to a minute. Returns the step.

    On a GPU the step consists of CUDA graphs (`flowrt.engines.torch.graphs`). On a CPU one compilation serves all
    numbers of sequences (with ``single_row``, one) and of cache positions: it is traced with numbers that equal no
    other dimension of the model, because PyTorch treats equal dimensions as the same. The decoding thread must have as
    many intra-op threads as this one, otherwise the step is recompiled.

    Raises EngineError if the model is unsupported, or the result differs from the eager step.
    """
    device: torch.device = next(model.parameters()).device
    if device.type == "cpu":
        replace_attention(model)
    elif device.type != "cuda":
        raise EngineError(unsupported(model, f"there is no way to compile it for device {device.type}"))
    try:
        sequences, capacity = _trial(model, single_row=single_row)
        plain_SRV = _decode_all(model, sequences, capacity, None)
        compiled_SRV = _decode_all(model, sequences, capacity, _step(device))
    except UNSUPPORTED_ERRORS as error:
        raise EngineError(unsupported(model, first_line(error))) from error
    whole = [
        model(input_ids=sequence.unsqueeze(0).to(device), use_cache=False).logits[0, -STEPS:] for sequence in sequences
    ]
    noise = float((torch.stack(whole, 1).log_softmax(-1) - plain_SRV.log_softmax(-1)).abs().max())
    difference = float((compiled_SRV.log_softmax(-1) - plain_SRV.log_softmax(-1)).abs().max())
    allowed = allowed_nats(plain_SRV.dtype, noise)
    if not difference <= allowed:  # also if it is NaN
        raise EngineError(
            unsupported(model, f"log-probabilities differ by {difference:.2g} nats, more than {allowed:.2g}")
        )
    return _step(device)


def _step(device: torch.device) -> Step:
    """The step for a device: compiled, or CUDA graphs that are captured at their first use."""
    return step_compiled if device.type == "cpu" else GraphedStep(partial(cuda_capture, device))


def _trial(model: Any, *, single_row: bool) -> tuple[list[torch.Tensor], int]:
    """Random sequences and a cache capacity; the numbers of sequences and of positions equal no dimension of the model.

    With ``single_row`` there is one sequence.
    """
    sizes = _sizes(model)
    rows = 1 if single_row else next(number for number in count(3) if number not in sizes)
    places = next(number for number in count(GROWTH // 2) if sizes.isdisjoint(range(number - STEPS, number + 1)))
    capacity = next(number for number in count(GROWTH, GROWTH) if number not in sizes and number > places)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    return [torch.randint(vocabulary, (places - row,), generator=generator) for row in range(rows)], capacity


def _sizes(model: Any) -> set[int]:
    """The dimensions of keys and values, and the numbers of heads."""
    cached = CachedModel(model, 1)
    cached.fill([torch.zeros(2, dtype=torch.long)], [0])
    kept = {size for layer in cached.cache.layers for slab in (layer.keys, layer.values) for size in slab.shape[1::2]}
    heads = int(model.config.get_text_config().num_attention_heads)
    return kept | {heads} | {heads // size for size in kept}


def _decode_all(model: Any, sequences: list[torch.Tensor], capacity: int, step: Step | None) -> torch.Tensor:
    """Logits [S, R, V] after each of the last S tokens, which are decoded one by one after a prefill of the others."""
    cached = CachedModel(model, len(sequences), step)
    cached.cache.reserve(capacity)
    cached.fill([sequence[:-STEPS] for sequence in sequences], range(len(sequences)))
    lengths_R = torch.tensor([len(sequence) for sequence in sequences])
    tokens_SR = torch.stack([sequence[-STEPS:] for sequence in sequences], 1).to(cached.device)
    positions_SR = torch.stack([lengths_R - STEPS + number for number in range(STEPS)]).to(cached.device)
    longest = max(map(len, sequences)) - STEPS + 1
    return torch.stack(
        [cached.decode(tokens_SR[number], positions_SR[number], longest + number) for number in range(STEPS)]
    )
