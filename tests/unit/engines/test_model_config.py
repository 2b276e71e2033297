"""config.json read without transformers: positions of scaled models, and overridden fields."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3Config, Qwen2Config, Qwen2ForCausalLM

from flowrt.engines.hf import load_model
from flowrt.engines.model_config import parse_overrides, position_limit, with_overrides, write_overridden
from flowrt.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
TABLES: dict[str, tuple[dict[str, Any], int | None]] = {
    "plain": ({"max_position_embeddings": 4096}, 4096),
    "GPT-2": ({"n_positions": 1024}, 1024),
    "alibi": ({"n_head": 16}, None),
    "multimodal": ({"text_config": {"max_position_embeddings": 131072}, "vision_config": {}}, 131072),
    "Qwen 2.5 with YaRN": (
        {
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        131072,
    ),
    "Qwen 3 with YaRN": (
        {
            "max_position_embeddings": 40960,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        131072,
    ),
    "DeepSeek V3": (
        {
            "max_position_embeddings": 163840,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        },
        163840,
    ),
    "Llama 3.1": (
        {
            "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        },
        131072,
    ),
    "Phi 3 128k": (
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
        },
        4096,  # above, one long sequence would change the others of its batch
    ),
    "dynamic": ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096),
    "Vicuna 16k": ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    "YaRN without a factor": ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": None}}, 64),
    "Gemma 3": (Gemma3Config().to_dict(), 131072),
    "a factor that is no number": (
        {"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": math.inf}},
        64,
    ),
    "damaged": ({"max_position_embeddings": 64, "rope_scaling": "yarn"}, 64),
}


@pytest.mark.parametrize(("table", "positions"), TABLES.values(), ids=TABLES)
def test_positions_are_those_after_scaling(table: dict[str, Any], positions: int | None) -> None:
    assert position_limit(table) == positions


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "3",
        '{"model_type": "llama"}',
        '{"auto_map": {}}',
        "[" * 100_000,
        '{"a": NaN}',
        '{"text_config": {"model_type": "x"}}',
        '{"tie_word_embeddings": true}',
        '{"text_config": {"num_hidden_layers": 1}}',
    ],
)
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="model_overrides"):
        parse_overrides(text)


def test_overrides_are_merged_field_by_field() -> None:
    table = {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    merged = with_overrides(table, {"rope_scaling": YARN})
    assert merged["rope_parameters"] == {"rope_theta": 1e6, **YARN}, "theta is lost, or the old name is ignored"
    assert "rope_scaling" not in merged
    assert with_overrides(merged, {"rope_scaling": YARN}) == merged
    assert with_overrides(table, {"rope_theta": 5.0})["rope_parameters"]["rope_theta"] == 5.0
    assert with_overrides(table, {"max_position_embeddings": 99})["max_position_embeddings"] == 99
    assert table["max_position_embeddings"] == 32


def test_overrides_of_a_multimodal_model_are_of_its_language_model() -> None:
    table = {"model_type": "x", "image_token_id": 1, "text_config": {"max_position_embeddings": 8, "a": 1}}
    merged = with_overrides(table, {"max_position_embeddings": 16, "image_token_id": 2})
    assert merged == {**table, "image_token_id": 2, "text_config": {"max_position_embeddings": 16, "a": 1}}


def test_the_table_of_the_language_model_may_be_named() -> None:
    text: dict[str, Any] = {"max_position_embeddings": 8, "rope_parameters": {"rope_theta": 1e6}}
    table = {"model_type": "x", "text_config": text}
    nested = {"text_config": {"rope_scaling": YARN}}
    assert with_overrides(table, nested) == with_overrides(table, {"rope_scaling": YARN})
    assert with_overrides(table, nested)["text_config"]["rope_parameters"] == {"rope_theta": 1e6, **YARN}
    text_only = with_overrides(text, nested)
    assert text_only == with_overrides(table, nested)["text_config"], "the configuration of the language model alone"
    assert position_limit(text_only) == position_limit(with_overrides(table, nested))


def test_another_type_of_scaling_replaces_the_settings_of_the_first() -> None:
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8}
    table = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e6, **llama}}
    linear = {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    for key in ("rope_type", "type"):  # "type" is the name in transformers 4
        merged = with_overrides(table, {"rope_scaling": {key: "linear", "factor": 2.0}})
        assert merged["rope_parameters"] == linear
        assert position_limit(merged) == 128
    assert with_overrides(table, {"rope_scaling": {"factor": 4.0}})["rope_parameters"] == (
        {"rope_theta": 1e6} | llama | {"factor": 4.0}
    )
    none = with_overrides(table, {"rope_scaling": None})
    assert none["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}


def test_positions_by_type_of_layer_are_overridden_by_type_of_layer() -> None:
    of_layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    table = {"max_position_embeddings": 64, "rope_parameters": of_layers}
    merged = with_overrides(table, {"rope_scaling": {"full_attention": YARN}})
    assert merged["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, **YARN},
        "sliding_attention": {"rope_theta": 1e4},
    }
    for flat in (YARN, None):
        with pytest.raises(ConfigError, match="by type of layer; give a table for full_attention or sliding_attention"):
            with_overrides(table, {"rope_scaling": flat})


def test_an_overridden_checkpoint_loads_with_the_fields_and_the_same_weights(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    source, view = tmp_path / "source", tmp_path / "run" / "model"
    Qwen2ForCausalLM(config).save_pretrained(source)
    before = (source / "config.json").read_bytes()
    for _ in range(2):  # a resumed run makes it again
        write_overridden(source, view, {"rope_scaling": YARN})
    assert (source / "config.json").read_bytes() == before
    assert json.loads((view / "config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"
    assert AutoConfig.from_pretrained(view).rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        plain, scaled = (load_model(path)(tokens).logits for path in (source, view))
        expected = Qwen2ForCausalLM.from_pretrained(
            source, rope_parameters={**config.rope_parameters, **YARN}, dtype=torch.float32
        )(tokens).logits
    assert not torch.allclose(plain, scaled, atol=1e-3), "the override has no effect"
    assert torch.allclose(expected, scaled, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"sliding_window": -4}', "sliding_window -4"),
        ('{"sliding_window": 0}', "sliding_window 0"),
        ('{"rope_theta": 0}', "rope_theta 0"),
        ('{"rope_theta": 1e999}', "rope_theta inf"),
        ('{"attention_dropout": 2}', "attention_dropout 2"),
        ('{"eos_token_id": -5}', "eos_token_id -5"),
        ('{"eos_token_id": [1, -5]}', "eos_token_id -5"),
        ('{"moe_intermediate_size": -8}', "moe_intermediate_size -8"),
        ('{"text_config": {"max_position_embeddings": 0}}', "text_config.max_position_embeddings 0"),
        ('{"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}', "rope_scaling.factor -1.0"),
        ('{"logits_scale": -2}', "logits_scale -2"),
    ],
)
def test_numbers_that_no_model_can_have_are_refused(text: str, field: str) -> None:
    own = {"max_position_embeddings": 64, "sliding_window": 16, "logits_scale": 1.0, "model_type": "qwen3"}
    for table in (own, {"text_config": own}):
        with pytest.raises(ConfigError, match=re.escape(f"model_overrides has {field}; use a ")):
            with_overrides(table, parse_overrides(text))


def test_a_number_may_be_negative_where_that_of_the_model_is() -> None:
    table = {"lower_bound": -5.0, "pad_token_id": -1}
    assert with_overrides(table, {"lower_bound": -4.0, "pad_token_id": -1}) == {"lower_bound": -4.0, "pad_token_id": -1}
