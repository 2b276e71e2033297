"""The engine against a process that keeps to SGLang's protocol: releases, failures, recovery; no SGLang is needed."""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.engines.hf import load_model, named_parameters
from flowrt.engines.sglang.engine import SglangRollout
from flowrt.errors import ConfigError, EngineError, TransferError
from flowrt.recipes.config_io import parse
from flowrt.roles.engines import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot

from .playing import DEADLINE_S, TOKENS, drain, engine_of, is_whole, play, prompts, snapshot, until_some_are_generated

__all__ = ["engine_of", "play"]  # fixtures


@pytest.mark.parametrize(
    ("release", "weights"),
    [
        *[(release, "disk") for release in ("0.5.12.post1", "0.5.18", "0.5.19", "0.5.23")],
        *[(release, "tensor") for release in ("0.5.20", "0.5.21")],
    ],
)
def test_weights_change_during_running_sequences(
    release: str, weights: str, play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path
) -> None:
    """Every token's version is right; where the server cannot tell, what runs is cut and sent on."""
    one = play(release)
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", weights=weights)
    assert engine.room == 4
    engine.add(prompts(4))
    until_some_are_generated(one)
    engine.swap(snapshot(checkpoint, 1))
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3]
    assert all(is_whole(response) and response.spans[-2] == 1 for response in done.values())
    assert any(response.spans[0] == 0 for response in done.values())
    asked = one.ask("/asked")
    cut = release in ("0.5.12.post1", "0.5.18")
    assert (asked.count("/generate") > 4) == cut
    change = asked[asked.index("/generate") :]
    update = f"/update_weights_from_{weights}"
    assert change.index("/pause_generation") < change.index(update) < change.index("/continue_generation")


@pytest.mark.parametrize(("pause", "flush"), [("retract", True), ("in_place", False), ("abort", True)])
def test_server_options_follow_the_configuration(
    pause: str, flush: bool, play: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """Computed again, kept or cut; only what is kept needs the keys that are in the cache."""
    one = play("0.5.23")
    flags = ["--model", str(checkpoint), "--run-dir", str(tmp_path), "--rollout.engine", "sglang"]
    server = ["--rollout.sglang.url", f"http://127.0.0.1:{one.port}", "--rollout.sglang.pause", pause]
    many = ["--rollout.workers", "1", "--rollout.max-running-requests", "4", "--rollout.max-new-tokens", "40"]
    engine = rollout_engine(parse(["arithmetic", *flags, *server, *many]))
    assert isinstance(engine, SglangRollout)
    with contextlib.closing(engine):
        engine.start()
        engine.add(prompts(4))
        until_some_are_generated(one)
        before = len(one.ask("/said"))
        engine.swap(snapshot(checkpoint, 1))
        engine.swap(snapshot(checkpoint, 2))
        assert len(drain(engine)) == 4
    said = [(route, body) for route, body in one.ask("/said")[before:] if route != "/generate"]
    assert [body["mode"] for route, body in said if route == "/pause_generation"] == [pause] * 2
    updates = [body["flush_cache"] for route, body in said if route == "/update_weights_from_disk"]
    assert updates == [flush] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_weights_by_disk_are_read_by_another_process_and_nothing_of_them_stays(
    shared: bool,
    play: Callable[..., Any],
    engine_of: Callable[..., Any],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In memory of this process, or in a directory that both have."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", stage=str(tmp_path) if shared else "")
    engine.swap(snapshot(checkpoint, 1))
    parameters = named_parameters(load_model(checkpoint))
    assert one.ask("/loaded") == {name: list(one.shape) for name, one in parameters.items()}
    assert not list(tmp_path.glob("flowrt-weights-*"))
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in descriptors if "flowrt-weights" in path]


def _is_open(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_failed_weight_update_is_completed_before_generation_resumes(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", weights="tensor")
    engine.add(prompts(4))
    until_some_are_generated(one)
    one.ask("/fail_next", {"route": "/update_weights_from_tensor"})
    engine.swap(snapshot(checkpoint, 1))
    done = drain(engine)
    assert all(is_whole(response) for response in done.values())
    assert len(done) == 4
    asked = one.ask("/asked")
    failed = len(asked) - 1 - asked[::-1].index("/update_weights_from_tensor")
    # The session was ended, what ran was cut, and the weights came again, all of them, before it continued.
    again = asked[asked.index("/pause_generation", 4) :]
    assert again[again.index("/update_weights_from_tensor") + 1] == "/end_weight_update"
    assert again.count("/begin_weight_update") == 2
    assert "/continue_generation" in asked[failed:]
    assert engine.room == 4


def test_a_session_that_was_left_open_is_ended_before_the_next(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path
) -> None:
    """By a change that took too long, or by a worker that was killed in the middle of one."""
    one = play("0.5.21")
    one.ask("/begin_weight_update", {})
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", weights="tensor", update_s=4.0)
    one.ask("/fail_next", {"route": "/update_weights_from_tensor", "status": 0})
    engine.swap(snapshot(checkpoint, 1))
    engine.add(prompts(1))
    assert all(is_whole(response) and response.spans == (1, TOKENS) for response in drain(engine).values())


def test_failed_requests_are_repeated_and_refused_ones_end_the_engine(
    play: Callable[..., Any], engine_of: Callable[..., Any]
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}")
    one.ask("/fail_next", {"route": "/generate", "status": 500})
    engine.add(prompts(2))
    assert all(is_whole(response) for response in drain(engine).values())
    one.ask("/fail_next", {"route": "/generate", "status": 400})
    engine.add(prompts(1))
    with pytest.raises(EngineError, match=r"/generate refused \(HTTP 400\): /generate was told to fail"):
        drain(engine)


def test_request_that_fails_too_often_ends_the_engine_with_the_servers_error(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", max_server_restarts=0)
    one.ask("/fail_next", {"route": "/update_weights_from_disk"})
    with pytest.raises(EngineError, match=r"restarts \(0\).*version 1 by disk.*was told to fail"):
        engine.swap(snapshot(checkpoint, 1))
    assert engine.room == 0


def test_weights_of_another_model_are_refused_before_they_are_sent(
    play: Callable[..., Any], engine_of: Callable[..., Any]
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}")
    before = one.ask("/asked").count("/update_weights_from_disk")
    with pytest.raises(TransferError, match="the same checkpoint"):
        engine.swap(Snapshot.take(1, {"weight": torch.zeros(5)}))
    assert one.ask("/asked").count("/update_weights_from_disk") == before


def test_server_on_an_npu_receives_no_weights_over_a_process_group(
    play: Callable[..., Any], engine_of: Callable[..., Any]
) -> None:
    one = play("0.5.21", "npu")
    with pytest.raises(ConfigError, match=r"works on an NPU.*use disk or tensor"):
        engine_of(url=f"http://127.0.0.1:{one.port}", weights="broadcast")
    engine_of(url=f"http://127.0.0.1:{one.port}")


@pytest.mark.parametrize("size", ["pp_size", "dp_size"])
def test_server_with_several_parts_is_refused_before_any_weights_are_sent(
    size: str, play: Callable[..., Any], engine_of: Callable[..., Any]
) -> None:
    one = play("0.5.21", **{size: 2})
    url = f"http://127.0.0.1:{one.port}"
    with pytest.raises(EngineError, match=rf"{url} has {size} 2: .*use 1, and more rollout workers"):
        engine_of(url=url)
    assert set(one.ask("/asked")) <= {"/health", "/server_info", "/asked"}
    other = play("0.5.21", pp_size=1, dp_size=1, tp_size=2)
    assert engine_of(url=f"http://127.0.0.1:{other.port}").room == 4


@pytest.mark.parametrize("answers", [True, False])
def test_server_that_never_joins_a_group_is_named_in_time_and_the_worker_continues(
    answers: bool, play: Callable[..., Any], engine_of: Callable[..., Any]
) -> None:
    """It says that it has joined (the stand-in does nothing else), or nothing at all."""
    one = play("0.5.21")
    url = f"http://127.0.0.1:{one.port}"
    if not answers:
        one.ask("/fail_next", {"route": "/init_weights_update_group", "status": 0})
    began_s, update_s = time.monotonic(), 3.0
    late = rf"{url}/init_weights_update_group did not answer|waited .*{url}|version 0 by broadcast: the server"
    with pytest.raises(EngineError, match=late):
        engine_of(url=url, weights="broadcast", update_s=update_s)
    assert time.monotonic() - began_s < update_s + DEADLINE_S / 2
    assert "/init_weights_update_group" in one.ask("/asked")
    engine = engine_of(url=url)
    engine.add(prompts(2))
    assert all(is_whole(response) for response in drain(engine).values())


def test_a_server_that_does_not_answer_in_time_counts_as_gone(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", max_server_restarts=0, update_s=1.0)
    os.kill(one.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"waited 1\.0 s for version 1"):
        engine.swap(snapshot(checkpoint, 1))
