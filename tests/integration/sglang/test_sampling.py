"""A real SGLang server on a CPU: what is sampled, and where it ends, is what the run says.

The checkpoint and the server prefer other sampling parameters. The tokenizer makes one token of a string that the model
generates in three.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from flowrt.engines.base import Prompt
from flowrt.engines.hf import load_tokenizer, save_model
from flowrt.engines.options import SamplingOptions, Truncation
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.stopping import StopConditions
from flowrt.engines.training.forward import score

from .conftest import (
    LONG,
    POSITIONS,
    REAL_SERVER,
    ROWS,
    TEMPERATURE,
    VOCABULARY,
    build,
    drain,
    prompts,
)

pytestmark = REAL_SERVER
CLOSE = 1e-5
MODEL = build(0)
STOP_TOKENS = (1, 2, 5)
"""Those of the tokenizer (and config.json), of the chat template, and of generation_config.json."""
FIRST, MERGED = 3, VOCABULARY - 2
"""Tokens from FIRST to MERGED are single characters, the last two are merged ones."""
TOP_K = 20
PREFERENCES = {"temperature": 0.6, "top_k": TOP_K, "top_p": 0.8, "repetition_penalty": 1.3}
SGLANG_MAX_NEW_TOKENS = 128
SERVER_PREFERENCES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "ignore_eos": True}


def greedy(prompt: Prompt, count: int) -> list[int]:
    """The likeliest tokens after a prompt, by transformers."""
    ids = prompt.tokens.long().unsqueeze(0)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, MODEL(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -count:].tolist()


def three_characters(tokens: list[int]) -> int:
    """A place where a response has three tokens of one character each."""
    return next(at for at in range(4, len(tokens) - 2) if all(FIRST <= token < MERGED for token in tokens[at : at + 3]))


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """A prompt whose greedy response has no stop token early."""
    return next(
        candidate
        for candidate in prompts(greedy=True)
        if set(STOP_TOKENS).isdisjoint(tokens := greedy(candidate, 24)) and three_characters(tokens) < 20
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, prompt: Prompt) -> Path:
    path = tmp_path_factory.mktemp("sampling") / "model"
    tokens = greedy(prompt, 24)
    at = three_characters(tokens)
    names = ["<pad>", "<eos>", "<turn>", *[chr(0x4E00 + token) for token in range(FIRST, MERGED)]]
    first, second, third = [names[token] for token in tokens[at : at + 3]]
    vocabulary = {name: index for index, name in enumerate([*names, first + second, first + second + third])}
    model = Tokenizer(BPE(vocabulary, [(first, second), (first + second, third)]))
    model.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<turn>"]
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"
    save_model(build(0), tokenizer, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "do_sample": True, **PREFERENCES}))
    return path


@pytest.fixture(scope="module")
def server_arguments() -> str:
    return f"--max-total-tokens 8192 --preferred-sampling-params '{json.dumps(PREFERENCES | SERVER_PREFERENCES)}'"


def model_logprobs(prompt: Prompt, tokens: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Log-probabilities of all tokens at the positions of a response, [T, V], by transformers."""
    ids = torch.cat([prompt.tokens, tokens]).long().unsqueeze(0)
    with torch.inference_mode():
        logits: torch.Tensor = MODEL(ids).logits[0, len(prompt.tokens) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def test_sampling_is_neither_that_of_the_checkpoint_nor_that_of_the_server(owned: ServerRollout) -> None:
    sent = prompts()
    owned.add(sent)
    responses = drain(owned)
    outside = 0
    for response in responses:
        ours = score(MODEL, [sent[response.key].tokens], [response.tokens], TEMPERATURE, 4096)[0]
        torch.testing.assert_close(response.logprobs, ours, atol=CLOSE, rtol=0)
        likeliest = model_logprobs(sent[response.key], response.tokens).topk(TOP_K).indices
        outside += int((likeliest != response.tokens.long()[:, None]).all(-1).sum())
        assert response.truncated == (int(response.tokens[-1]) not in STOP_TOKENS)
        assert set(STOP_TOKENS).isdisjoint(response.tokens[:-1].tolist())
    assert outside > ROWS  # with the preferred top_k there would be none
    assert not all(response.truncated for response in responses)  # as ignore_eos would have it


async def test_the_server_has_preferences_that_change_what_is_sampled(owned: ServerRollout, prompt: Prompt) -> None:
    """Otherwise the test above would show nothing."""
    call = Call("/generate", {"input_ids": prompt.tokens.tolist(), "return_logprob": True})
    async with ServerClient(owned.url, "SGLang", owned.server_key) as client:
        answer = await client.post(call, 60.0)
    entries = answer["meta_info"]["output_token_logprobs"]
    tokens = torch.tensor([token for _, token, _ in entries])
    reported = torch.tensor([logprob for logprob, _, _ in entries])
    logprobs = model_logprobs(prompt, tokens, PREFERENCES["temperature"])
    assert float((logprobs.gather(1, tokens[:, None])[:, 0] - reported).abs().max()) > 0.1
    assert len(tokens) == SGLANG_MAX_NEW_TOKENS


def test_every_stop_token_of_checkpoint_and_template_ends_a_sequence(owned: ServerRollout) -> None:
    """Those of the tokenizer, of generation_config.json, and the end of turn of the chat template."""
    last = set()
    for _ in range(20):
        sent = prompts()
        owned.add(sent)
        last |= {int(response.tokens[-1]) for response in drain(owned) if not response.truncated}
        if last == set(STOP_TOKENS):
            break
    assert last == set(STOP_TOKENS)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(
    length: int, prompt: Prompt, checkpoint: Path, make_sharing_engine: Callable[..., Any]
) -> None:
    """The same token as in the torch engine; three tokens are one for the tokenizer, and the server misses them."""
    tokens, tokenizer = greedy(prompt, 24), load_tokenizer(checkpoint)
    at = three_characters(tokens)
    string = tokenizer.decode(tokens[at : at + length])
    assert len(tokenizer(string)["input_ids"]) == 1
    expected = next(count for count in range(1, 25) if string in tokenizer.decode(tokens[:count]))
    engine = make_sharing_engine(24, stop=(string, "no such text"))
    engine.add([prompt])
    [response] = drain(engine)
    assert response.tokens.tolist() == tokens[:expected]
    assert (len(response.logprobs), response.spans, response.truncated) == (expected, (0, expected), False)


def test_sampled_sequences_end_at_stop_strings_too(checkpoint: Path, make_sharing_engine: Callable[..., Any]) -> None:
    strings = tuple(load_tokenizer(checkpoint).decode([token]) for token in range(FIRST, FIRST + 20))
    stop = StopConditions.of(checkpoint, strings)
    engine = make_sharing_engine(LONG, stop=strings)
    sent = prompts()
    engine.add(sent)
    responses = drain(engine)
    for response in responses:
        assert response.truncated == (stop.end_of(response.tokens.tolist()) is None)
        assert response.truncated or stop.end_of(response.tokens.tolist()) == len(response.tokens)
        ours = score(MODEL, [sent[response.key].tokens], [response.tokens], TEMPERATURE, 4096)[0]
        torch.testing.assert_close(response.logprobs, ours, atol=CLOSE, rtol=0)
    assert any(FIRST <= int(response.tokens[-1]) < FIRST + 20 for response in responses)


def test_tokens_that_end_a_sequence_only_for_the_server_do_not_end_it(make_sharing_engine: Callable[..., Any]) -> None:
    """The server knows those of the checkpoint; here the run has none of them."""
    engine = make_sharing_engine(LONG, stop_tokens=(VOCABULARY - 1,))
    sent = prompts()
    engine.add(sent)
    responses = drain(engine)
    assert any(not set(STOP_TOKENS).isdisjoint(response.tokens[:-1].tolist()) for response in responses)
    for response in responses:
        assert len(response.tokens) == LONG or int(response.tokens[-1]) == VOCABULARY - 1
        ours = score(MODEL, [sent[response.key].tokens], [response.tokens], TEMPERATURE, 4096)[0]
        torch.testing.assert_close(response.logprobs, ours, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_prompt_and_response_may_fill_the_whole_context(tokens: int, make_sharing_engine: Callable[..., Any]) -> None:
    """SGLang alone would end the sequence two tokens earlier, and accept no prompt of the last six positions."""
    engine = make_sharing_engine(tokens, stop_tokens=(VOCABULARY - 1,))
    generator = torch.Generator().manual_seed(tokens)
    long = torch.randint(FIRST, MERGED, (POSITIONS - tokens,), generator=generator, dtype=torch.int32)
    engine.add([Prompt(0, long, 1)])
    [response] = drain(engine)
    if int(response.tokens[-1]) != VOCABULARY - 1:
        assert (len(response.tokens), response.truncated) == (tokens, True)
    ours = score(MODEL, [long], [response.tokens], TEMPERATURE, 4096)[0]
    torch.testing.assert_close(response.logprobs, ours, atol=CLOSE, rtol=0)


def test_each_sequence_has_its_own_sampling(make_sharing_engine: Callable[..., Any]) -> None:
    """At the same time: greedy ones, ones of an evaluation with sampling of its own, and ones with supports."""
    engine = make_sharing_engine(24, truncation=Truncation(top_k=16))
    own = SamplingOptions(temperature=0.3, truncation=Truncation(top_k=4))
    plain = prompts()
    kinds = ["greedy", "own", "run", "run"]
    sent = [
        Prompt(original.key, original.tokens, original.seed, kind == "greedy", own if kind == "own" else None)
        for original, kind in zip(plain, 2 * kinds, strict=True)
    ]
    engine.add(sent)
    for response, kind in zip(drain(engine), 2 * kinds, strict=True):
        assert response.support is not None
        assert response.support.fits(response.tokens)
        ranks = model_logprobs(sent[response.key], response.tokens).argsort(-1, descending=True).argsort(-1)
        highest = int(ranks.gather(1, response.tokens.long()[:, None]).max())
        assert highest < {"greedy": 1, "own": 4, "run": 16}[kind]
        assert int(response.support.counts_T.max()) == (16 if kind == "run" else 1)
