"""The engine against a stand-in with vLLM's protocol: releases, failures, recovery; no vLLM is needed."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from flowrt.engines.base import Prompt
from flowrt.engines.hf import load_tokenizer
from flowrt.engines.options import Truncation, VllmOptions
from flowrt.engines.server.client import UNIX_SCHEME
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.stopping import StopConditions
from flowrt.engines.vllm import protocol
from flowrt.engines.vllm.dialect import vllm_rollout
from flowrt.errors import EngineError
from tests.integration.conftest import wait_until
from tests.integration.helpers.forked import CONTEXT
from tests.integration.sglang.playing import DEADLINE_S, MANY_TOKENS, TOKENS, drain, is_complete, prompts, snapshot
from tests.integration.vllm import standin


class StandinProcess:
    """A running stand-in process."""

    def __init__(self, folder: Path, release: str, state: dict[str, Any]) -> None:
        self.socket = folder / "server.sock"
        arguments = [str(self.socket), release, json.dumps(state)]
        self.process = CONTEXT.Process(target=standin.forked, args=(arguments, dict(os.environ)), daemon=True)
        self.process.start()
        wait_until(self.socket.exists, DEADLINE_S, lambda: f"no stand-in at {self.socket}")

    @property
    def url(self) -> str:
        return f"{UNIX_SCHEME}{self.socket}"

    async def exchange(self, **state: Any) -> Any:
        """Change attributes of the stand-in; returns its report."""
        connector = aiohttp.UnixConnector(str(self.socket))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.post("http://localhost/standin", json=state) as answer,
        ):
            return await answer.json()

    async def routes(self) -> list[str]:
        """The routes of all requests so far."""
        return [route for route, _ in (await self.exchange())["requests"]]

    async def wait_for_generation(self, requests: int = 4) -> None:
        """Wait until the server has received this number of requests for sequences."""
        while (await self.routes()).count("/inference/v1/generate") < requests:
            assert self.process.is_alive()


@pytest.fixture
def start_standin() -> Iterator[Callable[..., StandinProcess]]:
    standins: list[StandinProcess] = []
    with tempfile.TemporaryDirectory(prefix="flowrt-test-") as folder:  # the path of a socket is short

        def start(release: str = "0.32.0", **state: Any) -> StandinProcess:
            place = Path(folder) / str(len(standins))
            place.mkdir()
            standins.append(StandinProcess(place, release, state))
            return standins[-1]

        yield start
        for server in standins:
            server.process.kill()
            server.process.join(DEADLINE_S)
            server.process.close()


@pytest.fixture
def make_engine(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., ServerRollout]]:
    engines: list[ServerRollout] = []

    def create(
        url: str, *, tokens: int = TOKENS, truncation: Truncation | None = None, **options: Any
    ) -> ServerRollout:
        limits = {"start_s": DEADLINE_S, "update_s": DEADLINE_S, "max_server_restarts": 1}
        engine = vllm_rollout(
            VllmOptions(url=(url,), **{**limits, **options}),
            checkpoint,
            stop=StopConditions((9_999,), (), load_tokenizer(checkpoint)),  # a stand-in's tokens are its versions
            rows=4,
            max_new_tokens=tokens,
            temperature=1.0,
            truncation=truncation,
            threads=1,
            log_path=tmp_path / "server.log",
        )
        engines.append(engine)
        engine.start()
        return engine

    yield create
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("release", ["0.17.0", "0.28.0", "0.30.0", "0.32.0"])
async def test_weights_change_during_running_sequences(
    release: str, start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """Every token has the right version; where the server reports none, running sequences are aborted and resumed."""
    server = start_standin(release)
    engine = make_engine(server.url, tokens=MANY_TOKENS)
    engine.add(prompts(4))
    await server.wait_for_generation()
    engine.swap(snapshot(checkpoint, 1))
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3]
    assert all(response.spans[-2] == 1 and len(response.tokens) == MANY_TOKENS for response in done.values())
    assert any(response.spans[0] == 0 for response in done.values())
    if release != "0.17.0":
        assert all(is_complete(response, MANY_TOKENS) for response in done.values())
    routes = await server.routes()
    assert (routes.count("/inference/v1/generate") > 4) == (release != "0.32.0")
    later = routes[routes.index("/inference/v1/generate") :]
    order = ["/pause", "/reset_prefix_cache", "/collective_rpc", "/resume"]
    assert [route for route in later if route in order] == order


async def test_running_sequences_that_are_kept_need_the_cache(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    server = start_standin()
    engine = make_engine(server.url, tokens=MANY_TOKENS, pause="in_place")
    engine.add(prompts(4))
    await server.wait_for_generation()
    before = (await server.routes()).count("/reset_prefix_cache")
    engine.swap(snapshot(checkpoint, 1))
    assert len(drain(engine)) == 4
    assert (await server.routes()).count("/reset_prefix_cache") == before


async def test_parts_of_a_sequence_have_different_seeds_and_versions_different_prefixes(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """A server that begins its random numbers anew with a request would draw the first part again."""
    server = start_standin()
    engine = make_engine(server.url, tokens=MANY_TOKENS, pause="abort")
    engine.add(prompts(1))
    await server.wait_for_generation(1)
    engine.swap(snapshot(checkpoint, 1))
    drain(engine)
    sent = [body for route, body in (await server.exchange())["requests"] if route == "/inference/v1/generate"]
    assert len(sent) > 1
    assert len({body["sampling_params"]["seed"] for body in sent}) == len(sent)
    assert {body["cache_salt"] for body in sent} == {"version 0", "version 1"}
    assert sum(len(body["token_ids"]) == 2 for body in sent) == 1


def test_a_sequence_that_fills_the_context_is_truncated(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The server returns fewer tokens than were asked for, and says only that the sequence has its length."""
    engine = make_engine(start_standin(context=12).url)
    engine.add(prompts(2))
    done = drain(engine)
    assert [(len(response.tokens), response.truncated) for response in done.values()] == [(10, True)] * 2
    assert "the vLLM server cuts sequences before their limit (40)" in caplog.text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"development": False}, r"start it with VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "raw_logprobs"}, r"returns raw_logprobs: start it with --logprobs-mode processed_logprobs"),
        ({"data_parallel": 2}, r"has data_parallel_size 2: .*use 1, and more rollout workers"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(
    state: dict[str, Any], message: str, start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    server = start_standin(**state)
    with pytest.raises(EngineError, match=message):
        make_engine(server.url, max_server_restarts=0)


@pytest.mark.parametrize(("release", "state"), [("0.16.3", {}), ("0.32.0", {"reported": "main"})])
def test_an_older_release_is_refused(
    release: str, state: dict[str, str], start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    server = start_standin(release, **state)
    with pytest.raises(EngineError, match=r"the vLLM server (has|reports) version .*; 0\.17\.0 or newer is needed"):
        make_engine(server.url, max_server_restarts=0)


def test_generation_without_scale_out_ends_the_engine(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(start_standin(scale_out=False).url)
    engine.add(prompts(1))
    with pytest.raises(EngineError, match=r"/inference/v1/generate refused \(HTTP 403\): scale out is disabled"):
        drain(engine)


async def test_weights_that_lack_a_tensor_are_never_used(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """The server answers that all is well, and has a mixture of old and new weights."""
    server = start_standin()
    engine = make_engine(server.url)
    report = await server.exchange()
    await server.exchange(tensors=[*report["tensors"], "model.further.weight"])
    with pytest.raises(EngineError, match=r"has failed to load weights, .*start it again, and resume the run"):
        engine.swap(snapshot(checkpoint, 1))
    assert engine.room == 0


async def test_a_server_that_failed_to_load_is_not_asked_to_generate(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """Its next pass would end it, or compute with tensors that have no values."""
    server = start_standin()
    engine = make_engine(server.url, tokens=MANY_TOKENS, pause="abort")
    await server.exchange(fail_load=True)
    engine.add(prompts(1))
    await server.wait_for_generation(1)
    with pytest.raises(EngineError, match="has failed to load weights"):
        engine.swap(snapshot(checkpoint, 1))
    assert (await server.routes()).count("/inference/v1/generate") == 1
    assert server.process.is_alive()


async def test_a_cache_that_is_not_reset_is_a_failed_update(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """The server says so with status 200."""
    server = start_standin()
    engine = make_engine(server.url, max_server_restarts=0)
    await server.exchange(refuse_reset=True)
    with pytest.raises(EngineError, match=r"version 1 by disk: .*/reset_prefix_cache.* refused"):
        engine.swap(snapshot(checkpoint, 1))


def test_supports_are_those_that_the_server_returns(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(start_standin(support=3).url, truncation=Truncation(top_k=8, top_p=0.9))
    engine.add(prompts(1))
    [response] = drain(engine).values()
    assert response.support is not None
    assert torch.equal(response.support.counts_T, torch.full((TOKENS,), 3, dtype=torch.int32))
    assert response.support.fits(response.tokens)


def test_a_support_without_an_end_is_refused(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens could be drawn than the server returns: the trainer would use other probabilities."""
    monkeypatch.setattr(protocol, "MAX_TOP_K", 8)
    engine = make_engine(start_standin(support=9_999).url, truncation=Truncation(top_k=4_096, top_p=0.9))
    engine.add(prompts(1))
    with pytest.raises(EngineError, match=r"drawn from 9 tokens or more, .*set rollout\.top_k to 8 or less"):
        drain(engine)


def test_a_greedy_sequence_has_no_seed_and_no_limit(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(start_standin(support=3).url, truncation=Truncation(top_k=8))
    engine.add([Prompt(0, torch.tensor([3, 4], dtype=torch.int32), 0, greedy=True)])
    [response] = drain(engine).values()
    assert response.support is not None
    assert response.support.counts_T.tolist() == [1] * TOKENS
