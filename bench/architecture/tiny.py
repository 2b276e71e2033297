"""Tiny models with random weights: every family of AutoModelForCausalLM, from its configuration class.

Fields of a configuration are shrunk by their names, in nested configurations too; `EXCEPTIONS` has the families whose
fields depend on each other in a way that the rules do not know.
"""

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
MIN_LAYERS = 2
MAX_LAYERS = 6
FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def _of(size: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


SMALL = (
    _of(32, "hidden_size d_model n_embd emb_dim attention_hidden_size embedding_size word_embed_proj_dim lru_width")
    | _of(32, "embedding_dim input_embedding_size output_embedding_size hidden_size_global")
    | _of(64, "intermediate_size ffn_dim ffn_hidden_size d_inner d_ff dim_ff dff intermediate_size_mlp decoder_ffn_dim")
    | _of(64, "encoder_ffn_dim shared_intermediate_size dense_intermediate_size n_inner feed_forward_size")
    | _of(16, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size")
    | _of(16, "moe_shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank o_lora_rank")
    | _of(16, "laurel_rank mamba_dt_rank time_step_rank hc_lowrank hidden_size_per_layer_input router_hidden_size")
    | _of(16, "mamba_d_state ssm_state_size state_size mamba_d_head attention_chunk_size")
    | _of(4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads num_query_groups")
    | _of(4, "encoder_attention_heads linear_num_value_heads linear_num_heads mamba_n_heads")
    | _of(16, "index_n_heads")  # fewer would often choose among keys of equal score, 0
    | _of(4, "swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads mamba_num_heads")
    | _of(2, "num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads n_groups n_group")
    | _of(2, "num_experts_per_tok num_experts_per_token moe_topk num_expert_group")
    | _of(8, "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim linear_key_head_dim rotary_dim d_kv")
    | _of(8, "linear_value_head_dim linear_head_dim d_head dim_head swa_head_dim attention_head_size kv_channels")
    | _of(8, "swa_v_head_dim mamba_head_dim num_experts n_routed_experts num_local_experts moe_num_experts")
    | _of(8, "index_topk")
    # Longer than the sequences of the check at the start, shorter than those that are compared.
    | _of(20, "sliding_window sliding_window_size attention_window_size window_size local_attention")
    | _of(8, "mamba_chunk_size chunk_size")
    | _of(VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size")
    | _of(1, "topk_group max_window_layers")
    | _of(0, "num_kv_shared_layers")
)
"""The largest value of a field, by its name."""
REQUIRED = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Fields that are None in the defaults of some configurations, with which no model can be built."""
LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_encoder_layers"
LAYERS += " num_decoder_layers depth"
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
DERIVED = "layer_types mlp_layer_types layers_block_type qk_head_dim indexer_types no_rope_layers moe_layers"
DERIVED += " full_attn_idxs num_attention_heads_per_layer layer_rope_theta activation_sparsity_pattern"
DERIVED += " transformers_version attention_layers"
"""Fields that a configuration computes from others; they are left to it."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 8,
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
        "hybrid_layer_ids": [1, 3],
    },
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": {"head_dim": 16, "per_layer_config": {2: {"num_attention_heads": 2, "num_key_value_heads": 2}}},
        "vision_config": {
            "pyramid_num_routed": [-1, 2],
            "num_hidden_layers": 2,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
}


def layers_that_show_all(config: Any) -> int:
    """Number of layers, from the first, that contain every type of layer of the configuration."""
    kinds = [vars(config).get(name) for name in ("layer_types", "mlp_layer_types", "layers_block_type")]
    need = MIN_LAYERS
    for of_layers in kinds:
        if isinstance(of_layers, list | tuple) and of_layers:
            need = max(need, max(list(of_layers).index(kind) for kind in set(of_layers)) + 1)
    return min(need, MAX_LAYERS)


def shrunk(kind: type[Any], family: str) -> Any:
    """A configuration of class ``kind`` with a tiny model."""
    return kind(**_fields(kind(), EXCEPTIONS.get(family, {})))


def _fields(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    depth = layers_that_show_all(config)
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and name in getattr(config, "sub_configs", {}):
            nested = {key: table for key, table in own.items() if isinstance(table, dict) and key == name}
            fields[name] = type(value)(**_fields(value, nested.get(name, {})))
        elif name in DERIVED.split() or name.startswith("_"):
            continue
        elif name in LAYERS.split() and isinstance(value, int):
            fields[name] = min(value, depth)
        elif name in TOKENS and isinstance(value, int):
            fields[name] = TOKENS.index(name)
        elif name == "eos_token_id" and isinstance(value, list):
            fields[name] = [2]
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = min(value, SMALL[name])
        elif name in REQUIRED and value is None:
            fields[name] = SMALL[name]
    given = vars(config)
    if "num_key_value_heads" in fields and given["num_key_value_heads"] == given.get("num_attention_heads"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return fields | {name: value for name, value in own.items() if name not in fields or not isinstance(value, dict)}


def default_error(family: str) -> str:
    """Why transformers cannot build the model of a family's default configuration; empty if it can."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
    except Exception as error:  # noqa: BLE001 (any error of a run's first check refuses the model)
        return f"transformers cannot build it: {' '.join(str(error).split())[:160]}"
    return ""


def build(family: str) -> Any:
    """A model of this family with random weights (float32), in evaluation mode."""
    config = shrunk(CONFIG_MAPPING[family], family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Larger weights than an untrained model has: a wrong position or a leak of padding must change logits.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan = math.prod(parameter.shape[1:])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2.0 / math.sqrt(fan)))
    return model.eval()
