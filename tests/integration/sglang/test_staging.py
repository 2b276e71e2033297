"""New weights are made ready while the server generates: it stands still for loading them alone."""

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

from .playing import STANDIN, drain, engine_of, in_place, is_whole, play, prompts, snapshot, until_some_are_generated

__all__ = ["engine_of", "in_place", "play"]  # fixtures
PAUSE, UPDATE = "/pause_generation", "/update_weights_from_disk"


def staged(folder: Path) -> list[Path]:
    return list(folder.glob("flowrt-weights-*"))


def test_a_checkpoint_is_written_before_the_server_is_paused(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", stage=str(tmp_path))
    before = len(one.ask("/asked"))
    engine.add(prompts(4))
    until_some_are_generated(one)
    weights = snapshot(checkpoint, 1)
    engine.prepare(weights)()
    assert PAUSE not in one.ask("/asked")[before:]
    [directory] = staged(tmp_path)
    assert load_file(directory / "model.safetensors").keys() == named_parameters(load_model(checkpoint)).keys()
    assert engine.prepare(weights) is None
    engine.swap(weights)
    assert [body["model_path"] for route, body in one.ask("/said") if route == UPDATE][1:] == [str(directory)]
    assert not staged(tmp_path)
    done = drain(engine)
    assert len(done) == 4
    assert all(is_whole(response) and response.spans[-2] == 1 for response in done.values())
    assert engine.prepare(snapshot(checkpoint, 2)) is None  # nothing runs that would have to stand


def test_failed_staging_does_not_pause_the_server(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    one = play("0.5.21")
    shared = tmp_path / "shared"
    shared.mkdir()
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", stage=str(shared), max_server_restarts=0)
    before = len(one.ask("/asked"))
    shared.rmdir()
    engine.add(prompts(4))
    until_some_are_generated(one)
    weights = snapshot(checkpoint, 1)
    engine.prepare(weights)()  # is told by the swap
    assert engine.prepare(weights) is None
    with pytest.raises(EngineError, match="which is no directory of this host"):
        engine.swap(weights)
    assert PAUSE not in one.ask("/asked")[before:]


def test_staged_weights_of_a_dead_server_go_to_its_replacement(
    engine_of: Callable[..., Any],
    in_place: Callable[[str], Path],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STANDIN", "0.5.21,")
    shared = tmp_path / "shared"
    shared.mkdir()
    engine = engine_of(python=str(in_place(f'exec {sys.executable} {STANDIN} "$@"')), stage=str(shared))
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
    assert all(is_whole(response) for response in done.values())
    assert not staged(shared)


def test_an_engine_that_is_closed_leaves_nothing_of_what_it_staged(
    play: Callable[..., Any], engine_of: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", stage=str(tmp_path))
    engine.add(prompts(1))
    engine.prepare(snapshot(checkpoint, 1))()
    assert staged(tmp_path)
    engine.close()
    assert not staged(tmp_path)
