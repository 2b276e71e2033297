"""The way in which the torch rollout engine generates with a model, beyond its windows, and its refusals."""

import threading
from typing import Any

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, MiniCPM3Config, MiniCPM3ForCausalLM

from flowrt.engines.base import Prompt, Response
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.generation_path import Way, right_way
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import score
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
