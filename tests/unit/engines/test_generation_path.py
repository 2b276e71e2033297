"""The way in which the torch rollout engine generates with a model, beyond its windows, and its refusals."""

import threading
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4TextConfig,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    Ministral3Config,
)

from flowrt.engines.base import Prompt, Response
from flowrt.engines.model_config import position_limit
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.generation_path import Way, right_way
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import enable_packing, score
from flowrt.errors import ConfigError

VOCABULARY = 48
NO_STOP = StopConditions((99,))


def gpt_neo(window: int) -> Any:
    """A model with a layer of local attention, whose window has another name than sliding_window."""
    config = GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        intermediate_size=64,
        window_size=window,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 2 / parameter.shape[1] ** 0.5)
    return model


@pytest.mark.parametrize("window", [8, 32, 256])
def test_local_attention_is_right_in_sequences_longer_than_its_window(window: int) -> None:
    model = gpt_neo(window)
    assert right_way(model) is Way.SEQUENCES
    dice = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, VOCABULARY, (length,), generator=dice, dtype=torch.int32) for length in (5, window + 40)
    ]
    engine = TorchRollout(right_way(model).of(model, 2), stop=NO_STOP, rows=2, max_new_tokens=4, temperature=1.0)
    engine.add([Prompt(key, tokens, key) for key, tokens in enumerate(prompts)])
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    scored = score(model, prompts, [done[key].tokens for key in range(2)], 1.0, budget_tokens=1)
    for key, logprobs in enumerate(scored):
        torch.testing.assert_close(done[key].logprobs, logprobs, atol=1e-4, rtol=0)


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
THRESHOLD = 32
"""Tokens from which these models scale their attention by the position; the checks of a model are shorter."""
SCALED: dict[str, tuple[Any, Way, bool]] = {
    "llama4, whose scale follows the length of the cache": (
        Llama4TextConfig(
            **SIZES,
            layer_types=["full_attention"] * 2,
            no_rope_layers=[1, 0],
            num_local_experts=2,
            intermediate_size_mlp=32,
            floor_scale=THRESHOLD,
            attn_scale=0.5,
        ),
        Way.SEQUENCES,
        False,
    ),
    "ministral3, whose scale follows the position": (
        Ministral3Config(
            **SIZES,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": THRESHOLD,
                "llama_4_scaling_beta": 0.5,
            },
        ),
        Way.ROWS,
        True,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_attention_that_is_scaled_by_the_position_is_right_beyond_the_lengths_of_a_check(name: str) -> None:
    config, way, is_packed = SCALED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    assert right_way(model) is way
    dice = torch.Generator().manual_seed(1)
    lengths = (5, THRESHOLD + 20, THRESHOLD - 4)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=dice, dtype=torch.int32) for length in lengths]
    engine = TorchRollout(way.of(model, 3), stop=NO_STOP, rows=3, max_new_tokens=12, temperature=1.0)
    engine.add([Prompt(key, tokens, key) for key, tokens in enumerate(prompts)])
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    responses = [done[key].tokens for key in range(3)]
    single = score(model, prompts, responses, 1.0, budget_tokens=1)
    assert enable_packing(model) is is_packed
    together = score(model, prompts, responses, 1.0, budget_tokens=1000)
    for key in range(3):
        torch.testing.assert_close(done[key].logprobs, single[key], atol=1e-4, rtol=0)
        torch.testing.assert_close(together[key], single[key], atol=1e-4, rtol=0)


def test_positions_end_where_a_model_is_not_causal_any_more() -> None:
    """Above keep_window_size, transformers' Doge chooses keys with the help of later tokens."""
    config = DogeConfig(**SIZES, keep_window_size=THRESHOLD, layer_types=["full_attention"] * 2)
    assert position_limit(config.to_dict()) == THRESHOLD
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # among them the scores of keys, which are equal at first
                parameter += 0.3 * torch.randn_like(parameter)
    right_way(model)
    tokens_1L = torch.randint(2, VOCABULARY, (1, THRESHOLD + 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        prefix, whole, above, longer = (
            model(input_ids=tokens_1L[:, :length], use_cache=False).logits[0]
            for length in (THRESHOLD // 2, THRESHOLD, THRESHOLD + 6, THRESHOLD + 30)
        )
    torch.testing.assert_close(whole[: len(prefix)], prefix, atol=1e-4, rtol=0)
    assert (longer[: len(above)] - above).abs().max() > 0.01


def test_a_model_whose_forward_pass_fails_is_refused_by_name() -> None:
    config = MiniCPM3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,  # the model needs as many as num_attention_heads
        intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    model = MiniCPM3ForCausalLM(config).eval()
    with pytest.raises(ConfigError, match=r"^model minicpm3 cannot generate on text alone: The size of tensor"):
        right_way(model)
