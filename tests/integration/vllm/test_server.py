"""A real vLLM server on a CPU: generation, and weights that are updated meanwhile."""

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters
from flowrt.engines.options import Truncation
from flowrt.engines.server.client import UNIX_SCHEME
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.training.forward import response_logprobs, score
from flowrt.errors import EngineError
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import wait_until
from tests.integration.sglang.conftest import LONG, ROWS, SHORT, START_S, TEMPERATURE, build, drain, prompts

from .conftest import REAL_SERVER, owner

pytestmark = REAL_SERVER
CLOSE = 1e-5
BY_VERSION = {version: build(version) for version in range(6)}


def snapshot(version: int) -> Snapshot:
    return Snapshot.take(version, named_parameters(BY_VERSION[version]))


def distances(sent: list[Prompt], response: Response, temperature: float = TEMPERATURE) -> list[float]:
    """For each span of a response, the largest difference of log-probabilities from those of its version's model."""
    prompt = sent[response.key].tokens
    assert len(response.tokens) == len(response.logprobs) == sum(response.spans[1::2])
    differences, begin = [], 0
    for version, count in zip(response.spans[::2], response.spans[1::2], strict=True):
        ours = score(BY_VERSION[version], [prompt], [response.tokens], temperature, 4096)[0]
        part = slice(begin, begin + count)
        differences.append(float((ours[part] - response.logprobs[part]).abs().max()))
        begin += count
    return differences


def all_close(sent: list[Prompt], responses: list[Response], temperature: float = TEMPERATURE) -> bool:
    return len(responses) == len(sent) and all(
        max(distances(sent, response, temperature)) < CLOSE for response in responses
    )


def add_and_wait_until_running(engine: ServerRollout, sent: list[Prompt], short: ServerRollout) -> None:
    """Add prompts; they all run once a short sequence that was sent later has finished."""
    engine.add(sent)
    short.add(prompts(1))
    assert len(drain(short)) == 1
    assert engine.running == len(sent)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probabilities_are_those_of_transformers(
    temperature: float, make_sharing_engine: Callable[..., Any]
) -> None:
    engine = make_sharing_engine(temperature=temperature)
    sent = prompts()
    engine.add(sent)
    responses = drain(engine)
    assert all_close(sent, responses, temperature)
    assert all(response.spans[::2] == (0,) for response in responses)
    assert sum(len(response.tokens) for response in responses) > ROWS * SHORT
    ended = [response for response in responses if len(response.tokens) < LONG]
    assert all(response.tokens[-1] == 1 for response in ended)  # the end token is part of the response
    assert all(1 not in response.tokens[:-1] for response in responses)


def test_greedy_sequences_take_the_likeliest_token(owned: ServerRollout) -> None:
    sent = prompts(3, greedy=True)
    owned.add(sent)
    for response in drain(owned):
        ids = torch.cat([sent[response.key].tokens, response.tokens]).long().unsqueeze(0)
        with torch.inference_mode():
            likeliest = BY_VERSION[0](ids).logits[0].argmax(-1)[len(sent[response.key].tokens) - 1 : -1]
        assert torch.equal(likeliest, response.tokens.long())


@pytest.mark.parametrize("truncation", [Truncation(top_k=20), Truncation(64, 0.5), Truncation(64, min_p=0.5)])
def test_log_probabilities_are_normalised_over_the_supports_of_the_server(
    truncation: Truncation, make_sharing_engine: Callable[..., Any]
) -> None:
    engine = make_sharing_engine(40, truncation=truncation)
    sent = prompts()
    engine.add(sent)
    for response in drain(engine):
        assert response.support is not None
        assert response.support.fits(response.tokens)
        renormalised, _ = response_logprobs(
            BY_VERSION[0], [sent[response.key].tokens], [response.tokens], TEMPERATURE, supports=[response.support]
        )
        torch.testing.assert_close(response.logprobs, renormalised.detach(), atol=CLOSE, rtol=0)
        if truncation == Truncation(top_k=20):
            assert set(response.support.counts_T.tolist()) == {20}


def test_a_support_that_is_larger_than_the_limit_is_refused(checkpoint: Path) -> None:
    """Of the model's 320 tokens nearly all are likely: with 8 of them the trained probabilities would be others."""
    from flowrt.engines.vllm import protocol

    with pytest.MonkeyPatch.context() as patch, owner(checkpoint, truncation=Truncation(4_096, 0.99)) as engine:
        patch.setattr(protocol, "MAX_TOP_K", 8)
        engine.add(prompts(1))
        with pytest.raises(EngineError, match=r"drawn from 9 tokens or more.*set rollout\.top_k to 8 or less"):
            drain(engine)


def test_each_finished_sequence_frees_one_row(owned: ServerRollout) -> None:
    sent = prompts()
    owned.add(sent)
    assert owned.room == 0
    first = owned.run(_never())
    assert owned.room == len(first) > 0
    assert len(drain(owned)) == ROWS - len(first)
    assert owned.room == ROWS


def _never() -> Any:
    from threading import Event

    return Event()


def test_other_accounts_cannot_reach_the_socket(owned: ServerRollout) -> None:
    """Who reaches it can change the weights."""
    path = Path(owned.url.removeprefix(UNIX_SCHEME))
    assert path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_weights_change_during_running_sequences(pause: str, make_sharing_engine: Callable[..., Any]) -> None:
    """Each token has the right version; later tokens are exactly the new model's if recomputed, nearly if in place."""
    engine, short = make_sharing_engine(LONG, pause=pause), make_sharing_engine(SHORT)
    sent = prompts()
    add_and_wait_until_running(engine, sent, short)
    new = snapshot(1)
    engine.prepare(new)()  # while sequences run, as in a worker
    engine.swap(new)
    responses = drain(engine)
    assert len(responses) == ROWS
    across = [response for response in responses if response.spans[::2] == (0, 1)]
    assert across, [response.spans for response in responses]
    first, second = zip(*(distances(sent, response) for response in across), strict=True)
    assert max(first) < CLOSE
    assert (max(second) < CLOSE) == (pause != "in_place")
    engine.add(sent)  # new sequences use no KV cache of the old weights
    later = drain(engine)
    assert all_close(sent, later)
    assert {response.spans[::2] for response in later} == {(1,)}


def test_five_updates_of_running_sequences(make_sharing_engine: Callable[..., Any]) -> None:
    """On a CPU, seeds and recomputed sequences end a server that computes in chunks."""
    engine, short = make_sharing_engine(LONG), make_sharing_engine(SHORT)
    sent = prompts()
    add_and_wait_until_running(engine, sent, short)
    for version in range(1, 6):
        engine.swap(snapshot(version))
        short.add(prompts(1))
        assert len(drain(short)) == 1  # the long ones have gone on meanwhile
    responses = drain(engine)
    assert all_close(sent, responses)
    across = [response.spans[::2] for response in responses if len(response.spans) > 2]  # others ended before
    assert max(len(versions) for versions in across) > 2
    assert any(versions[-1] == 5 for versions in across)


def test_an_aborted_sequence_does_not_repeat_its_first_part(make_sharing_engine: Callable[..., Any]) -> None:
    """The server draws anew from the seed of each request: with one seed for all parts it would."""
    engine, short = make_sharing_engine(LONG, pause="abort"), make_sharing_engine(SHORT)
    sent = prompts()
    add_and_wait_until_running(engine, sent, short)
    engine.swap(snapshot(0))
    for response in drain(engine):
        first = response.tokens[: len(response.tokens) // 2]
        assert len(set(first.tolist())) > 1


@pytest.mark.parametrize("missing", [True, False])
def test_a_load_that_fails_replaces_the_server(
    missing: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that lacks a tensor, which vLLM only logs, and one with a tensor of another shape."""
    saved: list[Path] = []

    def save_wrong(tensors: dict[str, torch.Tensor], file: Path, **options: Any) -> None:
        saved.append(file)
        name = "model.norm.weight"
        if len(saved) == 1:
            tensors = {key: tensor for key, tensor in tensors.items() if not missing or key != name}
            if not missing:
                tensors[name] = torch.zeros(3)
        save_file(tensors, file, **options)

    with owner(checkpoint) as engine:
        before, sent = engine.server_pid, prompts()
        monkeypatch.setattr("flowrt.engines.server.weights.save_file", save_wrong)
        engine.swap(snapshot(1))
        assert "version 1 by disk: " in caplog.text
        assert not missing or "model.norm.weight" in caplog.text
        assert engine.server_pid != before
        engine.add(sent)
        responses = drain(engine)
    assert all(response.spans[::2] == (1,) for response in responses)
    assert all_close(sent, responses)


# ---- failures of the server; last, because each costs a restart


def test_server_killed_while_generating_restarts_and_completes_all_requests(checkpoint: Path) -> None:
    with owner(checkpoint) as engine:
        before, sent = engine.server_pid, prompts()
        engine.add(sent)
        wait_until(lambda: engine._supervisor._requests == len(sent), START_S, lambda: "no sequences run")
        os.killpg(before, signal.SIGKILL)
        responses = drain(engine)
        assert [response.key for response in responses] == [prompt.key for prompt in sent]
        assert all_close(sent, responses)
        assert engine.server_pid != before
