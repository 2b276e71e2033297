"""What we say to an SGLang server, against what its releases take: sglang_requests.json, read from their sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.options import Truncation
from flowrt.engines.sglang import protocol as said
from flowrt.errors import EngineError

RELEASES: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_requests.json").read_text())
SAMPLING = said.Sampling(temperature=0.7, max_new_tokens=16, stop_token_ids=(1, 2))
BUCKETS = [
    [said.Parameter("a", "float32", (2, 3)), said.Parameter("b", "float32", (4,))],
    [said.Parameter("c", "float32", (5,))],
]
SESSION = ["/begin_weight_update", "/end_weight_update"]


def everything(can: said.Capabilities) -> list[said.Call]:
    """Each request that a server of such abilities may be sent."""
    return [
        said.generate([5, 6, 7], SAMPLING, generated=1, seed=2**62, greedy=False, version=3),
        *[said.pause(mode) for mode in ("abort", "retract", "in_place")],
        said.resume(),
        *said.load_from_disk("/somewhere", 3, flush=True),
        *said.load_from_tensors(can, ["AAAA", "BBBB"], 1, 3, flush=True),
        said.join_group("group", "127.0.0.1", 4000, 2),
        *said.load_from_broadcast(can, BUCKETS, "group", 3, flush=True),
        said.leave_group("group"),
        said.checksum(),
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_takes_all_that_we_say(release: str) -> None:
    """Routes that exist, no field that is not known, none missing that is needed."""
    takes = RELEASES[release]
    for call in everything(said.capabilities(release)):
        fields = takes["routes"][call.route]
        assert set(call.body) <= {*fields["required"], *fields["optional"]}, call.route
        assert set(fields["required"]) <= set(call.body), call.route
        assert set(call.body.get("sampling_params", {})) <= set(takes["sampling_params"])
    assert "/server_info" in takes["get"]
    assert "/health" in takes["get"]


@pytest.mark.parametrize("release", RELEASES)
def test_abilities_are_those_of_the_release(release: str) -> None:
    can = said.capabilities(release)
    assert can.token_versions == RELEASES[release]["token_versions"]
    assert can.update_session == (SESSION[0] in RELEASES[release]["routes"])


@pytest.mark.parametrize("release", RELEASES)
def test_a_session_encloses_what_comes_in_parts_where_there_are_sessions(release: str) -> None:
    can = said.capabilities(release)
    for calls in (
        said.load_from_tensors(can, ["A", "B"], 1, 3, flush=True),
        said.load_from_broadcast(can, BUCKETS, "group", 3, flush=True),
    ):
        routes = [call.route for call in calls]
        assert [route for route in routes if route in SESSION] == (SESSION if can.update_session else [])
        if can.update_session:
            assert [routes[0], routes[-1]] == SESSION
    assert [call.route for call in said.load_from_disk("/x", 3, flush=True)] == ["/update_weights_from_disk"]


def test_only_the_last_part_names_the_version_and_empties_the_cache() -> None:
    can = said.capabilities("0.5.21")
    for flush in (True, False):
        parts = [call.body for call in said.load_from_broadcast(can, BUCKETS, "group", 3, flush=flush)][1:-1]
        assert [part.get("weight_version") for part in parts] == [None, "3"]
        assert [part["flush_cache"] for part in parts] == [False, flush]


def test_every_rank_gets_its_copy_of_the_tensors() -> None:
    call = said.load_from_tensors(said.capabilities("0.5.20"), ["A"], 2, 3, flush=True)[0]
    assert call.body["serialized_named_tensors"] == ["A", "A"]


def test_what_is_left_of_an_answer_is_asked_for() -> None:
    body = said.generate([5, 6, 7], SAMPLING, generated=2, seed=9, greedy=True, version=3).body
    settings = body["sampling_params"]
    assert settings["max_new_tokens"] == 14
    assert settings["top_k"] == 1
    assert settings["stop_token_ids"] == [1, 2]
    assert settings["temperature"] == 0.7
    assert settings["sampling_seed"] == 9
    assert (
        body["extra_key"] != said.generate([5], SAMPLING, generated=0, seed=9, greedy=True, version=4).body["extra_key"]
    )


@pytest.mark.parametrize("version", ["0.5.11", "0.4.6.post1", "unknown", "None", ""])
def test_servers_that_are_too_old_or_of_no_release_are_refused_by_name(version: str) -> None:
    with pytest.raises(EngineError, match=r"version.*0\.5\.12 or newer"):
        said.capabilities(version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.21.post2", "0.5.21.dev7+gabc", "0.6.0", "1.0.0"])
def test_suffixes_and_later_releases_are_read(version: str) -> None:
    assert said.capabilities(version) == said.Capabilities(update_session=True, token_versions=True, supports=True)


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


NEW, OLD = said.capabilities("0.5.21"), said.capabilities("0.5.18")


def test_an_answer_is_read_with_the_versions_of_its_tokens() -> None:
    piece = said.parse_generated(answer([7, 8, 1], [("3", 0, 2), ("4", 2, 3)]), NEW, version=3)
    assert piece == said.PartialResponse((7, 8, 1), (0.0, -0.5, -1.0), (3, 2, 4, 1), "")


def test_where_no_versions_are_told_all_tokens_are_of_the_one_that_was_in_use() -> None:
    assert said.parse_generated(answer([7, 8], []), OLD, version=5).spans == (5, 2)


def test_a_cut_answer_says_why() -> None:
    cut = answer([7], [("3", 0, 1)], type="abort", message="Abort in waiting queue")
    assert said.parse_generated(cut, NEW, version=3).abort_reason == "Abort in waiting queue"
    assert said.parse_generated(answer([], [], type="abort"), NEW, version=3) == said.PartialResponse(
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
def test_an_answer_of_another_form_is_an_error_that_says_so(wrong: Any) -> None:
    with pytest.raises(EngineError, match="SGLang server"):
        said.parse_generated(wrong, NEW, version=3)


# ---- truncated sampling


TRUNCATED = said.Sampling(0.7, 16, (1, 2), ("Q:",), Truncation(64, 0.9, 0.05))


@pytest.mark.parametrize("release", [one for one in RELEASES if said.capabilities(one).supports])
def test_a_request_has_the_stops_and_limits_and_asks_for_supports(release: str) -> None:
    body = said.generate([5], TRUNCATED, generated=0, seed=9, greedy=False, version=3).body
    settings = body["sampling_params"]
    assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (64, 0.9, 0.05)
    assert (settings["stop"], settings["stop_token_ids"], settings["no_stop_trim"]) == (["Q:"], [1, 2], True)
    assert body["return_sampling_mask"] is True
    assert set(body) <= {"input_ids", *RELEASES[release]["routes"]["/generate"]["optional"]}
    assert set(settings) <= set(RELEASES[release]["sampling_params"])


def test_greedy_and_plain_requests_are_not_truncated() -> None:
    for sampling, greedy, top_k in ((TRUNCATED, True, 1), (SAMPLING, True, 1), (SAMPLING, False, -1)):
        body = said.generate([5], sampling, generated=0, seed=9, greedy=greedy, version=3).body
        settings = body["sampling_params"]
        assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (top_k, 1.0, 0.0)
        assert "return_sampling_mask" not in body


def masked_answer(supports: Any, logprobs: Any) -> dict[str, Any]:
    whole = answer([7, 8], [("3", 0, 2)], type="length")
    whole["meta_info"] |= {"output_token_sampling_mask": supports, "output_token_sampling_logprobs": logprobs}
    return whole


def test_supports_and_the_log_probabilities_over_them_are_read() -> None:
    whole = masked_answer([[7, 9], [8]], [-0.25, 0.0])
    piece = said.parse_generated(whole, NEW, version=3, with_supports=True)
    assert (piece.supports, piece.logprobs, piece.at_limit) == (((7, 9), (8,)), (-0.25, 0.0), True)
    assert said.parse_generated(whole, NEW, version=3).logprobs == (0.0, -0.5)


@pytest.mark.parametrize(
    ("supports", "logprobs"),
    [(None, None), ([[7, 9]], [-0.25]), ([[7, 9], [9]], [-0.25, 0.0]), ([[7, 9], [8]], [-0.25])],
)
def test_supports_that_do_not_fit_the_tokens_are_an_error(supports: Any, logprobs: Any) -> None:
    with pytest.raises(EngineError, match=r"supports.*rollout\.top_k"):
        said.parse_generated(masked_answer(supports, logprobs), NEW, version=3, with_supports=True)
