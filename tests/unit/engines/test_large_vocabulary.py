"""Log-probabilities of rollout and trainer at a vocabulary of 262,144 tokens, against float64.

Sums of that many float32 numbers one after the other are off by up to 4e-4 of themselves.
"""

import threading
from typing import Any

import pytest
import torch

from flowrt.engines.base import Prompt, Response
from flowrt.engines.options import Truncation
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import response_logprobs
from flowrt.engines.training.fused_head import enable_fused_head

VOCABULARY = 262_144
TEMPERATURE = 0.7
NEW = 3
GREEDY = 2
"""The key of the prompt whose answer is greedy; its log-probabilities are those of the whole distribution."""
TOLERANCE_NATS = 8e-6
PROMPTS = [torch.arange(length, dtype=torch.int32) * 977 + 5 for length in (3, 9, 20)]


@pytest.fixture(scope="module", params=[0.5, 3.5])
def model(request: pytest.FixtureRequest) -> Any:
    """Its logits have about this standard deviation."""
    torch.set_num_threads(1)
    built = build_model(
        vocab_size=VOCABULARY, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64, seed=0
    ).eval()
    with torch.no_grad():
        head = built.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 16) * request.param / 4)
    assert enable_fused_head(built)
    return built


def generate(model: Any, truncation: Truncation | None) -> list[Response]:
    engine = TorchRollout(
        model,
        stop=StopConditions((VOCABULARY,)),
        rows=3,
        max_new_tokens=NEW,
        temperature=TEMPERATURE,
        truncation=truncation,
    )
    engine.add([Prompt(key, tokens, key, greedy=key == GREEDY) for key, tokens in enumerate(PROMPTS)])
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    return [done[key] for key in range(len(PROMPTS))]


@torch.no_grad()
def exact(model: Any, prompt: torch.Tensor, response: Response, *, over_support: bool) -> torch.Tensor:
    """Log-probabilities [T] in float64, of the whole distribution or over the recorded supports."""
    tokens = response.tokens.long()
    logits_LV: torch.Tensor = model(input_ids=torch.cat([prompt, tokens])[None].long()).logits[0]
    scaled_TV = logits_LV[len(prompt) - 1 : -1].double() / TEMPERATURE
    if not over_support or response.support is None:
        return scaled_TV.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    kept = response.support.tokens_E.long().split(response.support.counts_T.tolist())
    return torch.stack(
        [row[token] - row[those].logsumexp(-1) for row, token, those in zip(scaled_TV, tokens, kept, strict=True)]
    )


@pytest.mark.parametrize(
    "truncation", [None, Truncation(top_k=50), Truncation(top_p=0.95), Truncation(min_p=1e-4)], ids=str
)
def test_log_probabilities_are_those_of_float64(model: Any, truncation: Truncation | None) -> None:
    responses = generate(model, truncation)
    for key, response in enumerate(responses):
        expected_T = exact(model, PROMPTS[key], response, over_support=key != GREEDY)
        torch.testing.assert_close(response.logprobs.double(), expected_T, atol=TOLERANCE_NATS, rtol=0)
    supports = (
        None if truncation is None else [response.support for response in responses if response.support is not None]
    )
    with torch.no_grad():
        found_T, _ = response_logprobs(
            model, PROMPTS, [response.tokens for response in responses], TEMPERATURE, supports=supports
        )
    expected_T = torch.cat(
        [exact(model, prompt, response, over_support=True) for prompt, response in zip(PROMPTS, responses, strict=True)]
    )
    torch.testing.assert_close(found_T.double(), expected_T, atol=TOLERANCE_NATS, rtol=0)
