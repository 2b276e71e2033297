"""Sizes of models from config.json and the names of their weights, and what their layers keep for the backward pass."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MptConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flowrt.algorithms.packing import cut_packed, pack_samples
from flowrt.engines.descriptor import DTYPE_BYTES, MAX_EXPANSION, ModelShape, largest_pass
from flowrt.engines.hf import load_model
from flowrt.engines.options import Dtype
from flowrt.errors import ConfigError
from flowrt.launcher.doctor.model_shape import read_shape

TOKENS = 64
TOLERANCE = 0.1
LAYERS = 2
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=64),
    "gemma2": Gemma2Config(**COMMON, head_dim=64),
    "gemma3": Gemma3TextConfig(**COMMON, head_dim=64),
    "gpt2": GPT2Config(vocab_size=64, n_embd=128, n_layer=LAYERS, n_head=4, bos_token_id=1, eos_token_id=1),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, head_dim=64, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2),
}


def shape_of(config: Any, path: Path) -> tuple[Any, ModelShape]:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return model, read_shape(path)


def kept(model: Any, layers: int, tokens: int = TOKENS) -> int:
    """Bytes a token that the first ``layers`` decoder layers keep for a backward pass, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # an address is given again otherwise
        return tensor

    decoder = model.base_model
    blocks = decoder.h if hasattr(decoder, "h") else decoder.layers
    del blocks[layers:]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(storages.values()) // tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_activations_are_those_that_autograd_saves(name: str, dtype: Dtype, tmp_path: Path) -> None:
    model, shape = shape_of(CONFIGS[name], tmp_path)
    model.to(getattr(torch, dtype)).eval()  # as it is trained: without dropout
    two = kept(model, 2)
    layer = two - kept(model, 1)
    expected = shape.kept.elements(shape, dtype) * DTYPE_BYTES[dtype]
    scores = shape.kept.score_bytes * shape.heads * TOKENS
    assert expected + scores == pytest.approx(layer, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3"])
def test_scores_are_kept_where_attention_is_not_fused(name: str, tmp_path: Path) -> None:
    config = CONFIGS.get(name) or GptOssConfig(**COMMON, head_dim=64, num_local_experts=4, num_experts_per_tok=2)
    _, shape = shape_of(config, tmp_path)
    few, many = (kept(load_model(tmp_path), 1, tokens) for tokens in (TOKENS, 4 * TOKENS))
    assert shape.kept.score_bytes * shape.heads == pytest.approx((many - few) / (3 * TOKENS), abs=0.5)
    assert shape.shares_prompts == (shape.kept.score_bytes == 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_cache_and_the_weights(name: str, tmp_path: Path) -> None:
    model, shape = shape_of(CONFIGS[name], tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    cache = model(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=True).past_key_values
    elements = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.cache_token_elements == elements // TOKENS


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4),
        MptConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4),
    ],
    ids=["bloom", "mpt"],
)
def test_other_names_of_sizes_are_known(config: Any, tmp_path: Path) -> None:
    model, shape = shape_of(config, tmp_path)
    assert (shape.layers, shape.hidden_size, shape.kv_size) == (2, 64, 64)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_language_model_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    text = Gemma3TextConfig(**COMMON, head_dim=64)
    _, single = shape_of(text, tmp_path)
    table = Gemma3Config(text_config=text).to_dict()
    del table["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(table, default=str))
    nested = read_shape(tmp_path)
    assert (nested.layers, nested.kv_size, nested.parameters) == (single.layers, single.kv_size, single.parameters)
    assert nested.kept == single.kept


def test_layers_without_keys_and_values_have_no_cache(tmp_path: Path) -> None:
    shape_of(CONFIGS["llama"], tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    table["layer_types"] = ["linear_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_shape(tmp_path).cache_token_elements == 2 * 64


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", -32, "its hidden size is -32"),
        ("num_hidden_layers", -1, "its number of layers is -1"),
        ("head_dim", -8, "its size of the queries is -16"),
        ("num_key_value_heads", -1, "its size of the keys is -16"),
        ("intermediate_size", -3, "its intermediate size is -3"),
        ("vocab_size", 0, "its vocabulary is 0"),
        ("vocab_size", 10**400, "its vocabulary is too large"),
        ("max_position_embeddings", 0, "its number of positions is 0"),
        ("max_position_embeddings", -1, "its number of positions is -1"),
    ],
)
def test_an_impossible_size_is_one_sentence(field: str, value: int, message: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {field: value}))
    with pytest.raises(ConfigError, match=message):
        read_shape(tmp_path)


@pytest.mark.parametrize("value", [math.inf, math.nan, "wide", [32], None])
def test_a_size_that_is_no_number_is_one_sentence(value: object, tmp_path: Path) -> None:
    sizes = {"hidden_size": value, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ConfigError, match=r"has no config\.json of a causal LM"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "response", "groups", "budget"),
    [(2000, 32, 1, 8192), (16, 64, 16, 2048), (512, 4, 64, 8192), (10, 9000, 2, 8192), (1, 1, 1, 1)],
)
def test_the_largest_pass_is_that_of_packed_samples(prompt: int, response: int, groups: int, budget: int) -> None:
    members = 8
    prompts = [torch.full((prompt,), group) for group in range(groups) for _ in range(members)]
    responses = [torch.zeros(response, dtype=torch.int64)] * len(prompts)
    size = largest_pass(
        prompt=prompt, response=response, group=members, samples=len(prompts), budget=budget, is_shared=True
    )
    batches = [
        pack_samples([prompts[row] for row in rows], [responses[row] for row in rows])
        for rows in cut_packed(prompts, responses, budget, MAX_EXPANSION * budget)
    ]
    packed = max(len(batch.tokens_F) for batch in batches)
    attended = max(sum(tile.places for tile in batch.tiles) for batch in batches)
    predicted = max(len(batch.target_T) for batch in batches)
    sample = prompt + response  # passes end with whole samples, the estimate with a part of one
    assert abs(size.packed - packed) <= sample
    assert abs(size.attended - attended) <= 2 * sample
    assert abs(size.predicted - predicted) <= sample
