"""The shape of a model: of the embedded one from its configuration, of a checkpoint from config.json and its weights.

Names of sizes differ between architectures. What a layer keeps for the backward pass follows from the names of its
weights: norms of queries and keys, norms after attention, a gate.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrt.engines.descriptor import FLOAT_BYTES, MAX_PACKED_WINDOW, PACKED_LAYERS, KeptActivations, ModelShape
from flowrt.engines.model_config import parse_overrides, position_limit, read_config, text_table, with_overrides
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.model_files import base_model_dir, tensor_shapes, weight_files

HEAD_DIM = 32
"""Size of an attention head of the embedded model."""
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
"""Names of sizes, by architecture."""
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
MAX_SIZE = 2**31
"""No size of a model is larger."""
OTHER_PARTS = re.compile(r"(^|\.)(vision\w*|visual|image\w*|audio\w*|multi_modal_projector)\.")
"""Names of weights of a multimodal model that its language model does not have."""
FIRST_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.0\.(.*)")
SLOW_ACTIVATIONS = ("gelu_new", "gelu_fast")
"""Activation functions of several operations, each of which keeps its input."""


def built_shape(config: RunConfig) -> ModelShape:
    """The shape of the embedded model, as built by `flowrt.engines.tiny_model.build_model`."""
    build = config.build
    hidden, heads = build.hidden_size, build.heads
    kv_heads = max(heads // 2, 1)
    attention = hidden * HEAD_DIM * (2 * heads + 2 * kv_heads) + 2 * HEAD_DIM
    layer = attention + 3 * hidden * build.intermediate_size + 2 * hidden
    return ModelShape(
        parameters=build.vocab_size * hidden + build.layers * layer + hidden,
        layers=build.layers,
        hidden_size=hidden,
        query_size=heads * HEAD_DIM,
        heads=heads,
        kv_size=kv_heads * HEAD_DIM,
        vocab_size=build.vocab_size,
        max_length=build.max_length,
        intermediate_size=build.intermediate_size,
        cache_layers=build.layers,
        kept=KeptActivations(attention=4, narrow_attention=1),
    )


def read_shape(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of a checkpoint. Raises ConfigError if its config.json is not that of a causal LM."""
    try:
        whole = with_overrides(read_config(path), overrides or {})
        table = text_table(whole)
        of_text = table is not whole
        sizes = {
            name: math.prod(shape)
            for file in weight_files(path)
            for name, shape in tensor_shapes(file).items()
            if not (of_text and OTHER_PARTS.search(name))
        }
        hidden, layers, heads = (_size(table, names) for names in (HIDDEN, LAYERS, HEADS))
        query, kv = _attention(table, hidden, heads)
        vocabulary, intermediate, positions = (
            int(table["vocab_size"]),
            _intermediate(table, hidden),
            position_limit(whole),
        )
        _check_sizes(
            {
                "hidden size": hidden,
                "number of layers": layers,
                "size of the queries": query,
                "size of the keys": kv,
                "intermediate size": intermediate,
                "vocabulary": vocabulary,
                "number of positions": None if positions is None else min(positions, MAX_SIZE),
            }
        )
        kinds = table.get("layer_types") or []
        return ModelShape(
            parameters=sum(sizes.values()),
            layers=layers,
            hidden_size=hidden,
            query_size=query,
            heads=heads,
            kv_size=kv,
            vocab_size=vocabulary,
            max_length=positions or 0,
            intermediate_size=intermediate,
            cache_layers=sum(kind in ATTENTION_LAYERS for kind in kinds),
            shares_prompts=_shares_prompts(table),
            kept=_kept(table, sizes),
        )
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{path} has no config.json of a causal LM: {type(error).__name__} {error}") from None


def shape_of(config: RunConfig) -> ModelShape:
    """The shape of the model that the run starts from: the user's, or the embedded one."""
    if not config.model:
        return built_shape(config)
    return read_shape(base_model_dir(Path(config.model)), parse_overrides(config.model_overrides))


def _size(table: Mapping[str, Any], names: Iterable[str]) -> int:
    """The first of these fields. Raises KeyError without any."""
    for name in names:
        if table.get(name):
            return int(table[name])
    raise KeyError(" or ".join(names))


def _check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raise ValueError for a size, by its name, that is not above 0, or above `MAX_SIZE`; None is unknown."""
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= MAX_SIZE:
            raise ValueError(f"its {name} is {size if size < 1 else 'too large'}")


def _attention(table: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Elements of the queries, and of the keys (or values), of one token in one layer."""
    if table.get("kv_lora_rank"):  # latent attention: the cache of transformers has keys and values of all heads
        key = int(table["qk_nope_head_dim"]) + int(table["qk_rope_head_dim"])
        return heads * key, heads * (key + int(table["v_head_dim"])) // 2
    head_dim = int(table.get("head_dim") or hidden // heads)
    kv_heads = next((int(table[name]) for name in KV_HEADS if table.get(name)), heads)
    if isinstance(attention := table.get("attn_config"), dict):  # MPT
        kv_heads = int(attention.get("kv_n_heads") or kv_heads)
    if table.get("multi_query") and not table.get("new_decoder_architecture"):
        kv_heads = 1
    return heads * head_dim, kv_heads * head_dim


def _intermediate(table: Mapping[str, Any], hidden: int) -> int:
    """Elements that the feed-forward part computes of one token."""
    experts = table.get("num_experts_per_tok") or table.get("num_experts_per_token")
    if experts:
        routed = int(experts) * int(table.get("moe_intermediate_size") or _size(table, WIDE))
        shared = int(table.get("shared_expert_intermediate_size") or 0)
        shared += int(table.get("n_shared_experts") or 0) * int(table.get("moe_intermediate_size") or 0)
        return routed + shared + int(experts) * hidden // 2  # inputs and outputs of each expert, too
    wide = next((int(table[name]) for name in WIDE if table.get(name)), 0)
    return wide or int(table.get("expansion_ratio") or 4) * hidden


def _kept(table: Mapping[str, Any], sizes: Iterable[str]) -> KeptActivations:
    """What a layer keeps for the backward pass, from the names of the weights of the first layer."""
    names = [match.group(1) for name in sizes if (match := FIRST_LAYER.search(name))]
    norms = {name for name in names if re.search(r"(norm\w*|ln_?\w*)\.weight$", name)}
    of_heads = {name for name in norms if re.search(r"(q|k|query|key)_?(layer)?norm", name)}
    norms -= of_heads
    has_bias = any(name.removesuffix("weight") + "bias" in names for name in norms)  # torch's LayerNorm
    has_gate = any(re.search(r"gate|w1\.|w3\.|up_proj", name) for name in names)
    is_gemma = "gemma" in str(table.get("model_type"))
    before, after = min(len(norms), 2) or 2, max(len(norms) - 2, 0)
    activation = str(table.get("hidden_act") or table.get("hidden_activation") or table.get("activation_function"))
    return KeptActivations(
        norms=2 * before if has_bias else 3 * before + 2 * after,
        attention=4 if of_heads else 2,
        feed_forward=4 if has_gate else 5 if activation in SLOW_ACTIVATIONS else 2,
        narrow_norms=6 if is_gemma else 0 if has_bias else before,
        narrow_attention=(3 if is_gemma else 1) if of_heads else 0,
        score_bytes=_score_bytes(table),
    )


def _score_bytes(table: Mapping[str, Any]) -> int:
    """Bytes that are kept of each attention score: capped ones are not fused, nor are those of gpt-oss, with sinks."""
    if table.get("attn_logit_softcapping"):
        return 2 * FLOAT_BYTES
    return FLOAT_BYTES if table.get("model_type") == "gpt_oss" else 0


def _shares_prompts(table: Mapping[str, Any]) -> bool:
    window = table.get("sliding_window") or 0
    return (
        set(table.get("layer_types") or ()) <= PACKED_LAYERS and window <= MAX_PACKED_WINDOW and not _score_bytes(table)
    )
