"""One small model of each decoder architecture that users load in addition to the built-in Qwen3."""

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_GPT2 = GPT2Config(
    vocab_size=40,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=128,
    eos_token_id=1,
    bos_token_id=1,
    initializer_range=0.3,
)
DECODERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON)),
    "mistral": (MistralForCausalLM, MistralConfig(**COMMON, sliding_window=None)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**COMMON, head_dim=8, final_logit_softcapping=2.0, sliding_window=128),
    ),
    "gpt2": (GPT2LMHeadModel, _GPT2),
}
