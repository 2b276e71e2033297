"""A sequence that is continued from a prefix by another engine is the sequence that was not interrupted."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrt.algorithms.support import join_supports
from flowrt.engines.base import ContinuesSequences, NewTokens, Prefix, Prompt, Response
from flowrt.engines.options import Truncation
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.transport.weights.snapshot import Snapshot

EOS = 1
SPARSE = Truncation(top_k=6, top_p=0.9)


class AfterSteps:
    """An interrupt that is set after this many decode steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(
        vocab_size=24, hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=256, seed=3
    ).eval()


def engine_of(model: Any, rows: int = 4, truncation: Truncation | None = None) -> TorchRollout:
    stop = StopConditions((EOS,))
    return TorchRollout(model, stop=stop, rows=rows, max_new_tokens=60, temperature=1.0, truncation=truncation)


def prompts(count: int = 4) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    equal = torch.randint(2, 24, (6,), generator=generator, dtype=torch.int32)
    others = [torch.randint(2, 24, (4 + key,), generator=generator, dtype=torch.int32) for key in range(count - 2)]
    return [Prompt(key, tokens, 70 + key) for key, tokens in enumerate([equal, equal, *others])]


def finish(engine: TorchRollout, todo: list[Prompt]) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while todo or engine.running:
        count = min(engine.room, len(todo))
        engine.add(todo[:count])
        todo = todo[count:]
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


def interrupt(engine: TorchRollout, todo: list[Prompt], steps: int) -> tuple[dict[int, Response], dict[int, Prefix]]:
    """Responses and prefixes after this many steps."""
    engine.add(todo)
    return run_for(engine, steps), prefixes_of(engine)


def run_for(engine: TorchRollout, steps: int) -> dict[int, Response]:
    done: dict[int, Response] = {}
    after = AfterSteps(steps)
    while after._left >= 0 and engine.running:
        done |= {response.key: response for response in engine.run(after)}
    return done


def prefixes_of(engine: TorchRollout) -> dict[int, Prefix]:
    """All that is generated of the running sequences."""
    return {key: Prefix(new.tokens, new.logprobs, new.spans, new.support) for key, new in engine.new_tokens({}).items()}


@pytest.mark.parametrize("truncation", [None, SPARSE], ids=["all tokens", "truncated"])
def test_the_tokens_since_the_last_time_are_those_that_the_whole_has_more(
    model: Any, truncation: Truncation | None
) -> None:
    engine = engine_of(model, truncation=truncation)
    engine.add(prompts())
    taken: dict[int, list[NewTokens]] = {}
    for steps in (1, 1, 14, 3, 20):
        run_for(engine, steps)
        starts = {key: new[-1].start + len(new[-1].tokens) for key, new in taken.items()}
        for key, new in engine.new_tokens(starts).items():
            assert new.start == starts.get(key, 0)
            assert sum(new.spans[1::2]) == new.start + len(new.tokens)
            taken.setdefault(key, []).append(new)
    assert engine.new_tokens({key: new.start + len(new.tokens) for key, (*_, new) in taken.items()}) == {}
    whole = prefixes_of(engine)
    assert whole
    for key, prefix in whole.items():
        assert len(taken[key]) > 1
        assert torch.equal(torch.cat([new.tokens for new in taken[key]]), prefix.tokens)
        assert torch.equal(torch.cat([new.logprobs for new in taken[key]]), prefix.logprobs)
        assert prefix.spans == taken[key][-1].spans
        if prefix.support is not None:
            joined = join_supports([new.support for new in taken[key] if new.support is not None])
            assert torch.equal(joined.counts_T, prefix.support.counts_T)
            assert torch.equal(joined.tokens_E, prefix.support.tokens_E)


@pytest.mark.parametrize("truncation", [None, SPARSE], ids=["all tokens", "truncated"])
@pytest.mark.parametrize("steps", [1, 2, 9, 25])
def test_the_rest_of_a_sequence_is_that_of_the_uninterrupted_one(
    model: Any, steps: int, truncation: Truncation | None
) -> None:
    expected = finish(engine_of(model, truncation=truncation), prompts())
    done, prefixes = interrupt(engine_of(model, truncation=truncation), prompts(), steps)
    assert prefixes
    assert done.keys() | prefixes.keys() == expected.keys()
    todo = [replace(prompt, prefix=prefixes[prompt.key]) for prompt in prompts() if prompt.key in prefixes]
    continued = finish(engine_of(model, rows=2, truncation=truncation), todo[::-1])
    for key, prefix in prefixes.items():
        response, whole = continued[key], expected[key]
        length = len(prefix.tokens)
        assert 0 < length < len(whole.tokens)
        assert torch.equal(response.tokens, whole.tokens)
        assert torch.equal(response.logprobs[:length], prefix.logprobs)
        torch.testing.assert_close(response.logprobs, whole.logprobs, atol=1e-5, rtol=0)
        assert response.spans == whole.spans == (0, len(whole.tokens))
        assert response.truncated == whole.truncated
        if whole.support is not None:
            assert response.support is not None
            assert torch.equal(response.support.counts_T, whole.support.counts_T)
            assert torch.equal(response.support.tokens_E, whole.support.tokens_E)


def test_a_sequence_that_has_not_begun_to_continue_keeps_its_prefix(model: Any) -> None:
    _, prefixes = interrupt(engine_of(model), prompts(), 3)
    waiting = engine_of(model)
    waiting.add([replace(prompt, prefix=prefixes[prompt.key]) for prompt in prompts() if prompt.key in prefixes])
    again = prefixes_of(waiting)
    assert isinstance(waiting, ContinuesSequences)
    assert again.keys() == prefixes.keys()
    assert all(torch.equal(again[key].tokens, prefixes[key].tokens) for key in again)
    later = waiting.new_tokens(dict.fromkeys(again, 1))
    assert all(torch.equal(new.tokens, prefixes[key].tokens[1:]) for key, new in later.items())
    assert all(len(prefixes[key].tokens) == 1 for key in again.keys() - later.keys())


def test_the_spans_of_a_continued_sequence_name_the_weights_of_each_token(model: Any) -> None:
    _, prefixes = interrupt(engine_of(model), prompts(), 5)
    later = engine_of(model)
    changed = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        later.swap(Snapshot.take(7, {name: changed[name] for name, _ in model.named_parameters()}))
        continued = finish(
            later, [replace(prompt, prefix=prefixes[prompt.key]) for prompt in prompts() if prompt.key in prefixes]
        )
    finally:
        model.load_state_dict(before)
    for key, response in continued.items():
        length = len(prefixes[key].tokens)
        assert response.spans == (0, length, 7, len(response.tokens) - length)
        assert torch.equal(response.tokens[:length], prefixes[key].tokens)


def test_stop_strings_are_found_across_the_end_of_a_prefix(model: Any) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(chr(97 + token) for token in tokens)

    whole = finish(engine_of(model), prompts(3)[2:])[2]
    length = len(whole.tokens) // 2
    assert length > 2
    text = Tokenizer().decode(whole.tokens[length - 1 : length + 1].tolist())
    stop = StopConditions((EOS,), (text,), Tokenizer())
    prefix = Prefix(whole.tokens[:length], whole.logprobs[:length], (0, length))
    engine = TorchRollout(model, stop=stop, rows=1, max_new_tokens=60, temperature=1.0)
    [response] = finish(engine, [replace(prompts(3)[2], prefix=prefix)]).values()
    assert torch.equal(response.tokens, whole.tokens[: length + 1])
    assert not response.truncated


@pytest.mark.parametrize("truncation", [None, SPARSE], ids=["all tokens", "truncated"])
def test_nothing_follows_the_last_token_of_a_sequence_that_is_known_as_a_whole(
    model: Any, truncation: Truncation | None
) -> None:
    """As when a server ends a sequence without another token, after its tokens were read."""
    [response] = finish(engine_of(model, truncation=truncation), prompts(3)[2:]).values()
    whole = Prefix(response.tokens, response.logprobs, response.spans, response.support)
    rest = whole.after(len(response.tokens))
    assert (len(rest.tokens), len(rest.logprobs), rest.end) == (0, 0, len(response.tokens))
    assert rest.support is None or (len(rest.support.tokens_E), len(rest.support.counts_T)) == (0, 0)
