"""Running SGLang servers on a CPU that were started for something else, and one that ends and is started again."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.hf import named_parameters, save_model
from flowrt.engines.options import SglangOptions
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.server.process import free_port
from flowrt.engines.sglang.dialect import sglang_server
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.training.forward import score
from flowrt.errors import EngineError
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.transport.weights.snapshot import Snapshot

from .conftest import (
    LONG,
    POSITIONS,
    PYTHON,
    REAL_SERVER,
    ROWS,
    SHORT,
    START_S,
    TEMPERATURE,
    VOCABULARY,
    build,
    drain,
    engine_of,
    owner,
    prompts,
)

pytestmark = REAL_SERVER
CLOSE = 1e-5
CONTEXT = 40


@pytest.fixture(scope="module")
def owned(checkpoint: Path) -> Iterator[ServerRollout]:
    """Its server has no tokenizer, and a shorter context than the model, to which it shortens requests."""
    arguments = f"--max-total-tokens 8192 --context-length {CONTEXT} --allow-auto-truncate"
    with owner(checkpoint, arguments=arguments) as engine:
        yield engine


def largest_distance(engine: ServerRollout, seed: int = 0) -> float:
    """Generate; the largest difference of log-probabilities from those of the model of a seed."""
    sent, model = prompts(), build(seed)
    engine.add(sent)
    responses = drain(engine)
    assert [response.key for response in responses] == [prompt.key for prompt in sent]
    ours = [
        score(model, [sent[response.key].tokens], [response.tokens], TEMPERATURE, 4096)[0] for response in responses
    ]
    return max(float((own - response.logprobs).abs().max()) for own, response in zip(ours, responses, strict=True))


def test_a_server_with_a_shorter_context_is_named_and_its_sequences_are_truncated(
    make_sharing_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_sharing_engine(LONG, stop_tokens=(VOCABULARY - 1,))
    engine.add(prompts())
    responses = drain(engine)
    assert all(len(response.tokens) < CONTEXT for response in responses)
    assert any(response.truncated for response in responses)
    assert caplog.text.count(f"cuts sequences before their limit ({LONG})") == 1


def test_a_server_without_a_tokenizer_is_refused_for_stop_strings(make_sharing_engine: Callable[..., Any]) -> None:
    with pytest.raises(EngineError, match=r"has no tokenizer, which rollout\.stop needs"):
        make_sharing_engine(SHORT, stop=("3",))


@pytest.mark.parametrize("key", ["", "another"])
def test_a_wrong_key_is_refused(
    key: str, make_sharing_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", key)
    with pytest.raises(EngineError, match=r"refused \(HTTP 401\)"):
        make_sharing_engine(SHORT)


def test_a_server_of_a_model_with_other_layers_is_refused(
    make_sharing_engine: Callable[..., Any], tmp_path: Path
) -> None:
    """It ignores the weights of the third layer. The refusing worker leaves it paused, which the next one undoes."""
    three = build_model(
        vocab_size=VOCABULARY, hidden_size=64, layers=3, heads=2, intermediate_size=128, max_length=POSITIONS, seed=0
    )
    save_model(three, wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    with pytest.raises(EngineError, match="a model of 2 layers, and version 0 has 3"):
        make_sharing_engine(SHORT, model=tmp_path / "model")
    assert largest_distance(make_sharing_engine(SHORT)) < CLOSE, "the server is as usable as before"


def test_a_running_server_that_ends_and_is_started_again_continues_with_the_newest_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no key: with --tokenizer-worker-num SGLang accepts none."""
    port = free_port()
    options = SglangOptions(
        python=str(PYTHON),
        device="cpu",
        dtype="float32",
        arguments=f"--max-total-tokens 8192 --port {port} --tokenizer-worker-num 2",
        start_s=START_S,
    )
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    server = sglang_server(options, checkpoint, rows=ROWS, threads=1, log=tmp_path / "server.log")
    engine = engine_of(
        SglangOptions(url=(f"http://127.0.0.1:{port}",), start_s=START_S, max_server_restarts=1), checkpoint, SHORT
    )
    try:
        server.start()
        assert server.key == ""
        engine.start()
        engine.swap(Snapshot.take(1, named_parameters(build(1))))
        os.killpg(server.pid, signal.SIGKILL)
        server.start()
        assert largest_distance(engine, seed=1) < CLOSE
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"max_server_restarts \(1\) allows"):
            largest_distance(engine, seed=1)
    finally:
        engine.close()
        server.kill()
