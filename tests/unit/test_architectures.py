"""The rollout engine on other decoders than the embedded one: greedy answers are those of transformers."""

import threading

import pytest
import torch

from flowrt.engines.protocols import Prompt
from flowrt.engines.scoring import score
from flowrt.engines.torch_rollout import TorchRollout
from tests.decoders import DECODERS


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_answers_and_log_probabilities(name: str) -> None:
    kind, config = DECODERS[name]
    torch.manual_seed(0)
    config._attn_implementation = "eager" if name == "gemma2" else "sdpa"
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
