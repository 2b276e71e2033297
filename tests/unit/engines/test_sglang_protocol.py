"""Requests to an SGLang server against what its releases accept: sglang_requests.json, read from their sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.options import Truncation
from flowrt.engines.server.client import Call
from flowrt.engines.server.dialect import Continuation, PartialResponse, Sampling
from flowrt.engines.server.layout import Parameter
from flowrt.engines.sglang import protocol
from flowrt.errors import EngineError

RELEASES: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_requests.json").read_text())
SAMPLING = Sampling(temperature=0.7, max_new_tokens=16, stop_token_ids=(1, 2))
BUCKETS = [
    [Parameter("a", "float32", (2, 3)), Parameter("b", "float32", (4,))],
    [Parameter("c", "float32", (5,))],
]
SESSION = ["/begin_weight_update", "/end_weight_update"]


def all_requests(capabilities: protocol.Capabilities) -> list[Call]:
    """Every request that a server with these capabilities may receive."""
    return [
        protocol.generate(Continuation([5, 6, 7], 1, SAMPLING, seed=2**62, greedy=False, version=3)),
        *[protocol.pause(mode) for mode in ("abort", "retract", "in_place")],
        protocol.resume(),
        *protocol.load_from_disk("/somewhere", 3, flush=True),
        *protocol.load_from_tensors(capabilities, ["AAAA", "BBBB"], 1, 3, flush=True),
        protocol.join_group("group", "127.0.0.1", 4000, 2),
        *protocol.load_from_broadcast(capabilities, BUCKETS, "group", 3, flush=True),
        protocol.leave_group("group"),
        protocol.checksum(),
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_accepts_every_request(release: str) -> None:
    """Existing routes, no unknown field, no missing required field."""
    accepted = RELEASES[release]
    for call in all_requests(protocol.capabilities(release)):
        fields = accepted["routes"][call.route]
        assert set(call.body) <= {*fields["required"], *fields["optional"]}, call.route
        assert set(fields["required"]) <= set(call.body), call.route
        assert set(call.body.get("sampling_params", {})) <= set(accepted["sampling_params"])
    assert "/server_info" in accepted["get"]
    assert "/health" in accepted["get"]


@pytest.mark.parametrize("release", RELEASES)
def test_capabilities_are_those_of_the_release(release: str) -> None:
    capabilities = protocol.capabilities(release)
    assert capabilities.token_versions == RELEASES[release]["token_versions"]
    assert capabilities.update_session == (SESSION[0] in RELEASES[release]["routes"])


@pytest.mark.parametrize("release", RELEASES)
def test_partial_weight_loads_are_enclosed_in_a_session_if_supported(release: str) -> None:
    capabilities = protocol.capabilities(release)
    for calls in (
        protocol.load_from_tensors(capabilities, ["A", "B"], 1, 3, flush=True),
        protocol.load_from_broadcast(capabilities, BUCKETS, "group", 3, flush=True),
    ):
        routes = [call.route for call in calls]
        assert [route for route in routes if route in SESSION] == (SESSION if capabilities.update_session else [])
        if capabilities.update_session:
            assert [routes[0], routes[-1]] == SESSION
    assert [call.route for call in protocol.load_from_disk("/x", 3, flush=True)] == ["/update_weights_from_disk"]


def test_only_the_last_part_sets_the_version_and_flushes_the_cache() -> None:
    capabilities = protocol.capabilities("0.5.21")
    for flush in (True, False):
        calls = protocol.load_from_broadcast(capabilities, BUCKETS, "group", 3, flush=flush)
        parts = [call.body for call in calls[1:-1]]
        assert [part.get("weight_version") for part in parts] == [None, "3"]
        assert [part["flush_cache"] for part in parts] == [False, flush]


def test_every_rank_receives_a_copy_of_the_tensors() -> None:
    call = protocol.load_from_tensors(protocol.capabilities("0.5.20"), ["A"], 2, 3, flush=True)[0]
    assert call.body["serialized_named_tensors"] == ["A", "A"]


def test_a_resumed_request_asks_for_the_remaining_tokens() -> None:
    body = protocol.generate(Continuation([5, 6, 7], 2, SAMPLING, seed=9, greedy=True, version=3)).body
    settings = body["sampling_params"]
    assert settings["max_new_tokens"] == 14
    assert settings["top_k"] == 1
    assert settings["stop_token_ids"] == [1, 2]
    assert settings["temperature"] == 0.7
    assert settings["sampling_seed"] == 9
    assert (
        body["extra_key"]
        != protocol.generate(Continuation([5], 0, SAMPLING, seed=9, greedy=True, version=4)).body["extra_key"]
    )


@pytest.mark.parametrize("version", ["0.5.11", "0.4.6.post1", "unknown", "None", ""])
def test_old_or_unknown_server_versions_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match=r"version.*0\.5\.12 or newer"):
        protocol.capabilities(version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.21.post2", "0.5.21.dev7+gabc", "0.6.0", "1.0.0"])
def test_version_suffixes_and_later_releases_are_accepted(version: str) -> None:
    assert protocol.capabilities(version) == protocol.Capabilities(
        update_session=True, token_versions=True, supports=True
    )


# ---- answers


def answer(tokens: list[int], versions: list[tuple[str, int, int]], **finish: Any) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": finish or {"type": "stop", "matched": 1},
            "output_token_logprobs": [[-0.5 * index, token, None] for index, token in enumerate(tokens)],
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in versions],
        },
    }


NEW_SERVER, OLD_SERVER = protocol.capabilities("0.5.21"), protocol.capabilities("0.5.18")


def test_an_answer_is_parsed_with_the_versions_of_its_tokens() -> None:
    partial = protocol.parse_generated(answer([7, 8, 1], [("3", 0, 2), ("4", 2, 3)]), NEW_SERVER, version=3)
    assert partial == PartialResponse((7, 8, 1), (0.0, -0.5, -1.0), (3, 2, 4, 1), "")


def test_without_reported_versions_all_tokens_have_the_current_one() -> None:
    assert protocol.parse_generated(answer([7, 8], []), OLD_SERVER, version=5).spans == (5, 2)


def test_an_aborted_answer_has_its_reason() -> None:
    aborted = answer([7], [("3", 0, 1)], type="abort", message="Abort in waiting queue")
    assert protocol.parse_generated(aborted, NEW_SERVER, version=3).abort_reason == "Abort in waiting queue"
    assert protocol.parse_generated(answer([], [], type="abort"), NEW_SERVER, version=3) == PartialResponse(
        (), (), (), "aborted"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        [],
        {"meta_info": None},
        {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[0.1]]}},
        answer([7, 8], [("default", 0, 2)]),
        answer([7, 8], [("3", 0, 1)]),
        answer([7, 8], []),
    ],
)
def test_a_malformed_answer_raises_an_error(wrong: Any) -> None:
    with pytest.raises(EngineError, match="SGLang server"):
        protocol.parse_generated(wrong, NEW_SERVER, version=3)


def test_a_token_drawn_from_no_probabilities_raises_an_error() -> None:
    """The server replaces it by a stop token, and reports the end of the sequence."""
    with pytest.raises(EngineError, match=r"not numbers \(NaN\): the model has diverged, or its dtype"):
        protocol.parse_generated(answer([7, 1], [("3", 0, 2)], type="stop", matched="NaN happened"), NEW_SERVER, 3)


@pytest.mark.parametrize(
    ("preferred", "unknown"),
    [
        ({}, []),
        ({"preferred_sampling_params": None}, []),
        ({"preferred_sampling_params": {"top_k": 20, "repetition_penalty": 1.3, "regex": "a"}}, []),
        (
            {"preferred_sampling_params": '{"watermark": true, "beam_width": 2, "top_p": 0.5}'},
            ["beam_width", "watermark"],
        ),
    ],
)
def test_preferences_of_a_server_are_overruled_or_named(preferred: dict[str, Any], unknown: list[str]) -> None:
    assert protocol.unknown_preferences(preferred) == unknown


# ---- truncated sampling


TRUNCATED = Sampling(0.7, 16, (1, 2), ("Q:",), Truncation(64, 0.9, 0.05))


@pytest.mark.parametrize("release", [release for release in RELEASES if protocol.capabilities(release).supports])
def test_a_truncated_sampling_request_has_limits_stops_and_asks_for_supports(release: str) -> None:
    body = protocol.generate(Continuation([5], 0, TRUNCATED, seed=9, greedy=False, version=3)).body
    settings = body["sampling_params"]
    assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (64, 0.9, 0.05)
    assert (settings["stop"], settings["stop_token_ids"], settings["no_stop_trim"]) == (["Q:"], [1, 2], True)
    assert body["return_sampling_mask"] is True
    assert set(body) <= {"input_ids", *RELEASES[release]["routes"]["/generate"]["optional"]}
    assert set(settings) <= set(RELEASES[release]["sampling_params"])


def test_greedy_and_plain_requests_are_not_truncated() -> None:
    for sampling, greedy, top_k in ((TRUNCATED, True, 1), (SAMPLING, True, 1), (SAMPLING, False, -1)):
        body = protocol.generate(Continuation([5], 0, sampling, seed=9, greedy=greedy, version=3)).body
        settings = body["sampling_params"]
        assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (top_k, 1.0, 0.0)
        assert "return_sampling_mask" not in body


def masked_answer(supports: Any, logprobs: Any) -> dict[str, Any]:
    whole = answer([7, 8], [("3", 0, 2)], type="length")
    whole["meta_info"] |= {"output_token_sampling_mask": supports, "output_token_sampling_logprobs": logprobs}
    return whole


def test_supports_and_the_log_probabilities_over_them_are_parsed() -> None:
    whole = masked_answer([[7, 9], [8]], [-0.25, 0.0])
    partial = protocol.parse_generated(whole, NEW_SERVER, version=3, with_supports=True)
    assert (partial.supports, partial.logprobs, partial.at_limit) == (((7, 9), (8,)), (-0.25, 0.0), True)
    assert protocol.parse_generated(whole, NEW_SERVER, version=3).logprobs == (0.0, -0.5)


@pytest.mark.parametrize(
    ("supports", "logprobs"),
    [(None, None), ([[7, 9]], [-0.25]), ([[7, 9], [9]], [-0.25, 0.0]), ([[7, 9], [8]], [-0.25])],
)
def test_supports_that_do_not_fit_the_tokens_raise_an_error(supports: Any, logprobs: Any) -> None:
    with pytest.raises(EngineError, match=r"supports.*rollout\.top_k"):
        protocol.parse_generated(masked_answer(supports, logprobs), NEW_SERVER, version=3, with_supports=True)
