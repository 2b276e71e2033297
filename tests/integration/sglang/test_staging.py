"""New weights are staged while the server generates; it pauses only to load them."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flowrt.engines.hf import load_model, named_parameters
from flowrt.errors import EngineError

from .playing import (
    MANY_TOKENS,
    STANDIN,
    drain,
    fake_python,
    is_complete,
    make_engine,
    prompts,
    snapshot,
    start_standin,
    wait_for_generation,
)

__all__ = ["fake_python", "make_engine", "start_standin"]  # fixtures
PAUSE, UPDATE = "/pause_generation", "/update_weights_from_disk"


def staged(folder: Path) -> list[Path]:
    return list(folder.glob("flowrt-weights-*"))


def test_a_checkpoint_is_written_before_the_server_is_paused(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", stage=str(tmp_path), tokens=MANY_TOKENS)
    before = len(standin.request("/routes"))
    engine.add(prompts(4))
    wait_for_generation(standin)
    weights = snapshot(checkpoint, 1)
    engine.prepare(weights)()
    assert PAUSE not in standin.request("/routes")[before:]
    [directory] = staged(tmp_path)
    assert load_file(directory / "model.safetensors").keys() == named_parameters(load_model(checkpoint)).keys()
    assert engine.prepare(weights) is None
    engine.swap(weights)
    assert [body["model_path"] for route, body in standin.request("/bodies") if route == UPDATE][1:] == [str(directory)]
    assert not staged(tmp_path)
    done = drain(engine)
    assert len(done) == 4
    assert all(is_complete(response, MANY_TOKENS) and response.spans[-2] == 1 for response in done.values())
    assert engine.prepare(snapshot(checkpoint, 2)) is None  # no sequence is running that a pause would delay


def test_failed_staging_does_not_pause_the_server(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    standin = start_standin("0.5.21")
    shared = tmp_path / "shared"
    shared.mkdir()
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", stage=str(shared), max_server_restarts=0)
    before = len(standin.request("/routes"))
    shared.rmdir()
    engine.add(prompts(4))
    wait_for_generation(standin)
    weights = snapshot(checkpoint, 1)
    engine.prepare(weights)()  # the swap raises its error
    assert engine.prepare(weights) is None
    with pytest.raises(EngineError, match="which is no directory of this host"):
        engine.swap(weights)
    assert PAUSE not in standin.request("/routes")[before:]


def test_staged_weights_of_a_dead_server_are_loaded_by_its_replacement(
    make_engine: Callable[..., Any],
    fake_python: Callable[[str], Path],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STANDIN", "0.5.21,")
    shared = tmp_path / "shared"
    shared.mkdir()
    engine = make_engine(python=str(fake_python(f'exec {sys.executable} {STANDIN} "$@"')), stage=str(shared))
    engine.add(prompts(4))
    weights = snapshot(checkpoint, 1)
    engine.prepare(weights)()
    assert staged(shared)
    first = engine.server_pid
    os.killpg(first, signal.SIGKILL)
    engine.swap(weights)
    done = drain(engine)
    assert engine.server_pid != first
    assert engine.version == 1
    assert len(done) == 4
    assert all(is_complete(response) for response in done.values())
    assert not staged(shared)


def test_a_closed_engine_removes_its_staged_weights(
    start_standin: Callable[..., Any], make_engine: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    standin = start_standin("0.5.21")
    engine = make_engine(url=f"http://127.0.0.1:{standin.port}", stage=str(tmp_path))
    engine.add(prompts(1))
    engine.prepare(snapshot(checkpoint, 1))()
    assert staged(tmp_path)
    engine.close()
    assert not staged(tmp_path)
