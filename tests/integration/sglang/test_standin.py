"""The engine against a stand-in with SGLang's protocol: releases, failures, recovery; no SGLang is needed."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.engines.hf import load_model, named_parameters
from flowrt.engines.server.engine import ServerRollout
from flowrt.errors import ConfigError, EngineError, TransferError
from flowrt.recipes.config_io import parse
from flowrt.roles.engine_setup import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.sglang.standin import RELEASES

from .playing import (
    MANY_TOKENS,
    TOKENS,
    drain,
    is_complete,
    make_engine,
    prompts,
    snapshot,
    start_standin,
    wait_for_generation,
)

__all__ = ["make_engine", "start_standin"]  # fixtures


@pytest.mark.parametrize(
    ("release", "weights"),
    [
        *[(release, "disk") for release in ("0.5.12.post1", "0.5.18", "0.5.19", "0.5.23")],
        *[(release, "tensor") for release in ("0.5.20", "0.5.21")],
    ],
)
def test_weights_change_during_running_sequences(
    release: str, weights: str, start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """Every token has the right version; where the server reports none, running sequences are aborted and resumed."""
    standin = start_standin(release)
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", weights=weights, tokens=MANY_TOKENS)
    assert engine.room == 4
    engine.add(prompts(4))
    wait_for_generation(standin)
    engine.swap(snapshot(checkpoint, 1))
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3]
    assert all(is_complete(response, MANY_TOKENS) and response.spans[-2] == 1 for response in done.values())
    assert any(response.spans[0] == 0 for response in done.values())
    routes = standin.request("/routes")
    aborted = release in ("0.5.12.post1", "0.5.18")
    assert (routes.count("/generate") > 4) == aborted
    later_routes = routes[routes.index("/generate") :]
    update = f"/update_weights_from_{weights}"
    assert (
        later_routes.index("/pause_generation")
        < later_routes.index(update)
        < later_routes.index("/continue_generation")
    )


@pytest.mark.parametrize(("pause", "flush"), [("retract", True), ("in_place", False), ("abort", True)])
def test_server_options_follow_the_configuration(
    pause: str, flush: bool, start_standin: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """Running sequences are recomputed, kept or aborted; only those that are kept need the KV cache."""
    standin = start_standin("0.5.23")
    flags = ["--model", str(checkpoint), "--run-dir", str(tmp_path), "--rollout.engine", "sglang"]
    server = ["--rollout.sglang.url", f"http://127.0.0.1:{standin.port}", "--rollout.sglang.pause", pause]
    limits = ["--rollout.workers", "1", "--rollout.max-running-requests", "4", "--rollout.max-new-tokens", "100"]
    engine = rollout_engine(parse(["arithmetic", *flags, *server, *limits]))
    assert isinstance(engine, ServerRollout)
    with contextlib.closing(engine):
        engine.start()
        engine.add(prompts(4))
        wait_for_generation(standin)
        before = len(standin.request("/bodies"))
        engine.swap(snapshot(checkpoint, 1))
        if pause == "abort":
            wait_for_generation(standin, 8)  # all are sent again
        engine.swap(snapshot(checkpoint, 2))
        assert len(drain(engine)) == 4
    bodies = [(route, body) for route, body in standin.request("/bodies")[before:] if route != "/generate"]
    assert [body["mode"] for route, body in bodies if route == "/pause_generation"] == [pause] * 2
    updates = [body["flush_cache"] for route, body in bodies if route == "/update_weights_from_disk"]
    assert updates == [flush] * 2


def test_every_sampling_field_is_sent_with_the_values_of_the_run(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    """What a request leaves out, the server's operator may set."""
    standin = start_standin("0.5.21", preferred_sampling_params='{"repetition_penalty": 1.3, "top_k": 20}')
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    engine.add(prompts(1))
    drain(engine)
    [sent] = [body["sampling_params"] for route, body in standin.request("/bodies") if route == "/generate"]
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_new_tokens": 0}
    run = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": TOKENS, "ignore_eos": False}
    assert sent.items() >= (neutral | run).items()
    fields = set.intersection(*[set(release["sampling_params"]) for release in RELEASES.values()])
    assert set(sent) == fields


def test_a_server_that_prefers_values_which_no_request_overrules_is_refused(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.23", preferred_sampling_params={"beam_width": 4, "top_k": 20})
    with pytest.raises(EngineError, match=r"prefers values of beam_width, .*--preferred-sampling-params"):
        make_engine(url=f"http://127.0.0.1:{standin.port}")


def test_stop_strings_need_a_server_with_a_tokenizer(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.21", skip_tokenizer_init=True)
    url = f"http://127.0.0.1:{standin.port}"
    with pytest.raises(EngineError, match=rf"{url} has no tokenizer, which rollout\.stop needs; start it without"):
        make_engine(url=url, stop=("9",))
    engine = make_engine(url=url)
    engine.add(prompts(1))
    assert len(drain(engine)) == 1


def test_a_sequence_that_the_server_ends_at_another_token_goes_on(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    """A server with a tokenizer stops at tokens of it that are none of the run's stop tokens."""
    standin = start_standin("0.5.21", stops_after=15)
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    engine.add(prompts(2))
    done = drain(engine)
    assert all(is_complete(response) and response.truncated for response in done.values())
    sent = [body["sampling_params"] for route, body in standin.request("/bodies") if route == "/generate"]
    assert sorted(parameters["max_new_tokens"] for parameters in sent) == [10, 10, 25, 25, 40, 40]


def test_a_sequence_that_the_server_cuts_is_truncated_with_a_warning(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    standin = start_standin("0.5.21", cuts_after=15)
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    engine.add(prompts(2))
    done = drain(engine)
    assert [(len(response.tokens), response.truncated) for response in done.values()] == [(15, True)] * 2
    [warning] = [record.getMessage() for record in caplog.records if "cuts sequences" in record.getMessage()]
    assert "before their limit (40): 15 tokens after a prompt of 2 tokens; start it with a larger" in warning


def test_each_worker_has_the_server_of_its_number(
    start_standin: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """Two workers with a server each; a third one has none."""
    standins = [start_standin("0.5.21"), start_standin("0.5.21")]
    urls = [f"http://127.0.0.1:{standin.port}" for standin in standins]
    flags = ["--model", str(checkpoint), "--run-dir", str(tmp_path), "--rollout.engine", "sglang"]
    config = parse(["arithmetic", *flags, "--rollout.workers", "2", "--rollout.sglang.url", *urls])
    for index, standin in enumerate(standins):
        engine = rollout_engine(config, f"rollout-{index}")
        assert isinstance(engine, ServerRollout)
        with contextlib.closing(engine):
            engine.start()
            engine.add(prompts(1 + index))
            assert len(drain(engine)) == 1 + index
        assert standin.request("/routes").count("/generate") == 1 + index
    with pytest.raises(ConfigError, match=r"worker rollout-2 has no SGLang server: .*for rollout-0, rollout-1; name"):
        rollout_engine(config, "rollout-2")


@pytest.mark.parametrize("shared", [False, True])
def test_weights_on_disk_are_readable_by_another_process_and_removed_afterwards(
    shared: bool,
    start_standin: Callable[..., Any],
    make_engine: Callable[..., Any],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Staged in memory of this process, or in a shared directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", stage=str(tmp_path) if shared else "")
    engine.swap(snapshot(checkpoint, 1))
    parameters = named_parameters(load_model(checkpoint))
    assert standin.request("/loaded") == {name: list(tensor.shape) for name, tensor in parameters.items()}
    assert not list(tmp_path.glob("flowrt-weights-*"))
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in descriptors if "flowrt-weights" in path]


def _is_open(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_failed_weight_update_is_completed_before_generation_resumes(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", weights="tensor")
    engine.add(prompts(4))
    wait_for_generation(standin)
    standin.request("/fail_next", {"route": "/update_weights_from_tensor"})
    engine.swap(snapshot(checkpoint, 1))
    done = drain(engine)
    assert all(is_complete(response) for response in done.values())
    assert len(done) == 4
    routes = standin.request("/routes")
    failed = len(routes) - 1 - routes[::-1].index("/update_weights_from_tensor")
    # The session was ended, and all weights were sent again before generation resumed.
    again = routes[routes.index("/pause_generation", 4) :]
    assert again[again.index("/update_weights_from_tensor") + 1] == "/end_weight_update"
    assert again.count("/begin_weight_update") == 2
    assert "/continue_generation" in routes[failed:]
    assert engine.room == 4


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_server_that_was_left_paused_is_used_again(
    mode: str, start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    """By a worker that was killed, or failed, during an update."""
    standin = start_standin("0.5.21")
    standin.request("/pause_generation", {"mode": mode})
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    engine.add(prompts(1))
    assert all(is_complete(response) for response in drain(engine).values())


def test_session_that_was_left_open_is_ended_before_the_next(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    """Left open by an update that timed out, or by a worker that was killed during one."""
    standin = start_standin("0.5.21")
    standin.request("/begin_weight_update", {})
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", weights="tensor", update_s=4.0)
    standin.request("/fail_next", {"route": "/update_weights_from_tensor", "status": 0})
    engine.swap(snapshot(checkpoint, 1))
    engine.add(prompts(1))
    assert all(is_complete(response) and response.spans == (1, TOKENS) for response in drain(engine).values())


def test_failed_requests_are_retried_and_refused_ones_end_the_engine(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    standin.request("/fail_next", {"route": "/generate", "status": 500})
    engine.add(prompts(2))
    assert all(is_complete(response) for response in drain(engine).values())
    standin.request("/fail_next", {"route": "/generate", "status": 400})
    engine.add(prompts(1))
    with pytest.raises(EngineError, match=r"/generate refused \(HTTP 400\): /generate was told to fail"):
        drain(engine)


def test_exhausted_restarts_end_the_engine_with_the_error_of_the_server(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", max_server_restarts=0)
    standin.request("/fail_next", {"route": "/update_weights_from_disk"})
    with pytest.raises(EngineError, match=r"restarts \(0\).*version 1 by disk.*was told to fail"):
        engine.swap(snapshot(checkpoint, 1))
    assert engine.room == 0


def test_weights_of_another_model_are_refused_before_they_are_sent(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}")
    before = standin.request("/routes").count("/update_weights_from_disk")
    with pytest.raises(TransferError, match="the same checkpoint"):
        engine.swap(Snapshot.take(1, {"weight": torch.zeros(5)}))
    assert standin.request("/routes").count("/update_weights_from_disk") == before


def test_server_on_an_npu_receives_no_weights_over_a_process_group(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.21", "npu")
    with pytest.raises(ConfigError, match=r"works on an NPU.*use disk or tensor"):
        make_engine(url=f"http://127.0.0.1:{standin.port}", weights="broadcast")
    make_engine(url=f"http://127.0.0.1:{standin.port}")


@pytest.mark.parametrize("size", ["pp_size", "dp_size"])
def test_server_with_pipeline_or_data_parallelism_is_refused(
    size: str, start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    standin = start_standin("0.5.21", **{size: 2})
    url = f"http://127.0.0.1:{standin.port}"
    with pytest.raises(EngineError, match=rf"{url} has {size} 2: .*use 1, and more rollout workers"):
        make_engine(url=url)
    assert set(standin.request("/routes")) <= {"/health", "/server_info", "/routes"}
    other = start_standin("0.5.21", pp_size=1, dp_size=1, tp_size=2)
    assert make_engine(url=f"http://127.0.0.1:{other.port}").room == 4


@pytest.mark.parametrize("answers", [True, False])
def test_server_that_never_joins_a_group_is_reported_within_the_timeout(
    answers: bool, start_standin: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    """It answers without joining, as the stand-in does, or it does not answer at all."""
    standin = start_standin("0.5.21")
    url = f"http://127.0.0.1:{standin.port}"
    if not answers:
        standin.request("/fail_next", {"route": "/init_weights_update_group", "status": 0})
    late = rf"{url}/init_weights_update_group did not answer|waited .*{url}|version 0 by broadcast: the server"
    with pytest.raises(EngineError, match=late):
        make_engine(url=url, weights="broadcast", update_s=3.0)
    assert "/init_weights_update_group" in standin.request("/routes")
    engine = make_engine(url=url)
    engine.add(prompts(2))
    assert all(is_complete(response) for response in drain(engine).values())


def test_server_that_does_not_answer_within_the_timeout_counts_as_failed(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", max_server_restarts=0, update_s=1.0)
    os.kill(standin.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"did not answer within 1 s|waited 1\.0 s for version 1"):
        engine.swap(snapshot(checkpoint, 1))
