"""The rollout engine with other decoders than the built-in one: greedy answers equal those of transformers."""

import threading
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from flowrt.engines.base import Prompt, Response
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import score
from tests.decoders import COMMON, DECODERS

WINDOWED: dict[str, tuple[Any, Any]] = {
    "mistral": (MistralForCausalLM, MistralConfig(**COMMON, sliding_window=16)),
    "qwen2, one layer of two": (
        Qwen2ForCausalLM,
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    ),
    "gemma2, one layer of two": (
        Gemma2ForCausalLM,
        Gemma2Config(**COMMON, head_dim=8, sliding_window=16, attn_logit_softcapping=None, attn_implementation="eager"),
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_attend_only_within_their_sliding_window(name: str) -> None:
    model_class, config = WINDOWED[name]
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    prompts = [torch.randint(2, 40, (length,), dtype=torch.int32) for length in (3, 40, 12)]
    engine = TorchRollout(model, stop=StopConditions((99,)), rows=3, max_new_tokens=20, temperature=1.0)
    engine.add([Prompt(key, tokens, key) for key, tokens in enumerate(prompts)])
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    scored = score(model, prompts, [done[key].tokens for key in range(3)], 1.0, budget_tokens=100)
    for key, logprobs in enumerate(scored):
        torch.testing.assert_close(done[key].logprobs, logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_answers_and_log_probabilities_equal_those_of_transformers(name: str) -> None:
    model_class, config = DECODERS[name]
    torch.manual_seed(0)
    config._attn_implementation = "eager" if name == "gemma2" else "sdpa"
    model = model_class(config).float().eval()
    prompts = [torch.randint(2, 40, (length,), dtype=torch.int32) for length in (3, 9, 5, 70)]
    engine = TorchRollout(model, stop=StopConditions((1,)), rows=3, max_new_tokens=20, temperature=1.0)
    todo = [Prompt(key, tokens, key, greedy=True) for key, tokens in enumerate(prompts)]
    done: dict[int, Response] = {}
    while todo or engine.running:
        count = min(engine.room, len(todo))
        engine.add(todo[:count])
        todo = todo[count:]
        done |= {response.key: response for response in engine.run(threading.Event())}
    for key, tokens in enumerate(prompts):
        ids = tokens.long().unsqueeze(0)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert done[key].tokens.tolist() == expected[0, ids.shape[1] :].tolist()
    scored = score(model, prompts, [done[key].tokens for key in range(4)], 1.0, budget_tokens=100)
    for key, logprobs in enumerate(scored):
        torch.testing.assert_close(done[key].logprobs, logprobs, atol=2e-5, rtol=0)
