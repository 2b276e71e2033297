"""Sequences that are returned unfinished by one server, and continued on another one by prefill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.base import ContinuesSequences, Prefix
from flowrt.engines.server.engine import ServerRollout

from .playing import TOKENS, drain, is_complete, make_engine, prompts, snapshot, start_standin, wait_for_generation

__all__ = ["make_engine", "start_standin"]  # fixtures


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.23"])
def test_unfinished_sequences_go_on_after_their_tokens_were_read(
    release: str, start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin(release)
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    assert engine.new_tokens({}) == {}
    engine.add(prompts(4))
    wait_for_generation(standin)
    prefixes = engine.new_tokens({})
    assert prefixes
    assert engine.room == 0
    later = engine.new_tokens(dict.fromkeys(prefixes, 1))
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3]
    for key, new in later.items():
        end = new.start + len(new.tokens)
        assert new.start == 1
        assert done[key].tokens[1:end].tolist() == new.tokens.tolist()
        assert done[key].logprobs[1:end].tolist() == new.logprobs.tolist()
        assert sum(new.spans[1::2]) == end
    for key, prefix in prefixes.items():
        assert 0 < len(prefix.tokens) < TOKENS
        assert sum(prefix.spans[1::2]) == len(prefix.tokens) == len(prefix.logprobs)
        assert done[key].tokens[: len(prefix.tokens)].tolist() == prefix.tokens.tolist()
        assert is_complete(done[key])


def test_a_sequence_is_continued_on_another_server_by_prefill(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    first, second = start_standin("0.5.23"), start_standin("0.5.23")
    engine = make_engine(url=f"http://127.0.0.1:{first.port}")
    engine.add(prompts(4))
    wait_for_generation(first)
    prefixes = {
        key: Prefix(new.tokens, new.logprobs, new.spans, new.support) for key, new in engine.new_tokens({}).items()
    }
    other: ServerRollout = make_engine(url=f"http://127.0.0.1:{second.port}")
    other.swap(snapshot(checkpoint, 2))
    todo = [replace(prompt, prefix=prefixes[prompt.key]) for prompt in prompts(4) if prompt.key in prefixes]
    assert todo
    other.add(todo)
    done = drain(other)
    bodies = [body for route, body in second.request("/bodies") if route == "/generate"]
    sent = {body["input_tokens"]: body["sampling_params"]["max_new_tokens"] for body in bodies}
    for key, prefix in prefixes.items():
        length = len(prefix.tokens)
        assert done[key].spans == (0, length, 2, TOKENS - length)
        assert done[key].tokens[:length].tolist() == prefix.tokens.tolist()
        assert is_complete(done[key])
        assert sent[2 + length] == TOKENS - length  # prompt and prefix are the input, and the rest is generated


def test_a_server_that_is_gone_does_not_stop_the_reading_of_tokens(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.23")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", max_server_restarts=0)
    engine.add(prompts(4))
    wait_for_generation(standin)
    standin.process.kill()
    assert issubclass(ServerRollout, ContinuesSequences)
    assert set(engine.new_tokens({})) <= {0, 1, 2, 3}
