"""The rollout engine on other decoders than the embedded one: greedy answers are those of transformers."""

import threading
from typing import Any

import pytest
import torch
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

from flowrt.engines.protocols import Prompt
from flowrt.engines.scoring import score
from flowrt.engines.torch_rollout import TorchRollout

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
GPT2 = GPT2Config(
    vocab_size=40,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=128,
    eos_token_id=1,
    bos_token_id=1,
    initializer_range=0.3,
)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**COMMON)),
        (Qwen2ForCausalLM, Qwen2Config(**COMMON)),
        (MistralForCausalLM, MistralConfig(**COMMON, sliding_window=None)),
        (Gemma2ForCausalLM, Gemma2Config(**COMMON, head_dim=8, final_logit_softcapping=2.0, sliding_window=128)),
        (GPT2LMHeadModel, GPT2),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_greedy_answers_and_log_probabilities(kind: Any, config: Any) -> None:
    torch.manual_seed(0)
    config._attn_implementation = "eager" if kind is Gemma2ForCausalLM else "sdpa"
    model = kind(config).float().eval()
    prompts = [torch.randint(2, 40, (length,), dtype=torch.int32) for length in (3, 9, 5, 70)]
    engine = TorchRollout(model, eos_id=1, rows=3, max_new_tokens=20, temperature=1.0)
    todo = [Prompt(key, tokens, key, greedy=True) for key, tokens in enumerate(prompts)]
    done = {}
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
