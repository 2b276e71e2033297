"""A real SGLang server on a CPU: generation, and weights that are updated meanwhile."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters, parameter_shapes
from flowrt.engines.options import Truncation
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.server.layout import Layout
from flowrt.engines.sglang.checksums import ExpectedChecksums
from flowrt.engines.sglang.protocol import checksum
from flowrt.engines.sglang.tensor_pickles import serialized
from flowrt.engines.torch.rollout import draw_truncated
from flowrt.engines.training.forward import response_logprobs, score
from flowrt.errors import EngineError
from flowrt.transport.weights import snapshot as transport_weights
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import wait_until

from .conftest import LONG, REAL_SERVER, ROWS, SHORT, START_S, TEMPERATURE, build, drain, prompts

pytestmark = REAL_SERVER
CLOSE = 1e-5
SMALL_BUCKET_BYTES = 50_000
BY_VERSION = {0: build(0), 1: build(1), 2: build(2)}


def snapshot(version: int) -> Snapshot:
    return Snapshot.take(version, named_parameters(BY_VERSION[version]))


def distances(sent: list[Prompt], response: Response) -> list[float]:
    """For each span of a response, the largest difference of log-probabilities from those of its version's model."""
    prompt = sent[response.key].tokens
    assert len(response.tokens) == len(response.logprobs) == sum(response.spans[1::2])
    differences, begin = [], 0
    for version, count in zip(response.spans[::2], response.spans[1::2], strict=True):
        ours = score(BY_VERSION[version], [prompt], [response.tokens], TEMPERATURE, 4096)[0]
        part = slice(begin, begin + count)
        differences.append(float((ours[part] - response.logprobs[part]).abs().max()))
        begin += count
    return differences


def all_close(sent: list[Prompt], responses: list[Response]) -> bool:
    return len(responses) == len(sent) and all(max(distances(sent, response)) < CLOSE for response in responses)


def add_and_wait_until_running(engine: ServerRollout, sent: list[Prompt], short: ServerRollout) -> None:
    """Add prompts; they all run once a short sequence that was sent later has finished."""
    engine.add(sent)
    short.add(prompts(1))
    assert len(drain(short)) == 1
    assert engine.running == len(sent)


def test_log_probabilities_are_those_of_transformers(owned: ServerRollout) -> None:
    sent = prompts()
    owned.add(sent)
    responses = drain(owned)
    assert all_close(sent, responses)
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


def test_each_finished_sequence_frees_one_row(owned: ServerRollout) -> None:
    sent = prompts()
    owned.add(sent)
    assert owned.room == 0
    with pytest.raises(EngineError, match="0 free rows"):
        owned.add(sent[:1])
    first = owned.run(threading.Event())
    assert owned.room == len(first) > 0
    assert len(drain(owned)) == ROWS - len(first)
    assert owned.room == ROWS


@pytest.mark.parametrize(
    "truncation",
    [Truncation(top_k=20), Truncation(top_k=64, top_p=0.9), Truncation(top_k=64, min_p=0.2), Truncation(64, 0.8, 0.1)],
)
def test_log_probabilities_are_normalised_over_the_supports_of_the_server(
    truncation: Truncation, make_sharing_engine: Callable[..., Any]
) -> None:
    engine = make_sharing_engine(40, truncation=truncation)
    sent = prompts()
    engine.add(sent)
    for response in drain(engine):
        assert response.support is not None
        assert response.support.fits(response.tokens)
        prompt = sent[response.key].tokens
        renormalised, _ = response_logprobs(
            BY_VERSION[0], [prompt], [response.tokens], TEMPERATURE, supports=[response.support]
        )
        torch.testing.assert_close(response.logprobs, renormalised.detach(), atol=CLOSE, rtol=0)
        ids = torch.cat([prompt, response.tokens]).long().unsqueeze(0)
        with torch.inference_mode():
            logprobs = (BY_VERSION[0](ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        _, _, ours = draw_truncated(logprobs, torch.zeros(len(logprobs), 1), truncation)
        counts = [int(our.counts_T) for our in ours]
        different = sum(mine != theirs for mine, theirs in zip(counts, response.support.counts_T.tolist(), strict=True))
        assert different <= 1, (counts, response.support.counts_T.tolist())  # rounding at the threshold


@pytest.mark.parametrize("weights", ["disk", "tensor", "broadcast"])
async def test_each_transfer_method_updates_the_weights_bit_exactly(
    weights: str, owned: ServerRollout, make_sharing_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses are those of the new model, and the server's checksums are those of the weights that were sent.

    The weights are sent in many parts, like a large model; the engine requests the checksums after each update.
    """
    monkeypatch.setattr(transport_weights, "BUCKET_BYTES", SMALL_BUCKET_BYTES)
    checked_versions: list[int] = []

    check = ExpectedChecksums.check

    def recording_check(sums: ExpectedChecksums, reply: Any) -> int:
        checked_versions.append(sums._version)
        return check(sums, reply)

    monkeypatch.setattr(ExpectedChecksums, "check", recording_check)
    engine = make_sharing_engine(SHORT, weights=weights)
    for version in (1, 2):
        weights_sent = snapshot(version)
        assert len(weights_sent.buckets) > 3
        engine.swap(weights_sent)
        assert checked_versions[-1] == version
        sent = prompts()
        engine.add(sent)
        responses = drain(engine)
        assert all(response.spans[0] == version for response in responses)
        assert all_close(sent, responses)
    layout = Layout(parameter_shapes_of(version))
    async with ServerClient(engine.url, "SGLang") as unauthorized:
        with pytest.raises(EngineError, match="HTTP 401"):
            await unauthorized.post(checksum(), 30.0)
    async with ServerClient(engine.url, "SGLang", owned.server_key) as link:
        reply = await link.post(checksum(), 30.0)
    assert ExpectedChecksums(layout, snapshot(2)).check(reply) == len(reply["ranks"][0]["checksums"])
    with pytest.raises(EngineError, match=r"not those of version 1.*tensors differ"):
        ExpectedChecksums(layout, snapshot(1)).check(reply)


def parameter_shapes_of(version: int) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in named_parameters(BY_VERSION[version]).items()}


def test_the_layout_of_a_checkpoint_is_that_of_its_model(checkpoint: Any) -> None:
    shapes = parameter_shapes(checkpoint)
    assert shapes == parameter_shapes_of(0)
    assert list(shapes) == list(parameter_shapes_of(0))


@pytest.mark.parametrize(
    ("pause", "weights"),
    [
        *[("retract", weights) for weights in ("disk", "tensor", "broadcast")],
        *[("in_place", weights) for weights in ("disk", "tensor", "broadcast")],
        ("abort", "tensor"),
    ],
)
def test_weights_change_during_running_sequences(
    pause: str, weights: str, make_sharing_engine: Callable[..., Any]
) -> None:
    """Each token has the right version; later tokens are exactly the new model's if recomputed, nearly if in place."""
    engine, short = make_sharing_engine(LONG, pause=pause, weights=weights), make_sharing_engine(SHORT)
    sent = prompts()
    add_and_wait_until_running(engine, sent, short)
    new = snapshot(1)
    engine.prepare(new)()  # while sequences run, as in a worker
    engine.swap(new)
    responses = drain(engine)
    assert len(responses) == ROWS
    across = [response for response in responses if response.spans[::2] == (0, 1)]
    assert len(across) >= ROWS // 2, [response.spans for response in responses]
    first, second = zip(*(distances(sent, response) for response in across), strict=True)
    assert max(first) < CLOSE
    assert (max(second) < CLOSE) == (pause != "in_place")
    assert {response.spans[0] for response in responses} <= {0, 1}
    engine.add(sent)  # new sequences use no KV cache of the old weights
    later = drain(engine)
    assert all_close(sent, later)
    assert {response.spans[::2] for response in later} == {(1,)}


def test_a_closed_engine_leaves_no_process_group_in_the_server(
    make_sharing_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group for broadcasts is destroyed: a further request to leave it fails."""
    calls: list[Call] = []
    post = ServerClient.post

    async def recording_post(link: ServerClient, call: Call, deadline_s: float) -> Any:
        calls.append(call)
        return await post(link, call, deadline_s)

    monkeypatch.setattr(ServerClient, "post", recording_post)
    engine, other = make_sharing_engine(SHORT, weights="broadcast"), make_sharing_engine(SHORT)
    engine.swap(snapshot(1))
    engine.close()
    [leave_call] = [call for call in calls if call.route == "/destroy_weights_update_group"]
    assert leave_call.body["group_name"] in {call.body.get("group_name") for call in calls if call is not leave_call}
    with pytest.raises(EngineError, match="does not exist"):
        other._run_in_loop(other._supervisor._client.post(leave_call, 60.0))


# ---- failures of the server; last, because each costs a restart


def test_server_killed_while_generating_restarts_and_completes_all_requests(
    owned: ServerRollout, make_sharing_engine: Callable[..., Any]
) -> None:
    before, sent = owned.server_pid, prompts()
    add_and_wait_until_running(owned, sent, make_sharing_engine(SHORT))
    os.killpg(before, signal.SIGKILL)
    responses = drain(owned)
    assert [response.key for response in responses] == [prompt.key for prompt in sent]
    assert all_close(sent, responses)
    assert owned.server_pid != before


def test_server_killed_between_two_parts_of_a_version_restarts_with_all_of_it(
    owned_by_parts: ServerRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of version 1 is in use already when the server dies."""
    monkeypatch.setattr(transport_weights, "BUCKET_BYTES", SMALL_BUCKET_BYTES)
    owned, parts = owned_by_parts, list[str]()
    before = owned.server_pid
    post = ServerClient.post

    async def post_and_kill(self: ServerClient, call: Any, deadline_s: float) -> Any:
        answer = await post(self, call, deadline_s)
        if call.route.startswith("/update_weights_from"):
            parts.append(call.route)
            if len(parts) == 1:
                os.killpg(before, signal.SIGKILL)
        return answer

    monkeypatch.setattr(ServerClient, "post", post_and_kill)
    owned.swap(snapshot(1))
    assert len(parts) > 1
    assert owned.server_pid != before
    sent = prompts()
    owned.add(sent)
    responses = drain(owned)
    assert all(response.spans[-2] == 1 for response in responses)
    assert all_close(sent, responses)


def test_a_server_that_fails_to_load_a_part_is_replaced_by_one_with_all_parts(
    owned_by_parts: ServerRollout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of version 1 is in use already when the next one does not fit; SGLang 0.5.21 exits on that."""
    monkeypatch.setattr(transport_weights, "BUCKET_BYTES", SMALL_BUCKET_BYTES)
    before, parts = owned_by_parts.server_pid, list[Call]()
    post = ServerClient.post

    async def post_wrong_part(self: ServerClient, call: Call, deadline_s: float) -> Any:
        if call.route.startswith("/update_weights_from"):
            parts.append(call)
            if len(parts) == 2:
                wrong = [serialized([("model.norm.weight", torch.zeros(3))])]
                call = Call(call.route, {**call.body, "serialized_named_tensors": wrong})
        return await post(self, call, deadline_s)

    monkeypatch.setattr(ServerClient, "post", post_wrong_part)
    sent = prompts()
    owned_by_parts.add(sent)
    owned_by_parts.swap(snapshot(1))
    assert "version 1 by tensor: " in caplog.text
    assert len(parts) > 2
    assert owned_by_parts.server_pid != before
    responses = drain(owned_by_parts)
    assert all(response.spans[-2] == 1 for response in responses)
    assert all_close(sent, responses)


def test_server_killed_during_a_weight_update_restarts_with_the_whole_version(owned: ServerRollout) -> None:
    before = owned.server_pid
    port = int(owned.url.rpartition(":")[2])
    sent = prompts()
    owned.add(sent)
    os.killpg(before, signal.SIGSTOP)  # it accepts the request for the update, and never answers
    connections_before = _connections(port)
    swap = threading.Thread(target=owned.swap, args=(snapshot(2),))
    swap.start()
    wait_until(lambda: _connections(port) > connections_before, 30.0, lambda: "no update was requested")
    assert owned.room == 0  # no new requests while its weights are unknown
    os.killpg(before, signal.SIGKILL)
    swap.join(START_S)
    assert not swap.is_alive()
    responses = drain(owned)
    assert all(response.spans[-2] == 2 for response in responses)
    assert all_close(sent, responses)
    assert owned.room == ROWS


def _connections(port: int) -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(bool(connection.raddr) and connection.raddr.port == port for connection in connections)
